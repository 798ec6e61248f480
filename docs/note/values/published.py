"""The committed tables, and how a number of theirs is written in the note."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable
from functools import cache
from math import log2
from pathlib import Path

from driftlab.verdict.statistics import clopper_pearson

PUBLISHED = Path(__file__).resolve().parents[3] / "results" / "published"


class Row(dict[str, str]):
    """A row of a table: its cells by column."""

    def __missing__(self, column: str) -> str:
        raise ValueError(f"results/published/: no table row of {sorted(self)} has the column {column!r}")


@cache
def rows(table: str) -> tuple[Row, ...]:
    """The rows of a table, by its path under results/published/.

    Raises:
        OSError: where there is no such table.
    """
    with (PUBLISHED / table).open(encoding="utf-8", newline="") as file:
        return tuple(Row(cells) for cells in csv.DictReader(file))


def row(table: str, **where: str) -> Row:
    """The one row whose columns hold these values; ``_`` in a keyword stands for a space.

    Raises:
        ValueError: where no row does, or several do.
    """
    wanted = {column.replace("_", " "): value for column, value in where.items()}
    found = [r for r in rows(table) if all(r[column] == value for column, value in wanted.items())]
    if len(found) != 1:
        raise ValueError(f"results/published/{table}: {len(found)} rows with {wanted}, one is needed")
    return found[0]


def share(flags: Iterable[bool]) -> dict[str, str]:
    """How many are true, as ``proportion``."""
    flags = list(flags)
    return proportion(sum(flags), len(flags))


def proportion(count: int, n: int) -> dict[str, str]:
    """How many of how many, in percent, and Clopper and Pearson's 95 % interval."""
    low, high = clopper_pearson(count, n)
    percent = {"percent": count / n, "low": low, "high": high}
    return {"count": f"{count:,}", "n": f"{n:,}"} | {k: f"{100 * v:.1f}" for k, v in percent.items()}


def added(cells: Iterable[str]) -> dict[str, str]:
    """The sum of cells such as "9 of 10"."""
    pairs = [parts(cell) for cell in cells]
    return proportion(sum(c for c, _ in pairs), sum(n for _, n in pairs))


def parts(cell: str) -> tuple[int, int]:
    """Both numbers of a cell such as "9 of 10" or "0 / 17 (p = 0.00024)"."""
    first, second = re.findall(r"\d+", cell)[:2]
    return int(first), int(second)


def spread(cell: str) -> dict[str, str]:
    """The parts of a cell such as "6 (2 to 19)"."""
    mid, low, high = re.fullmatch(
        r"(\S+) \((\S+) to (\S+)\)", cell.replace("%", "").replace(" )", ")")
    ).groups()
    return {"mid": mid, "low": low, "high": high}


def ranged(values: Iterable[float], digits: int = 3) -> dict[str, str]:
    """Least and greatest."""
    values = list(values)
    return {"low": short(min(values), digits), "high": short(max(values), digits)}


def short(value: float, digits: int = 2) -> str:
    """So many digits: 0.17, 5.1e-07, 23170."""
    return f"{value:.{digits}g}"


def exponent(value: float, decimals: int = 1) -> str:
    """Of a power of two: 2**14.5 gives "14.5", 2**-29 gives "-29"."""
    return f"{log2(value):.{decimals}f}".removesuffix(".0")


def thousands(value: float) -> str:
    return f"{value:,.0f}"
