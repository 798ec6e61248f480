"""Do both start alike?"""

from __future__ import annotations

from driftlab.network.start import Start
from driftlab.probes.examination import Examination
from driftlab.probes.function import PROBE as FUNCTION
from driftlab.probes.probe import Probe
from driftlab.words import SAME_START, Finding, Verdict, standing


def ask(found: Examination) -> list[Finding]:
    """Other values count against the candidate where the function shows them.

    Where it does not, the weights are written otherwise (a gain less one, a matrix times two).
    """
    says = "; ".join(s.what for s in found.start[:8]) or "they do"
    shown = set() if found.narrow_constants else {d.pass_ for d in found.network.wrong()}
    grave = [s for s in found.start if s.supports is Verdict.BUG and _shows(s, shown)]
    narrow = [s for s in found.start if s.supports is Verdict.REDUCED_PRECISION]
    first = (grave or narrow or [None])[0]
    if first is None:
        return [PROBE.finding(0.0, None, says)]
    forgiven = _forgiven(found) if first.supports is Verdict.REDUCED_PRECISION else []
    return [*forgiven, PROBE.finding(first.measured, first.supports, says, first.place)]


def _shows(start: Start, shown: set[str]) -> bool:
    if start.measured is None:
        return True
    return bool(shown & ({"buffer", "eval", "forward"} if start.place.pass_ == "buffer" else {"forward"}))


def _forgiven(found: Examination) -> list[Finding]:
    """Weights stored in fewer bits make another function of it; on those weights both must be the same."""
    accused = [
        f
        for f in standing(found.findings)
        if f.evidence.probe == FUNCTION.name and f.evidence.supports is Verdict.BUG
    ]
    equal = found.pair.in_step(found.pair.reference, found.pair.candidate) if accused else None
    if equal is None or Examination(equal, found.batch).wrong:
        return []
    says = "they do, on the weights that the candidate stores"
    return [FUNCTION.finding(None, Verdict.ROUND_OFF, says, supersedes=(FUNCTION.name,))]


PROBE = Probe(
    name=SAME_START,
    question="Do both start from the same weights, buffers, modes and trained parameters?",
    threshold=0.0,
    reason="equal values after folding",
    unit="relative difference",
    sees="what differs before any training: weights after folding, buffers, modes, frozen and missing "
    "parameters. Other values count where the function shows them; else they are merely written otherwise",
    order=40,
    ask=ask,
    asserted=True,
)
