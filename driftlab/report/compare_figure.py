"""The drift curves of two experiments in one figure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from driftlab.report import axes as scale
from driftlab.report.compare_tables import Pair, Side
from driftlab.report.readings import readings
from driftlab.report.series import Bundle, bundle, judged_against, thin
from driftlab.report.svg import SERIES, arm_id, inline_svg, new_figure, style

NAME, TITLE = "drift-curves", "Weight distance of both"


@dataclass(frozen=True)
class Curves:
    """The figure, ready for the page.

    Attributes:
        names: of its curves, "A candidate.float32".
        caption: sentences beneath it.
        readings: for the pointer, as ``readings`` makes them.
    """

    svg: Markup
    names: list[str]
    caption: list[str]
    readings: dict
    name: str = NAME
    title: str = TITLE


def drift_curves(pair: Pair) -> Curves | None:
    """Median weight distance of candidate and control of both, on one log axis; None where there is none."""
    medians = [median for side in pair for median in _medians(side)]
    if not medians:
        return None
    with style(NAME):
        figure = new_figure()
        ax = figure.subplots()
        ax.yaxis.set_label_coords(-0.165, 0.5)
        scale.steps(ax, max(int(m.steps[-1]) for m in medians))
        said = scale.distances(ax, medians, "‖Δθ‖₂ / ‖θ_ref‖₂ (relative)")
        for median in medians:
            _draw(ax, median)
        at_pointer = readings(ax, medians)
        svg = inline_svg(figure, NAME, f"{TITLE} over steps")
    caption = [
        "Medians over the seeds of each; a seed that blew up counts as inf from there on.",
        "Colour: the experiment; dashed: the control; thin: float64.",
    ]
    return Curves(svg, [m.arm for m in medians], caption + said, at_pointer)


def _medians(side: Side) -> list[Bundle]:
    """Of candidate and control; of what is compared at all where there is neither."""
    arms = judged_against(side.records)
    arms = [a for a in arms if a.startswith(("candidate.", "control."))] or arms
    drawn = [found for arm in arms if (found := bundle(side.records, "weight_distance", arm)) is not None]
    return [Bundle(f"{side.label} {d.arm}", [0], d.steps, d.median[None, :]) for d in drawn]


def _draw(ax: Axes, median: Bundle) -> None:
    label, _, arm = median.arm.partition(" ")
    values = median.values[0]
    kept = thin(scale.places(ax, median.steps), values)
    line = {
        "color": SERIES["AB".index(label)],
        "linestyle": (0, (4, 2)) if arm.startswith("control.") else "-",
        "linewidth": 1.1 if arm.endswith(".float64") else 1.9,
        "gid": arm_id(median.arm, "median"),
    }
    ax.plot(median.steps[kept], np.where(np.isfinite(values[kept]), values[kept], np.nan), **line)
