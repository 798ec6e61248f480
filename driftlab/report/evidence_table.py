"""The evidence on one scale: how many times its threshold each probe measured, and what its words mean."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from driftlab.report.sections import MISSING, number
from driftlab.words import Evidence, Status

# So many decades on either side of the threshold fit on a bar; what lies further out ends at its end.
_DECADES = 6
_TIMES = "\N{MULTIPLICATION SIGN}"
_STATUS = {
    Status.NOT_APPLICABLE: "does not arise",
    Status.REFUSED: "not asked",
    Status.FAILED: "failed",
}


@dataclass(frozen=True)
class Scaled:
    """A piece of evidence as its row shows it.

    Attributes:
        meaning: the id of the entry that says what the probe measures.
        times: measured over threshold, as text; "" where there is no such number.
        share: how far the bar goes, in percent; its middle is the threshold. None: there is no bar.
        word: where the measured number lies.
    """

    evidence: Evidence
    meaning: str
    times: str
    share: float | None
    word: str


def scaled(evidence: Sequence[Evidence]) -> list[Scaled]:
    """A row each, in their order; rows of one probe have one meaning."""
    ids = {name: f"meaning-{n}" for n, name in enumerate(dict.fromkeys(e.probe for e in evidence), 1)}
    return [Scaled(e, ids[e.probe], *_place(e)) for e in evidence]


def meanings(rows: Sequence[Scaled]) -> list[tuple[str, Evidence]]:
    """The id and the first piece of evidence of each probe."""
    first: dict[str, Evidence] = {}
    for row in rows:
        first.setdefault(row.meaning, row.evidence)
    return list(first.items())


def _place(e: Evidence) -> tuple[str, float | None, str]:
    if e.status is not Status.ANSWERED:
        return "", None, _STATUS[e.status]
    if e.measured is None or e.threshold is None:
        return "", None, MISSING
    if math.isnan(e.measured):
        return "", None, "not a number"
    above = (e.measured > e.threshold) - (e.measured < e.threshold)
    word = {-1: "below", 0: "at", 1: "above"}[above] + " the threshold"
    if e.threshold <= 0:  # nothing is a multiple of 0: as it has to be, or not
        return "", 0.0 if above <= 0 else 100.0, word
    times = e.measured / e.threshold
    return f"{number(times)} {_TIMES}", _share(times), word


def _share(times: float) -> float:
    if times <= 0:
        return 0.0
    decades = math.log10(times) if math.isfinite(times) else math.inf
    return round(50 * (1 + max(-1.0, min(1.0, decades / _DECADES))), 1)
