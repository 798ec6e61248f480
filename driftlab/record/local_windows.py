"""The rows of ``local.csv``: which belong to a window, and what they are as a training of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from driftlab.record.seed_record import CURVES, EVALUATIONS, Row, SeedRecord


def windows_of(rows: Sequence[Row]) -> dict[int, list[Row]]:
    """The step at which a window begins -> its rows."""
    found: dict[int, list[Row]] = {}
    for row in rows:
        found.setdefault(int(row["step"] - row["updates"]), []).append(row)
    return found


def as_record(rows: Sequence[Row], seed: int, run: Mapping) -> SeedRecord:
    """One window as the record of a seed whose training is those few updates."""

    def table(kinds: Sequence[str]) -> list[Row]:
        kept = [{c: v for c, v in row.items() if c.partition("/")[0] in kinds} for row in rows]
        steps = (int(row["updates"]) for row in rows)
        return [{"step": step, **row} for step, row in zip(steps, kept, strict=True) if row]

    names = list(dict.fromkeys(c.partition("/")[2] for row in rows for c in row if "/" in c))
    arms = {name: {"blown_up_at": None, "against": _against(name, names)} for name in names}
    return SeedRecord(seed, table(CURVES), table(EVALUATIONS), {**run, "arms": arms})


def _against(arm: str, arms: Sequence[str]) -> str | None:
    role, _, dtype = arm.partition(".")
    if role != "reference":
        return f"reference.{dtype}"
    wider = ("float64", "float32")[: {"float64": 0, "float32": 1}.get(dtype, 2)]
    return next((name for d in reversed(wider) if (name := f"reference.{d}") in arms), None)


def growth(rows: Sequence[Row], column: str) -> float | None:
    """By how much a distance grows an update, the geometric mean from the first update of a window on."""
    values = [row[column] for row in rows if row["updates"] and column in row]
    if len(values) < 2 or not values[0] > 0:
        return None
    return float((values[-1] / values[0]) ** (1 / (len(values) - 1)))
