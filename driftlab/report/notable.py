"""Of more seeds than a page has room for: how they spread, and those that a reader would look for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from driftlab.report.tables import MISSING

# Rows of a table that a reader still scrolls through.
MOST_ROWS = 100
# Of those that fell over so many are shown, and so many from either end of each quantity.
_FALLEN, _ENDS = 40, 2  # the sentence says two
_QUANTITIES = ("loss", "accuracy", "disagreement")
_SHARES = {"least": 0.0, "5 %": 0.05, "median": 0.5, "95 %": 0.95, "greatest": 1.0}


@dataclass(frozen=True)
class Notable:
    """Rows of the table of outcomes, what they are, and the spread of all of them."""

    rows: list[Mapping]
    sentence: str
    spread: list[tuple[str, list[dict]]]


def notable(rows: Sequence[Mapping]) -> Notable | None:
    """Of the rows that ``tables.outcomes`` makes; None where there is room for all."""
    if len(rows) <= MOST_ROWS:
        return None
    fallen = [row for row in rows if any(cell["bad"] for cell in row["arms"])]
    fallen.sort(key=_alike)
    chosen = {row["seed"]: row for row in (*fallen[:_FALLEN], *_ends(rows))}
    shown = [chosen[seed] for seed in sorted(chosen)]
    return Notable(shown, _sentence(len(rows), len(fallen)), _spread(rows))


def _alike(row: Mapping) -> bool:
    """Whether all arms of a seed ended alike: where they did not, there is more to learn."""
    return len({cell["bad"] for cell in row["arms"]}) == 1


def _ends(rows: Sequence[Mapping]) -> Iterable[Mapping]:
    for place in range(len(rows[0]["arms"])):
        for quantity in _QUANTITIES:
            measured = [row for row in rows if _is_number(row["arms"][place][quantity])]
            measured.sort(key=lambda row: row["arms"][place][quantity])
            yield from (*measured[:_ENDS], *measured[-_ENDS:])


def _is_number(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _sentence(of: int, fallen: int) -> str:
    falls = f"An arm fell over in {fallen:,} of" if fallen else "No arm fell over in"
    shown = "these, and " if fallen else ""
    if fallen > _FALLEN:
        shown = f"{_FALLEN} of these, first those in which another arm did not, and "
    return (
        f"{falls} {of:,} seeds. Below are {shown}those with the two least and the two greatest values of "
        "each column. "
        "Of every seed, verdict.json says who fell over, and its folder seed=… holds the rest."
    )


def _spread(rows: Sequence[Mapping]) -> list[tuple[str, list[dict]]]:
    """A row a quantile, and in it each arm's; NaN counts as inf."""
    arms = [[row["arms"][place] for row in rows] for place in range(len(rows[0]["arms"]))]
    return [(label, [_quantiles(cells, share) for cells in arms]) for label, share in _SHARES.items()]


def _quantiles(cells: Sequence[Mapping], share: float) -> dict:
    present = [cell for cell in cells if cell["word"] != MISSING]
    found = {"arm": cells[0]["arm"], "word": "", "bad": False}
    if share == 0.5:
        found["word"] = f"{sum(not cell['bad'] for cell in present):,} of {len(present):,} finished"
    return found | {q: _quantile([cell[q] for cell in present], share) for q in _QUANTITIES}


def _quantile(values: Iterable[float | None], share: float) -> float | None:
    """The value of the seed that stands there in their order."""
    ordered = sorted(math.inf if math.isnan(v) else v for v in values if v is not None)
    return ordered[round(share * (len(ordered) - 1))] if ordered else None
