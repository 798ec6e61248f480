"""What answers are put together from: numbers in words, the seeds taken together, tables column by column.

What a kind of experiment measured is seed -> values (``Values``), the values lists of rows, a row a dict. A
table takes groups of such rows, one for each of its lines; a column says what it makes of a group.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

from driftlab.report.sections import Table
from driftlab.words import counted as counted

Values = Mapping[int, dict]
Row = Mapping[str, Any]
Rows = Sequence[Row]
Write = Callable[[float], str]


# Numbers in words.


def seeds(found: int | Sequence | Mapping) -> str:
    """ "1 seed", "2 seeds": a number, or whatever has one entry a seed."""
    return counted(found if isinstance(found, int) else len(found), "seed")


def listed(words: Iterable[object], last: str = " and ") -> str:
    """ "a", "a and b", "a, b and c"."""
    *head, tail = [str(word) for word in words]
    return f"{', '.join(head)}{last}{tail}" if head else tail


def two_digits(value: float) -> str:
    return f"{value:.2g}"


def share_of(hits: Iterable[object]) -> str:
    """ "2 of 3": how many of them hold."""
    found = [bool(hit) for hit in hits]
    return f"{sum(found)} of {len(found)}"


def between(low: float, high: float, write: Write = two_digits) -> str:
    """ "0.1 to 0.3", or one number where both read the same."""
    texts = write(low), write(high)
    return texts[0] if texts[0] == texts[1] else f"{texts[0]} to {texts[1]}"


def spread(found: Sequence[float], write: Write = two_digits) -> str | None:
    """ "median (least to greatest)", the median alone where all read alike; None of nothing."""
    if not found:
        return None
    low, middle, high = write(min(found)), write(median(found)), write(max(found))
    return middle if low == high else f"{middle} ({low} to {high})"


def percent(share: float) -> str:
    """Four digits; never rounded to 100 %, or to 0, where it is not."""
    if 0 < share < 1:
        share = min(max(share, 1e-4), 0.9999)
    return f"{100 * share:.4g} %"


def power_of_two(ratio: float) -> str:
    """ "2^-29.1", or "0"."""
    return f"2^{math.log2(ratio):.1f}" if ratio > 0 else "0"


def sentences(*said: str | None) -> str:
    """Those that there are, one after the other."""
    return " ".join(one for one in said if one)


def markdown_row(cells: Iterable[str]) -> str:
    """Of a table; a bar in a cell is no border."""
    return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


# The seeds taken together.


def first_of(values: Values) -> dict:
    """What the first seed measured: for what is the same in all."""
    return next(iter(values.values()))


def each(values: Values, *path: str) -> list:
    """What stands at ``path`` in every seed."""
    found = list(values.values())
    for key in path:
        found = [one[key] for one in found]
    return found


def all_rows(values: Values, *path: str, **wanted: object) -> list[Row]:
    """The rows that stand at ``path``, those of every seed in one list; of these the ``chosen``."""
    return chosen((row for rows in each(values, *path) for row in rows), **wanted)


def side_by_side(values: Values, *path: str) -> list[tuple[Row, ...]]:
    """Where every seed has the same list of rows at ``path``: the first rows of all, the second, ..."""
    return list(zip(*each(values, *path), strict=True))


def grouped(rows: Iterable[Row], *keys: str) -> dict[Any, list[Row]]:
    """By what they hold under ``keys`` (a tuple where these are several), in the order of the rows."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        which = tuple(row[key] for key in keys)
        found.setdefault(which if len(keys) > 1 else which[0], []).append(row)
    return found


def chosen(rows: Iterable[Row], **wanted: object) -> list[Row]:
    """Those that hold all this; ``pass_`` is the key "pass"."""
    keys = {key.rstrip("_"): value for key, value in wanted.items()}
    return [row for row in rows if all(row[key] == value for key, value in keys.items())]


def last(series: Mapping[int, float]) -> float | None:
    """Of what is kept by step; None of nothing."""
    return series[max(series)] if series else None


# Columns and tables.


@dataclass(frozen=True)
class Column:
    """What one column says of each line of a table.

    Attributes:
        heading: with unit or scale; None where the cell is kept for the conclusion and not shown.
        make: a line -> its cell.
    """

    key: str
    heading: str | None
    make: Callable[[Any], object]

    def __call__(self, line: Any) -> Any:
        return self.make(line)


def numbers(rows: Rows, key: str) -> list:
    """What there is under ``key``, row by row; None is left out."""
    return [row[key] for row in rows if row[key] is not None]


def first(key: str, heading: str | None = None) -> Column:
    """Of a group whose rows are the same in this."""
    return Column(key, heading, lambda rows: rows[0][key])


def own(key: str, heading: str | None = None) -> Column:
    """Where a line is one row, not a group of them."""
    return Column(key, heading, lambda row: row[key])


def over(take: Callable[[list], Any], key: str, heading: str | None = None) -> Column:
    """``take`` (max, min, median, sum) of the numbers that there are under ``key``; None of none."""
    return Column(key, heading, lambda rows: take(found) if (found := numbers(rows, key)) else None)


least, greatest, middle = (partial(over, take) for take in (min, max, median))


def table(
    name: str,
    title: str,
    lines: Iterable[Any],
    columns: Iterable[Column],
    conclusion: str | Callable[[list[dict]], str],
) -> Table:
    """A table with a line for each group of rows (or whatever the columns take).

    Args:
        lines: what each line is made of.
        columns: from left to right.
        conclusion: the sentences, or what makes them of the rows.
    """
    columns = list(columns)
    rows = [{column.key: column(line) for column in columns} for line in lines]
    headings = {c.key: c.heading for c in columns if c.heading is not None}
    return Table(name, title, headings, rows, conclusion(rows) if callable(conclusion) else conclusion)
