"""The verdict: rounding where there are no kinks, leaps where there are, as many flips as predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from driftlab.evidence import HALFWAY
from driftlab.records import SeedRecord
from driftlab.verdict import Evidence, Finding, Judgement, Verdict
from experiments.questions.kinks.series import (
    HALFWAY_FLIPS,
    LEAP_STEPS,
    Network,
    kinked_kinds,
    law_ratios,
    leap,
    leap_window,
    quiet_ratio,
)

_QUESTIONS = {
    "float64_ratio": "Before any flip, is float64 drift 2^-29 of float32 drift, as rounding predicts?",
    "leap": "From the first flip on, does float32 drift outgrow float64 drift, more than without kinks?",
    "flip_law": "Are as many signs flipped as number x density at zero x perturbation predicts?",
}
# 29 bits less half the way to a ratio of 1, which a difference that is no rounding would have.
_RATIO_LIMIT = -29 + math.log2(HALFWAY)


def probes(networks: Mapping[str, Network]) -> list[Finding]:
    """The evidence of one seed, about all its networks."""
    found = (_ratio(networks), _leap(networks), _law(networks))
    return [Finding(_evidence(name, *e)) for name, e in zip(_QUESTIONS, found, strict=True)]


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """``round_off`` where the medians over seeds say yes to all three questions."""
    seeds = [[Finding.from_dict(p).evidence for p in r.run["probes"]] for r in records]
    evidence = [_over_seeds(name, [e for s in seeds for e in s if e.probe == name]) for name in _QUESTIONS]
    n = f"({len(records)} seed{'s' * (len(records) != 1)})"
    open_ = [e for e in evidence if e.supports is None]
    if open_:
        return Judgement(Verdict.INCONCLUSIVE, f"{open_[0].reading} {n}", evidence)
    headline = f"{evidence[0].reading}; {evidence[1].reading} {n}"
    return Judgement(Verdict.ROUND_OFF, headline, evidence)


def _over_seeds(probe: str, found: Sequence[Evidence]) -> Evidence:
    """The median over seeds against the largest of their thresholds."""
    asked = [e for e in found if e.measured is not None and e.threshold is not None]
    if not asked:
        return _evidence(probe, None, None)
    return _evidence(probe, median(e.measured for e in asked), max(e.threshold for e in asked))


def _evidence(probe: str, measured: float | None, threshold: float | None) -> Evidence:
    question = _QUESTIONS[probe]
    if measured is None or threshold is None:
        return Evidence(probe, question, measured, threshold, None, f"{probe}: the record does not reach it")
    right = {
        "float64_ratio": measured <= threshold,
        "leap": measured > threshold,
        "flip_law": 1 / threshold <= measured <= threshold,
    }[probe]
    reading = {
        "float64_ratio": f"before any flip float64 drift is 2^{measured:.1f} of float32 drift",
        "leap": f"over {LEAP_STEPS} steps from the first flip float32 drift grows {measured:.3g} times as "
        f"fast a step as float64 drift, without kinks at most {threshold:.3g} times",
        "flip_law": f"{measured:.2f} times as many signs flip as predicted",
    }[probe]
    return Evidence(probe, question, measured, threshold, Verdict.ROUND_OFF if right else None, reading)


def _ratio(networks: Mapping[str, Network]) -> tuple[float | None, float]:
    ratios = [r for n in networks.values() if (r := quiet_ratio(n)) is not None]
    return (median(ratios) if ratios else None), _RATIO_LIMIT


def _leap(networks: Mapping[str, Network]) -> tuple[float | None, float | None]:
    """Of the networks with ReLU; the threshold is what those without kinks do over the very same steps."""
    rectified = [n for n in networks.values() if "signs" in kinked_kinds(n)]
    windows = [(n, w) for n in rectified if (w := leap_window(n)) is not None]
    smooth = [n for n in networks.values() if not kinked_kinds(n)]
    leaps = [found for n, w in windows if (found := leap(n, w)) is not None]
    without = [found for n in smooth for _, w in windows if (found := leap(n, w)) is not None]
    return (median(leaps) if leaps else None), max(without, default=None)


def _law(networks: Mapping[str, Network]) -> tuple[float | None, float]:
    ratios = [r for n in networks.values() for r in law_ratios(n, "signs", "product")]
    return (median(ratios) if ratios else None), HALFWAY_FLIPS
