"""What a figure over steps is made of: seeds, their median and range, first flips, blow-ups.

Colour tells the role, line style the dtype. Each part says in words what it stands for.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from driftlab.records import SeedRecord
from driftlab.report import axes as scale
from driftlab.report.series import MOST_LINES, Bundle, first_flips, thin
from driftlab.report.svg import INK, ROLE_COLOURS, SERIES, arm_id

# Points of one arm's seeds together, so that a hundred seeds take no more room than twenty.
_POINTS = 8000
# The window of ``diagnose`` has further controls.
_COLOURS = ROLE_COLOURS | {"control_all": SERIES[4], "control_each": SERIES[2]}
_LINE_STYLES = {"float32": "-", "float64": (0, (4, 2))}
# Drawn in this order, so that what is judged is never hidden.
_LAYERS = {"reference": 1, "control": 2, "candidate": 3}


def role(arm: str) -> str:
    return arm.partition(".")[0]


def bottom_up(bundles: list[Bundle]) -> list[Bundle]:
    return sorted(bundles, key=lambda b: _LAYERS.get(role(b.arm), 0))


def look(arm: str) -> dict:
    return {
        "color": _COLOURS.get(role(arm), INK),
        "linestyle": _LINE_STYLES.get(arm.partition(".")[2], ":"),
    }


def draw_seeds(ax: Axes, drawn: Bundle) -> None:
    """The range as a band and, up to ``MOST_LINES``, each seed as a thin line."""
    if len(drawn.values) < 2:
        return
    places = scale.places(ax, drawn.steps)
    low, high = drawn.range
    kept = np.union1d(thin(places, low, 200), thin(places, high, 200))
    band = {"color": look(drawn.arm)["color"], "alpha": 0.14, "linewidth": 0}
    ax.fill_between(drawn.steps[kept], low[kept], high[kept], gid=arm_id(drawn.arm, "range"), **band)
    if len(drawn.values) > MOST_LINES:
        return
    faint = min(0.35, 5 / len(drawn.values))
    for seed, values in zip(drawn.seeds, drawn.values, strict=True):
        kept = thin(places, values, min(400, _POINTS // len(drawn.values)))
        line = look(drawn.arm) | {"linewidth": 0.7, "alpha": faint, "gid": arm_id(drawn.arm, f"seed={seed}")}
        ax.plot(drawn.steps[kept], _finite(values[kept]), **line)


def draw_median(ax: Axes, drawn: Bundle, wide: bool) -> None:
    """The median as a thick line; ``wide`` and pale where another may lie on it."""
    median = drawn.median
    kept = thin(scale.places(ax, drawn.steps), median)
    line = look(drawn.arm) | {"linewidth": 4.5 if wide else 1.9, "alpha": 0.45 if wide else 1.0}
    ax.plot(drawn.steps[kept], _finite(median[kept]), gid=arm_id(drawn.arm, "median"), **line)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def mark_first_flips(ax: Axes, bundles: list[Bundle], records: Sequence[SeedRecord]) -> list[str]:
    """A vertical line at the median first-flip step of each arm."""
    said = []
    for drawn in bundles:
        steps = [s for s in first_flips(records, drawn.arm) if s is not None]
        if steps:
            step = float(np.median(steps))
            line = {"color": look(drawn.arm)["color"], "linestyle": (0, (1, 2)), "linewidth": 1.3}
            ax.axvline(step, gid=arm_id(drawn.arm, "flip"), **line)
            some = "" if len(steps) == len(records) else f" in {len(steps)} of {len(records)} seeds"
            said.append(f"{drawn.arm} step {step:g}{some}")
    of_seeds = " (median)" if len(records) > 1 else ""
    return [f"Dotted upright: first sign flip{of_seeds}, {', '.join(said)}."] if said else []


def mark_blow_ups(ax: Axes, bundles: list[Bundle]) -> list[str]:
    """A cross where a seed had its last finite value."""
    said, crosses = [], 0
    for drawn in bundles:
        infinite = int(np.isinf(drawn.values).any(axis=1).sum())
        if infinite:
            steps, values = zip(*drawn.last_finite, strict=True) if drawn.last_finite else ((), ())
            cross = {"marker": "x", "linestyle": "", "color": look(drawn.arm)["color"], "markersize": 5}
            ax.plot(steps, values, gid=arm_id(drawn.arm, "end"), clip_on=False, **cross)
            said.append(f"{drawn.arm} in {infinite} of {len(drawn.values)} seeds")
            crosses += len(steps)
    if not said:
        return []
    what = "Cross: the last finite value before a blow-up" if crosses else "Not finite from the first row on"
    return [
        f"{what}, {', '.join(said)}.",
        "From there on the median counts such a seed as inf.",
    ]


def what_is_drawn(bundles: list[Bundle]) -> str:
    seeds = len(bundles[0].values)
    if seeds == 1:
        return "One seed."
    thick = "thick: their median; band: from the least to the greatest."
    if seeds > MOST_LINES:
        return f"Of {seeds} seeds, {thick}"
    return f"Thin: each of {seeds} seeds; {thick}"


def ends(bundles: list[Bundle]) -> list[str]:
    """Where the float64 arms end, if before the others."""
    last = {b.arm: int(b.steps[-1]) for b in bundles}
    longest = max(last.values())
    early = {step for arm, step in last.items() if arm.endswith(".float64") and step < longest}
    return [f"Arms in float64, and what is compared with them, end at step {step}." for step in sorted(early)]
