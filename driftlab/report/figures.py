"""The figures of the report: weight distance, sign flips and loss over steps.

Colour tells the role, line style the dtype. Few seeds are thin lines around their thick median, many
seeds a band from the least to the greatest: the size of the page must not grow with the seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from driftlab.records import SeedRecord
from driftlab.report import axes as scale
from driftlab.report.series import Bundle, all_arms, bundle, first_flips, judged_against, thin
from driftlab.report.svg import INK, ROLE_COLOURS, arm_id, inline_svg, new_figure, style

MOST_LINES = 20
_LINE_STYLES = {"float32": "-", "float64": (0, (4, 2))}


@dataclass(frozen=True)
class Drawing:
    """A figure, ready for the page.

    Attributes:
        name: prefix of all ids.
        arms: what its legend lists.
        caption: sentences beneath it.
        readings: for the pointer: place (in pixels of the SVG) and number of each step, medians of each arm.
    """

    name: str
    title: str
    svg: Markup
    arms: list[str]
    caption: list[str]
    readings: dict = field(default_factory=dict)


def weight_distance(records: Sequence[SeedRecord]) -> Drawing | None:
    """Weight distance of every arm that has an against, on a log axis with a line for 0."""
    bundles = _bundles(records, "weight_distance", judged_against(records))
    label = "‖Δθ‖₂ / ‖θ_ref‖₂ (relative)"
    return _draw("weight-distance", "Weight distance", label, bundles, records, scale.distances)


def sign_flips(records: Sequence[SeedRecord]) -> Drawing | None:
    """Pre-activations on the other side of their kink, with the step of the first."""
    bundles = _bundles(records, "sign_flips", judged_against(records))
    return _draw("sign-flips", "Sign flips", "sign flips (pre-activations)", bundles, records, scale.counts)


def loss(records: Sequence[SeedRecord]) -> Drawing | None:
    """Training loss of the reference and the candidate; of the control where there is no candidate."""
    arms = all_arms(records)
    arms = [a for a in arms if a.endswith(".float32")] or arms
    rewritten = "candidate" if "candidate" in map(_role, arms) else "control"
    bundles = _bundles(records, "loss", [a for a in arms if _role(a) in ("reference", rewritten)])
    return _draw("loss", "Training loss", "loss (of the batch)", bundles, records, scale.losses)


def _bundles(records: Sequence[SeedRecord], kind: str, arms: Sequence[str]) -> list[Bundle]:
    return [b for arm in arms if (b := bundle(records, kind, arm)) is not None]


def _draw(
    name: str,
    title: str,
    label: str,
    bundles: list[Bundle],
    records: Sequence[SeedRecord],
    set_scale: Callable[[Axes, list[Bundle], str], list[str]],
) -> Drawing | None:
    if not bundles:
        return None
    with style(name):
        figure = new_figure()
        ax = figure.subplots()
        ax.yaxis.set_label_coords(-0.165, 0.5)
        scale.steps(ax, max(int(b.steps[-1]) for b in bundles))
        caption = set_scale(ax, bundles, label)
        layers = sorted(bundles, key=lambda b: _LAYERS.get(_role(b.arm), 0))
        for drawn in layers:
            _draw_seeds(ax, drawn)
        for drawn in layers:
            _draw_median(ax, drawn, wide=name == "loss" and _role(drawn.arm) == "reference")
        flips = [] if name == "loss" else _mark_first_flips(ax, bundles, records)
        caption = [_what_is_drawn(bundles), *_ends(bundles), *caption, *flips, *_blow_ups(ax, bundles)]
        readings = _readings(ax, bundles)
        svg = inline_svg(figure, name, f"{title} over steps")
    return Drawing(name, title, svg, [b.arm for b in bundles], caption, readings)


# Drawn in this order, so that what is judged is never hidden.
_LAYERS = {"reference": 1, "control": 2, "candidate": 3}


def _role(arm: str) -> str:
    return arm.partition(".")[0]


def _look(arm: str) -> dict:
    role, _, dtype = arm.partition(".")
    return {"color": ROLE_COLOURS.get(role, INK), "linestyle": _LINE_STYLES.get(dtype, ":")}


def _draw_seeds(ax: Axes, drawn: Bundle) -> None:
    if len(drawn.values) < 2:
        return
    places = scale.places(ax, drawn.steps)
    if len(drawn.values) > MOST_LINES:
        low, high = drawn.range
        kept = np.union1d(thin(places, low, 200), thin(places, high, 200))
        band = {"color": _look(drawn.arm)["color"], "alpha": 0.2, "linewidth": 0}
        ax.fill_between(drawn.steps[kept], low[kept], high[kept], gid=arm_id(drawn.arm, "range"), **band)
        return
    for number, values in enumerate(drawn.values):
        kept = thin(places, values)
        line = _look(drawn.arm) | {"linewidth": 0.7, "alpha": 0.35, "gid": arm_id(drawn.arm, str(number))}
        ax.plot(drawn.steps[kept], _finite(values[kept]), **line)


def _draw_median(ax: Axes, drawn: Bundle, wide: bool) -> None:
    median = drawn.median
    kept = thin(scale.places(ax, drawn.steps), median)
    line = _look(drawn.arm) | {"linewidth": 4.5 if wide else 1.9, "alpha": 0.45 if wide else 1.0}
    ax.plot(drawn.steps[kept], _finite(median[kept]), gid=arm_id(drawn.arm, "median"), **line)


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)


def _mark_first_flips(ax: Axes, bundles: list[Bundle], records: Sequence[SeedRecord]) -> list[str]:
    """A vertical line at the median first-flip step of each arm; returns it in words."""
    said = []
    for drawn in bundles:
        steps = [s for s in first_flips(records, drawn.arm) if s is not None]
        if steps:
            step = float(np.median(steps))
            line = {"color": _look(drawn.arm)["color"], "linestyle": (0, (1, 2)), "linewidth": 1.3}
            ax.axvline(step, gid=arm_id(drawn.arm, "flip"), **line)
            some = "" if len(steps) == len(records) else f" in {len(steps)} of {len(records)} seeds"
            said.append(f"{drawn.arm} step {step:g}{some}")
    return [f"Dotted upright: first sign flip (median), {', '.join(said)}."] if said else []


def _blow_ups(ax: Axes, bundles: list[Bundle]) -> list[str]:
    """A cross where a seed had its last finite value; returns the counts in words."""
    said = []
    for drawn in bundles:
        infinite = int(np.isinf(drawn.values).any(axis=1).sum())
        if infinite:
            steps, values = zip(*drawn.last_finite, strict=True) if drawn.last_finite else ((), ())
            cross = {"marker": "x", "linestyle": "", "color": _look(drawn.arm)["color"], "markersize": 5}
            ax.plot(steps, values, gid=arm_id(drawn.arm, "end"), clip_on=False, **cross)
            said.append(f"{drawn.arm} in {infinite} of {len(drawn.values)} seeds")
    if not said:
        return []
    return [
        f"Cross: the last finite value before a blow-up, {', '.join(said)}.",
        "From there on the median counts such a seed as inf.",
    ]


def _what_is_drawn(bundles: list[Bundle]) -> str:
    seeds = len(bundles[0].values)
    if seeds == 1:
        return "One seed."
    if seeds > MOST_LINES:
        return f"Line: median of {seeds} seeds; band: from the least to the greatest of them."
    return f"Thin: each of {seeds} seeds; thick: their median."


def _ends(bundles: list[Bundle]) -> list[str]:
    """Where the float64 arms end, if before the others."""
    last = {b.arm: int(b.steps[-1]) for b in bundles}
    longest = max(last.values())
    early = {step for arm, step in last.items() if arm.endswith(".float64") and step < longest}
    return [f"Arms in float64, and what is compared with them, end at step {step}." for step in sorted(early)]


def _readings(ax: Axes, bundles: list[Bundle]) -> dict:
    steps = np.unique(np.concatenate([b.steps for b in bundles]))
    places = scale.places(ax, steps)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(len(steps), 400)).astype(int))
    at = {int(s): i for i, s in enumerate(steps[kept])}
    arms = {b.arm: [None] * len(at) for b in bundles}
    for drawn in bundles:
        for step, value in zip(drawn.steps, drawn.median, strict=True):
            if int(step) in at and not np.isnan(value):
                arms[drawn.arm][at[int(step)]] = f"{value:.3g}"
    return {"step": list(at), "place": [round(float(p), 1) for p in places[kept]], "arms": arms}
