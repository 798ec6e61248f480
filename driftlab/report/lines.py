"""What a figure over steps is made of: seeds, their median and range, first flips, blow-ups.

Colour tells the role, line style the dtype. Each part says in words what it stands for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes

from driftlab.records import SeedRecord
from driftlab.report import axes as scale
from driftlab.report.series import MOST_LINES, Bundle, first_flips, thin
from driftlab.report.svg import INK, ROLE_COLOURS, SERIES, arm_id

# Beyond ``MOST_LINES`` seeds: the share of them that the darker band holds, and how many are drawn as lines.
MOST_SEEDS = 0.05, 0.95
EXAMPLES = 5
# So many crosses tell where blow-ups are; more hide each other.
_CROSSES = 100
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
    """The range as a band, and each seed as a thin line.

    Beyond ``MOST_LINES`` the middle nine tenths as a darker band, since the range is that of the oddest
    seeds, and the first few seeds: a median is smoother than any of them.
    """
    if len(drawn.values) < 2:
        return
    _band(ax, drawn, drawn.range, "range")
    if len(drawn.values) > MOST_LINES:
        _band(ax, drawn, drawn.quantiles(*MOST_SEEDS), "quantiles")
    seeds = len(drawn.values) if len(drawn.values) <= MOST_LINES else EXAMPLES
    places, faint = scale.places(ax, drawn.steps), min(0.35, 5 / seeds)
    for seed, values in zip(drawn.seeds[:seeds], drawn.values, strict=False):
        kept = thin(places, values, min(400, _POINTS // seeds))
        line = look(drawn.arm) | {"linewidth": 0.7, "alpha": faint, "gid": arm_id(drawn.arm, f"seed={seed}")}
        ax.plot(drawn.steps[kept], _finite(values[kept]), **line)


def _band(ax: Axes, drawn: Bundle, edges: tuple[np.ndarray, np.ndarray], part: str) -> None:
    places, top = scale.places(ax, drawn.steps), ax.get_ylim()[1]
    low, high = (np.where(np.isposinf(edge), top, edge) for edge in edges)
    kept = np.union1d(thin(places, low, 200), thin(places, high, 200))
    fill = {"color": look(drawn.arm)["color"], "alpha": 0.14, "linewidth": 0}
    ax.fill_between(drawn.steps[kept], low[kept], high[kept], gid=arm_id(drawn.arm, part), **fill)


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
    said, crosses, left_out = [], 0, False
    for drawn in bundles:
        infinite = int(np.isinf(drawn.values).any(axis=1).sum())
        if infinite:
            ends = drawn.last_finite
            ends = ends[:: math.ceil(len(ends) / _CROSSES) or 1]
            steps, values = zip(*ends, strict=True) if ends else ((), ())
            cross = {"marker": "x", "linestyle": "", "color": look(drawn.arm)["color"], "markersize": 5}
            ax.plot(steps, values, gid=arm_id(drawn.arm, "end"), clip_on=False, **cross)
            said.append(f"{drawn.arm} in {infinite} of {len(drawn.values)} seeds")
            crosses, left_out = crosses + len(steps), left_out or len(ends) < len(drawn.last_finite)
    if not said:
        return []
    what = "Cross: the last finite value before a blow-up" if crosses else "Not finite from the first row on"
    what += f" (of at most {_CROSSES} seeds an arm)" if left_out else ""
    return [
        f"{what}, {', '.join(said)}.",
        "From there on the median counts such a seed as inf.",
    ]


def what_is_drawn(bundles: list[Bundle]) -> str:
    seeds = len(bundles[0].values)
    if seeds == 1:
        return "One seed."
    thick, ends = "thick: their median", "from the least to the greatest."
    if seeds > MOST_LINES:
        examples = ", ".join(map(str, bundles[0].seeds[:EXAMPLES]))
        bands = f"dark band: from 5 % to 95 % of them; light band: {ends}"
        return f"Of {seeds:,} seeds, {thick}; {bands} Thin, as examples: seeds {examples}."
    return f"Thin: each of {seeds} seeds; {thick}; band: {ends}"


def ends(bundles: list[Bundle]) -> list[str]:
    """Where the float64 arms end, if before the others."""
    last = {b.arm: int(b.steps[-1]) for b in bundles}
    longest = max(last.values())
    early = {step for arm, step in last.items() if arm.endswith(".float64") and step < longest}
    return [f"Arms in float64, and what is compared with them, end at step {step}." for step in sorted(early)]
