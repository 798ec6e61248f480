"""The tables: drift and its leap by network, flips counted and predicted by kind."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median

import numpy as np

from driftlab.report.sections import Table
from experiments.questions.kinks.crossings import WIDTH
from experiments.questions.kinks.seeds import (
    GROUPS,
    Step,
    by_network,
    ends,
    kinks_crossed,
    leaps,
    spread,
    steps_of,
    ties,
    up_to_first_flip,
)
from experiments.questions.kinks.series import (
    LEAP_STEPS,
    MANY,
    Network,
    Values,
    drift,
    first_flip,
    quiet_ratio,
)


def drift_table(values: Values) -> Table:
    rows = [_drift_row(values, name, networks) for name, networks in by_network(values).items()]
    columns = {
        "network": "network",
        "first": "first flip (step)",
        "flipped": "seeds with a flip",
        "before": f"growth of float32 drift in the {LEAP_STEPS} steps before it (times a step)",
        "after": f"in the {LEAP_STEPS} steps after it",
        "float64": "of float64 drift, same steps",
        "quiet": "float64 / float32 drift before the flip",
        "end": "float64 / float32 drift at the last step",
        "end32": "float32 drift at the last step (relative)",
    }
    conclusion = (
        f"Median (least to greatest) over {_seeds(len(values))}. Drift: how far the weights are from those "
        "of a control with one weight moved by one ulp. Without a flip of its own, a network is taken over "
        f"the steps at which the others leap.{_lost_words(values)}"
    )
    return Table("drift", "Drift before and after the first flip", columns, rows, conclusion)


def _drift_row(values: Values, name: str, networks: Mapping[int, Network]) -> dict:
    firsts = [f for n in networks.values() if (f := first_flip(n)) is not None]
    quiet = [r for n in networks.values() if (r := quiet_ratio(n)) is not None]
    found = leaps(values, name)
    return {
        "network": name,
        "first": spread(firsts, lambda v: f"{v:.0f}") or "none",
        "flipped": f"{len(firsts)} of {len(networks)}",
        **{key: spread(listed, _factor) for key, listed in found.items()},
        "quiet": spread(quiet, _power_of_two),
        "end": spread([r for n in networks.values() if (r := end_ratio(n)) is not None], _power_of_two),
        "end32": spread(ends(networks.values(), "float32"), lambda v: f"{v:.1e}" if v else "0"),
    }


def _lost_words(values: Values) -> str:
    """The runs whose nudge was rounded away: reference and control are the same again, in every bit."""
    found = [e for n in by_network(values).values() for e in ends(n.values(), "float32")]
    lost = found.count(0.0)
    return f" In {lost} of {len(found)} runs float32 rounded the nudge away: no drift at all." if lost else ""


def end_ratio(network: Network) -> float | None:
    """log2 of float64 over float32 drift at the last step that both have."""
    narrow, wide = drift(network, "float32"), drift(network, "float64")
    both = [s for s in narrow.keys() & wide.keys() if s > 0 and narrow[s] > 0 and wide[s] > 0]
    return math.log2(wide[max(both)] / narrow[max(both)]) if both else None


def flip_table(values: Values) -> Table:
    rows = [_flip_row(label, steps) for label in GROUPS if (steps := steps_of(values, label))]
    columns = {
        "kind": "what changes",
        "number": "number",
        "few": f"steps with under {MANY:.0f} predicted",
        "few_ratio": "counted / predicted (95 % interval)",
        "many": f"steps with {MANY:.0f} or more",
        "many_ratio": "counted / predicted, median (middle 90 %)",
        "product_ratio": "with the mean |perturbation| of the layer instead",
        "late": "steps after saturation",
        "late_ratio": "counted / predicted there",
    }
    return Table("flips", "Sign changes, counted and predicted (float32)", columns, rows, flip_words(values))


def _flip_row(label: str, steps: Sequence[Step]) -> dict:
    early = [s for s in steps if not s.saturated]
    few, many = [s for s in early if s.near < MANY], [s for s in early if s.near >= MANY]
    late = [s for s in steps if s.saturated and s.near > 0]
    return {
        "kind": label,
        "number": round(median(s.number for s in steps)),
        "few": len(few),
        "few_ratio": ratio_of_sums([(s.near, s.counted) for s in few]),
        "many": len(many),
        "many_ratio": _middle([s.counted / s.near for s in many]),
        "product_ratio": _middle([s.counted / s.product for s in many if s.product > 0]),
        "late": len(late),
        "late_ratio": _middle([s.counted / s.near for s in late]),
    }


def ratio_of_sums(found: list[tuple[float, float]]) -> str | None:
    """Counted over predicted with the 95 % interval of a Poisson count (Garwood, Biometrika 28, 1936)."""
    predicted, counted = sum(p for p, _ in found), sum(c for _, c in found)
    if not predicted:
        return None
    from scipy.special import gammaincinv

    low = gammaincinv(counted, 0.025) if counted else 0.0
    high = gammaincinv(counted + 1, 0.975)
    return f"{counted / predicted:.2f} ({low / predicted:.2f} to {high / predicted:.2f})"


def flip_words(values: Values) -> str:
    predicted, counted = up_to_first_flip(values, "near")
    wide, seen = kinks_crossed(values, "float64", "near")
    tied = ties(values, "float64")
    left_out = (
        f"; left out are {tied:,.0f} winners that moved between places with the same pixels, where no "
        "gradient changes"
    )
    said = [
        "Predicted: number x density at 0 x mean |perturbation| of those near 0; for a max-pool, of the gap "
        f"between the best two of a window.{_halved_words(values)} Saturation: a mean |perturbation| above "
        f"{WIDTH:g} rms.",
        f"Up to each network's first flip: {counted:.0f} counted, {predicted:.3g} predicted.",
        f"In float64, over all steps: {seen:.0f} counted, {wide:.1g} predicted{left_out if tied else ''}.",
    ]
    return " ".join(said)


def _halved_words(values: Values) -> str:
    """What the choice of the interval does to the prediction."""
    found = [s for label in GROUPS for s in steps_of(values, label) if s.near >= MANY]
    if not found:
        return ""
    off = median(abs(s.near_half / s.near - 1) for s in found)
    return f" Half the interval for the density changes it by {100 * off:.1f} %."


def _middle(ratios: list[float]) -> str | None:
    if not ratios:
        return None
    low, high = np.quantile(ratios, [0.05, 0.95])
    return f"{median(ratios):.2f} ({low:.2f} to {high:.2f})"


def _factor(value: float) -> str:
    return f"{value:.3g}"


def _power_of_two(value: float) -> str:
    return f"2^{value:.1f}"


def _seeds(n: int) -> str:
    return f"{n} seed{'s' * (n > 1)}"
