"""The verdict: rounding where there are no kinks, leaps where there are, as many flips as predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

from driftlab.record.seed_record import SeedRecord
from driftlab.rounding import HALFWAY
from driftlab.words import Evidence, Finding, Judgement, Verdict
from experiments.kinks import series
from suite.showing.wording import seeds

_QUESTIONS = {
    "float64_ratio": "Before any flip, is float64 drift 2^-29 of float32 drift, as rounding predicts?",
    "leap": "From the first flip on, does float32 drift outgrow float64 drift, more than without kinks?",
    "flip_law": "Are as many signs flipped as number x density at zero x perturbation predicts?",
}
# 29 bits less half the way to a ratio of 1, which a difference that is no rounding would have.
_RATIO_LIMIT = -29 + math.log2(HALFWAY)


def probes(networks: Mapping[str, series.Network]) -> list[Finding]:
    """The evidence of one seed, about all its networks."""
    found = {
        "float64_ratio": (series.known(map(series.quiet_ratio, networks.values())), _RATIO_LIMIT),
        "leap": _leaps(networks.values()),
        "flip_law": ([r for n in networks.values() for r in _law_ratios(n)], series.HALFWAY_FLIPS),
    }
    return [Finding(_evidence(name, median(m) if m else None, limit)) for name, (m, limit) in found.items()]


def judged(records: Sequence[SeedRecord]) -> Judgement:
    """``round_off`` where the medians over seeds say yes to all three questions."""
    found = [finding.evidence for record in records for finding in record.found()]
    evidence = [_over_seeds(name, [e for e in found if e.probe == name]) for name in _QUESTIONS]
    open_ = [e for e in evidence if e.supports is None]
    if open_:
        return Judgement(Verdict.INCONCLUSIVE, f"{open_[0].reading} ({seeds(records)})", evidence)
    headline = f"{evidence[0].reading}; {evidence[1].reading} ({seeds(records)})"
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
    right, reading = {
        "float64_ratio": (
            measured <= threshold,
            f"before any flip float64 drift is 2^{measured:.1f} of float32 drift",
        ),
        "leap": (
            measured > threshold,
            f"over {series.LEAP_STEPS} steps from the first flip float32 drift grows {measured:.3g} times as "
            f"fast a step as float64 drift, without kinks at most {threshold:.3g} times",
        ),
        "flip_law": (
            1 / threshold <= measured <= threshold,
            f"{measured:.2f} times as many signs flip as predicted",
        ),
    }[probe]
    return Evidence(probe, question, measured, threshold, Verdict.ROUND_OFF if right else None, reading)


def _leaps(networks: Sequence[series.Network]) -> tuple[list[float], float | None]:
    """Of the networks with ReLU, and the most that those without kinks do over the very same steps."""
    windows = [(n, w) for n in networks if "signs" in series.kinked_kinds(n) and (w := series.leap_window(n))]
    smooth = [n for n in networks if not series.kinked_kinds(n)]
    without = series.known(series.leap(n, w) for n in smooth for _, w in windows)
    return series.known(series.leap(n, w) for n, w in windows), max(without, default=None)


def _law_ratios(network: series.Network) -> list[float]:
    """Counted over predicted sign changes in float32, at every step with ``MANY`` or more predicted."""
    seen = series.changed(network, "signs", "float32")
    predicted = series.counts(network, "signs", "float32", "product")
    return [seen[s] / p for s, p in predicted.items() if p >= series.MANY]
