"""The tables: drift and its leap by network, flips counted and predicted by kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np

from driftlab.report.sections import Table
from experiments.kinks import series
from experiments.kinks.crossings import WIDTH
from suite.showing.wording import Column, Values, seeds, sentences, spread, table


def drift_table(values: Values) -> Table:
    networks = series.by_network(values)

    def over_seeds(measure: Callable[[series.Network], float | None], name: str) -> list[float]:
        return series.known(map(measure, networks[name]))

    def grown(key: str, heading: str) -> Column:
        return Column(key, heading, lambda name: spread(series.leaps(values, name)[key], "{:.3g}".format))

    def ratio(key: str, when: str, measure: Callable[[series.Network], float | None]) -> Column:
        heading = f"float64 / float32 drift {when}"
        return Column(key, heading, lambda name: spread(over_seeds(measure, name), "2^{:.1f}".format))

    def first(name: str) -> str:
        return spread(over_seeds(series.first_flip, name), "{:.0f}".format) or "none"

    def flipped(name: str) -> str:
        return f"{len(over_seeds(series.first_flip, name))} of {len(networks[name])}"

    def end(name: str) -> str | None:
        return spread(series.ends(networks[name], "float32"), lambda v: f"{v:.1e}" if v else "0")

    around = f"in the {series.LEAP_STEPS} steps"
    columns = [
        Column("network", "network", str),
        Column("first", "first flip (step)", first),
        Column("flipped", "seeds with a flip", flipped),
        grown("before", f"growth of float32 drift {around} before it (times a step)"),
        grown("after", f"{around} after it"),
        grown("float64", "of float64 drift, same steps"),
        ratio("quiet", "before the flip", series.quiet_ratio),
        ratio("end", "at the last step", end_ratio),
        Column("end32", "float32 drift at the last step (relative)", end),
    ]
    conclusion = (
        f"Median (least to greatest) over {seeds(values)}. Drift: how far the weights are from those "
        "of a control with one weight moved by one ulp. Without a flip of its own, a network is taken over "
        "the steps at which the others jump."
    )
    said = sentences(conclusion, _lost_words(values))
    return table("drift", "Drift before and after the first flip", networks, columns, said)


def _lost_words(values: Values) -> str:
    """The runs whose nudge was rounded away: reference and control are the same again, in every bit."""
    found = series.ends(series.all_networks(values), "float32")
    lost = found.count(0.0)
    return f"In {lost} of {len(found)} runs float32 rounded the nudge away: no drift at all." if lost else ""


def end_ratio(network: series.Network) -> float | None:
    """log2 of float64 over float32 drift at the last step that both have."""
    narrow, wide = series.drift(network, "float32"), series.drift(network, "float64")
    both = [s for s in narrow.keys() & wide.keys() if s > 0 and narrow[s] > 0 and wide[s] > 0]
    return math.log2(wide[max(both)] / narrow[max(both)]) if both else None


def flip_table(values: Values) -> Table:
    columns = {
        "kind": "what changes",
        "number": "number",
        "few": f"steps with under {series.MANY:.0f} predicted",
        "few_ratio": "counted / predicted (95 % interval)",
        "many": f"steps with {series.MANY:.0f} or more",
        "many_ratio": "counted / predicted, median (middle 90 %)",
        "product_ratio": "with the mean |perturbation| of the layer instead",
        "late": "steps after saturation",
        "late_ratio": "counted / predicted there",
    }
    rows = [_flip_row(label, steps) for label in series.GROUPS if (steps := series.steps_of(values, label))]
    return Table("flips", "Sign changes, counted and predicted (float32)", columns, rows, _flip_words(values))


def _flip_row(label: str, steps: Sequence[series.Step]) -> dict:
    early, late = ([s for s in steps if s.saturated is there] for there in (False, True))
    few, many = [s for s in early if s.near < series.MANY], [s for s in early if s.near >= series.MANY]
    return {
        "kind": label,
        "number": round(median(s.number for s in steps)),
        "few": len(few),
        "few_ratio": ratio_of_sums([(s.near, s.counted) for s in few]),
        "many": len(many),
        "many_ratio": _middle([(s.near, s.counted) for s in many]),
        "product_ratio": _middle([(s.product, s.counted) for s in many]),
        "late": sum(s.near > 0 for s in late),
        "late_ratio": _middle([(s.near, s.counted) for s in late]),
    }


def ratio_of_sums(found: list[tuple[float, float]]) -> str | None:
    """Counted over predicted with the 95 % interval of a Poisson count (Garwood, Biometrika 28, 1936)."""
    predicted, counted = sum(p for p, _ in found), sum(c for _, c in found)
    if not predicted:
        return None
    from scipy.special import gammaincinv

    low = gammaincinv(counted, 0.025) if counted else 0.0
    high = gammaincinv(counted + 1, 0.975)
    return _ratio(counted / predicted, low / predicted, high / predicted)


def _middle(found: list[tuple[float, float]]) -> str | None:
    """Counted over predicted, step by step."""
    ratios = [counted / predicted for predicted, counted in found if predicted > 0]
    return _ratio(median(ratios), *np.quantile(ratios, [0.05, 0.95])) if ratios else None


def _ratio(value: float, low: float, high: float) -> str:
    return f"{value:.2f} ({low:.2f} to {high:.2f})"


def _flip_words(values: Values) -> str:
    predicted, counted = series.crossed(values, "near", "float32", up_to_first_flip=True)
    wide, seen = series.crossed(values, "near", "float64")
    ties = [series.counts(n, "winners", "float64", "ties") for n in series.all_networks(values)]
    tied = sum(sum(found.values()) for found in ties)
    left_out = (
        f"; left out are {tied:,.0f} winners that moved between places with the same pixels, where no "
        "gradient changes"
    )
    return sentences(
        "Predicted: number x density at 0 x mean |perturbation| of those near 0; for a max-pool, of the gap "
        "between the best two of a window.",
        _halved_words(values),
        f"Saturation: a mean |perturbation| above {WIDTH:g} rms.",
        f"Up to each network's first flip: {counted:.0f} counted, {predicted:.3g} predicted.",
        f"In float64, over all steps: {seen:.0f} counted, {wide:.1g} predicted{left_out if tied else ''}.",
    )


def _halved_words(values: Values) -> str:
    """What the choice of the interval does to the prediction."""
    found = series.many_predicted(values)
    if not found:
        return ""
    off = median(abs(s.near_half / s.near - 1) for s in found)
    return f"Half the interval for the density changes it by {100 * off:.1f} %."
