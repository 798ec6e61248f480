"""Do both start alike?"""

from __future__ import annotations

from dataclasses import replace

from driftlab.examination import Examination
from driftlab.late import in_step
from driftlab.verdict import Evidence, Verdict

QUESTION = "Do both start from the same weights, buffers, modes and trained parameters?"


def ask_same_start(found: Examination) -> None:
    """Other values count against the candidate where the function shows them.

    Where it does not, the weights are written otherwise (a gain less one, a matrix times two).
    """
    start = found.start
    said = "; ".join(s.what for s in start[:8]) or "they do"
    shown = set() if found.narrow_constants else {d.pass_ for d in found.network.wrong()}
    grave = [s for s in start if s.supports is Verdict.BUG and _shows(s, shown)]
    narrow = [s for s in start if s.supports is Verdict.REDUCED_PRECISION]
    first = (grave or narrow or [None])[0]
    if first is None:
        found.add(Evidence("same_start", QUESTION, 0.0, 0.0, None, said))
        return
    if first.supports is Verdict.REDUCED_PRECISION:
        _forgive(found)
    found.add(Evidence("same_start", QUESTION, first.measured, 0.0, first.supports, said), first.place)


def _shows(start, shown: set[str]) -> bool:
    if start.measured is None:
        return True
    return bool(shown & ({"buffer", "eval", "forward"} if start.place.pass_ == "buffer" else {"forward"}))


def _forgive(found: Examination) -> None:
    """Weights stored in fewer bits make another function of it; on those weights both must be the same."""
    accused = [
        f for f in found.findings if f.evidence.probe == "function" and f.evidence.supports is Verdict.BUG
    ]
    if not accused:
        return
    equal = in_step(found.subject, found.subject.reference, found.subject.candidate)
    if Examination(equal, found.batch).network.wrong():
        return
    found.findings = [f for f in found.findings if f not in accused]
    reading = "they do, on the weights that the candidate stores"
    found.add(replace(accused[0].evidence, supports=Verdict.ROUND_OFF, measured=None, reading=reading))
