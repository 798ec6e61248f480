"""A number above its threshold never passes for rounding, unless something says why it stands there.

What explains it speaks for rounding itself: a probe that looked again (``precision`` on other inputs, a look
on the spot), or one that asks the same more exactly than the curves do.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from driftlab.verdict.evidence import DRIFT, DTYPE_RATIO, FLOAT32_START
from driftlab.words import FUNCTION, PRECISION, Evidence, Status, Verdict

_ROUNDING = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
# What the curves ask of float32's rounding, after training has carried it, probes ask of the rounding itself.
_MORE_EXACTLY = {DTYPE_RATIO.name: FUNCTION, FLOAT32_START.name: PRECISION, DRIFT.name: FUNCTION}


def is_above(evidence: Evidence) -> bool:
    """Whether it was measured above its threshold and does not speak for rounding."""
    if evidence.measured is None or evidence.threshold is None or evidence.status is not Status.ANSWERED:
        return False
    return evidence.measured > evidence.threshold and evidence.supports not in _ROUNDING


def explained(curves: Iterable[Evidence], probes: Mapping[str, Evidence]) -> list[Evidence]:
    """The evidence of the curves; what a probe answered more exactly speaks for rounding where it does."""
    return [_explained(e, probes.get(_MORE_EXACTLY.get(e.probe, ""))) for e in curves]


def _explained(evidence: Evidence, probe: Evidence | None) -> Evidence:
    if probe is None or not is_above(evidence):
        return evidence
    if probe.measured is None or is_above(probe) or probe.supports not in (None, *_ROUNDING):
        return evidence
    reading = f"{evidence.reading}; {probe.probe}, which asks it of one step, finds rounding"
    return replace(evidence, supports=Verdict.ROUND_OFF, reading=reading)


def unexplained(evidence: Iterable[Evidence]) -> Evidence | None:
    """The first that is above its threshold without a reason."""
    return next((e for e in evidence if is_above(e)), None)
