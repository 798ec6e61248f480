"""Local windows along a training (``driftlab.lockstep.local``): the question and its threshold."""

from __future__ import annotations

from driftlab.probes.probe import Probe
from driftlab.rounding import HALFWAY

PROBE = Probe(
    name="local_windows",
    question="Put where the reference is at steps along the run, does the candidate stay with its controls?",
    threshold=HALFWAY,
    reason="as `float64_pair`",
    unit="times the controls' distance",
    sees="faults that set in when the curves have parted for good",
    misses="what comes and goes between two windows",
    order=115,
)
