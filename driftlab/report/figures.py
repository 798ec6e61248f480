"""The figures of the report over steps: weight distance, sign flips and loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from driftlab.records import SeedRecord
from driftlab.report import axes as scale
from driftlab.report import lines
from driftlab.report.readings import readings
from driftlab.report.series import Bundle, all_arms, bundle, judged_against
from driftlab.report.svg import inline_svg, new_figure, style


@dataclass(frozen=True)
class Drawing:
    """A figure, ready for the page.

    Attributes:
        name: prefix of all ids.
        arms: what its legend lists.
        caption: sentences beneath it.
        readings: see ``readings``.
    """

    name: str
    title: str
    svg: Markup
    arms: list[str]
    caption: list[str]
    readings: dict


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
    rewritten = "candidate" if "candidate" in map(lines.role, arms) else "control"
    bundles = _bundles(records, "loss", [a for a in arms if lines.role(a) in ("reference", rewritten)])
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
    if not any(np.isfinite(b.values).any() for b in bundles):
        return None
    with style(name):
        figure = new_figure()
        ax = figure.subplots()
        ax.yaxis.set_label_coords(-0.165, 0.5)
        scale.steps(ax, max(int(b.steps[-1]) for b in bundles))
        scaled = set_scale(ax, bundles, label)
        flips = _draw_bundles(ax, bundles, records, is_loss=name == "loss")
        blown = lines.mark_blow_ups(ax, bundles)
        caption = [lines.what_is_drawn(bundles), *lines.ends(bundles), *scaled, *flips, *blown]
        numbers = readings(ax, bundles)
        svg = inline_svg(figure, name, f"{title} over steps")
    return Drawing(name, title, svg, [b.arm for b in bundles], caption, numbers)


def _draw_bundles(ax: Axes, bundles: list[Bundle], records: Sequence[SeedRecord], is_loss: bool) -> list[str]:
    for drawn in lines.bottom_up(bundles):
        lines.draw_seeds(ax, drawn)
    for drawn in lines.bottom_up(bundles):
        lines.draw_median(ax, drawn, wide=is_loss and lines.role(drawn.arm) == "reference")
    return [] if is_loss else lines.mark_first_flips(ax, bundles, records)
