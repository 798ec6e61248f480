"""Local drift over the run: how far a window's pair is apart at its end, and how fast that grows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import median

from driftlab.measures import Measure
from driftlab.measures.weight_distance import MEASURE as WEIGHT_DISTANCE
from driftlab.record.local_windows import growth, windows_of
from driftlab.record.seed_record import Row, SeedRecord
from driftlab.report.sections import number

_COLUMN = WEIGHT_DISTANCE.name
# As the figures name their arms; the controls of a window are one, the largest of them.
_PAIRS = tuple((role, dtype) for dtype in ("float64", "float32") for role in ("candidate", "control"))


def local_drift(records: Sequence[SeedRecord]) -> tuple[Measure, list[SeedRecord]]:
    """A curve with a point a window, where that begins; of the seeds that have windows."""
    found = [record for record in records if record.local]
    updates = max((int(row["updates"]) for record in found for row in record.local), default=0)
    axis = f"‖Δθ‖₂ / ‖θ_ref‖₂ after {updates} updates from equal weights"
    measure = replace(WEIGHT_DISTANCE, name="local_drift", title="Local drift along the run", axis=axis)
    return measure, [_ends(record, measure.name) for record in found]


def _ends(record: SeedRecord, name: str) -> SeedRecord:
    rows = [
        {"step": begins, **{c.replace(_COLUMN, name): v for c, v in _distances(window[-1]).items()}}
        for begins, window in windows_of(record.local).items()
    ]
    arms = {c.partition("/")[2]: {"against": "reference"} for row in rows for c in row if "/" in c}
    return SeedRecord(record.seed, rows, [], {"arms": arms})


def _distances(row: Row) -> dict[str, float]:
    """Of candidate and controls from the reference of their dtype."""
    return {c: v for c, v in row.items() if c.startswith(f"{_COLUMN}/c")}


def local_table(records: Sequence[SeedRecord]) -> dict[str, list] | None:
    """Drift and its growth an update in every window, beside the growth of the free-running drift there.

    ``headings``, and ``rows`` of as many cells, a window each; medians over seeds.
    """
    windows: dict[int, list[tuple[SeedRecord, list[Row]]]] = {}
    for record in records:
        for begins, rows in windows_of(record.local).items():
            windows.setdefault(begins, []).append((record, rows))
    if not windows:
        return None
    names = [f"{role}.{dtype}" for role, dtype in _PAIRS]
    headings = ["window from step", *names, *(f"growth of {n}" for n in names)]
    headings += [f"growth of {n}, free-running" for n in names[2:]]
    return {"headings": headings, "rows": [_cells(begins, windows[begins]) for begins in sorted(windows)]}


def _cells(begins: int, taken: list[tuple[SeedRecord, list[Row]]]) -> list[str]:
    last, grown = {pair: [] for pair in _PAIRS}, {pair: [] for pair in _PAIRS}
    for _, rows in taken:
        for role, dtype in _PAIRS:
            columns = [c for c in _distances(rows[-1]) if _is_of(c, role, dtype)]
            if columns:
                column = max(columns, key=rows[-1].__getitem__)
                last[role, dtype].append(rows[-1][column])
                grown[role, dtype].append(growth(rows, column))
    free = [[_free_growth(r, f"{role}.float32", begins) for r, _ in taken] for role, _ in _PAIRS[2:]]
    values = [*last.values(), *grown.values(), *free]
    return [f"{begins:,}", *(_median(v) for v in values)]


def _is_of(column: str, role: str, dtype: str) -> bool:
    return column.startswith(f"{_COLUMN}/{role}") and column.endswith(f".{dtype}")


def _free_growth(record: SeedRecord, arm: str, begins: int) -> float | None:
    """A step, between the logged steps before and behind the one at which a window begins."""
    series: Mapping[int, float] = record.series(_COLUMN, arm)
    before = max((s for s in series if s <= begins and series[s] > 0), default=None)
    behind = min((s for s in series if s > begins and series[s] > 0), default=None)
    if before is None or behind is None:
        return None
    return float((series[behind] / series[before]) ** (1 / (behind - before)))


def _median(values: Sequence[float | None]) -> str:
    known = [v for v in values if v is not None]
    return number(median(known)) if known else ""
