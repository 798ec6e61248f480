"""The figures of a page over steps.

Which curves are drawn, and how, is declared where they are measured: ``driftlab.measures``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes

from driftlab.measures import Measure, drawn_measures
from driftlab.measures.weight_distance import MEASURE as WEIGHT_DISTANCE
from driftlab.record.seed_record import SeedRecord
from driftlab.report import axes as scale
from driftlab.report.lines import CROSSES, Medium, blown_up, bottom_up, draw_line
from driftlab.report.local_windows import local_drift
from driftlab.report.series import (
    MOST_LINES,
    Bundle,
    all_arms,
    bundles_of,
    judged_against,
    narrow,
    role,
)
from driftlab.report.svg import INK, ROLE_COLOURS, SERIES, arm_id, inline_svg, new_figure, style

if TYPE_CHECKING:
    from driftlab.report.compare_tables import Pair, Side

PAGE = Medium(
    # the window of ``diagnose`` has further controls
    colours=ROLE_COLOURS | {"control_all": SERIES[4], "control_each": SERIES[2]},
    float64=(0, (4, 2)),
    darkened=1.0,
    most_lines=MOST_LINES,
    examples=5,
    seed=lambda seeds: {"linewidth": 0.7, "alpha": min(0.35, 5 / seeds)},
    median={"linewidth": 1.9, "alpha": 1.0},
    underneath={"linewidth": 4.5, "alpha": 0.45},
    band={"alpha": 0.14},
    flip={"linestyle": (0, (1, 2)), "linewidth": 1.3},
    cross={"markersize": 5},
    gid=arm_id,
)


@dataclass(frozen=True)
class Drawing:
    """A figure, ready for the page.

    Attributes:
        name: prefix of all ids.
        arms: what its legend lists.
        caption: sentences beneath it.
        readings: see ``axes.readings``.
    """

    name: str
    title: str
    svg: Markup
    arms: list[str]
    caption: list[str]
    readings: dict


def drawings(records: Sequence[SeedRecord]) -> list[Drawing]:
    """The curves that are declared to be figures, less those without a finite value."""
    along, windows = local_drift(records)
    of = [(measure, records) for measure in drawn_measures()]
    of[1:1] = [(along, windows)]  # beside the free-running drift
    found = [(m, bundles_of(r, m, _arms(r, m)), r) for m, r in of if r]
    return [_drawn(m, b, r) for m, b, r in found if any(np.isfinite(d.values).any() for d in b)]


def _arms(records: Sequence[SeedRecord], measure: Measure) -> list[str]:
    """What is compared; of a measure that compares nothing the reference, the candidate and the control.

    The control belongs there: a candidate's curve that parts from the reference's no further is rounding.
    """
    if measure.compared:
        return judged_against(records)
    return [a for a in narrow(all_arms(records)) if role(a) in ("reference", "candidate", "control")]


def _drawn(measure: Measure, bundles: list[Bundle], records: Sequence[SeedRecord]) -> Drawing:
    name = measure.name.replace("_", "-")
    with style(name):
        ax = _axes(bundles)
        scaled = scale.SCALES[measure.scale](ax, bundles, measure.axis_label)
        for drawn in bottom_up(bundles):
            PAGE.draw_seeds(ax, drawn)
        for drawn in bottom_up(bundles):
            underneath = not measure.compared and role(drawn.arm) == "reference"
            PAGE.draw_median(ax, drawn, underneath)
        flips = _first_flips(ax, bundles, records) if measure.compared else []
        caption = [_what_is_drawn(bundles), *_ends(bundles), *scaled, *flips, *_blow_ups(ax, bundles)]
        return _finished(ax, name, measure.title, bundles, caption)


def _axes(bundles: Sequence[Bundle]) -> Axes:
    ax = new_figure().subplots()
    ax.yaxis.set_label_coords(-0.165, 0.5)
    scale.steps(ax, max(int(b.steps[-1]) for b in bundles))
    return ax


def _finished(ax: Axes, name: str, title: str, bundles: list[Bundle], caption: list[str]) -> Drawing:
    numbers = scale.readings(ax, bundles)
    svg = inline_svg(ax.figure, name, f"{title} over steps")
    return Drawing(name, title, svg, [b.arm for b in bundles], caption, numbers)


def _what_is_drawn(bundles: list[Bundle]) -> str:
    seeds = len(bundles[0].values)
    if seeds == 1:
        return "One seed."
    thick, ends = "thick: their median", "from the least to the greatest."
    if seeds > MOST_LINES:
        examples = ", ".join(map(str, bundles[0].seeds[: PAGE.examples]))
        bands = f"dark band: from 5 % to 95 % of them; light band: {ends}"
        return f"Of {seeds:,} seeds, {thick}; {bands} Thin, as examples: seeds {examples}."
    return f"Thin: each of {seeds} seeds; {thick}; band: {ends}"


def _ends(bundles: list[Bundle]) -> list[str]:
    """Where the float64 arms end, if before the others."""
    last = {b.arm: int(b.steps[-1]) for b in bundles}
    longest = max(last.values())
    early = {step for arm, step in last.items() if arm.endswith(".float64") and step < longest}
    return [f"Arms in float64, and what is compared with them, end at step {step}." for step in sorted(early)]


def _first_flips(ax: Axes, bundles: list[Bundle], records: Sequence[SeedRecord]) -> list[str]:
    said = PAGE.mark_first_flips(ax, bundles, records, some=" in {n} of {of} seeds")
    of_seeds = " (median)" if len(records) > 1 else ""
    return [f"Dotted upright: first sign flip{of_seeds}, {said}."] if said else []


def _blow_ups(ax: Axes, bundles: list[Bundle]) -> list[str]:
    fallen = [(drawn, n, PAGE.mark_blow_ups(ax, drawn)) for drawn in bundles if (n := blown_up(drawn))]
    if not fallen:
        return []
    crosses = sum(drawn for _, _, drawn in fallen)
    what = "Cross: the last finite value before a blow-up" if crosses else "Not finite from the first row on"
    left_out = any(crosses < len(drawn.last_finite) for drawn, _, crosses in fallen)
    what += f" (of at most {CROSSES} seeds an arm)" if left_out else ""
    said = ", ".join(f"{drawn.arm} in {n} of {len(drawn.values)} seeds" for drawn, n, _ in fallen)
    return [f"{what}, {said}.", "From there on the median counts such a seed as inf."]


def drift_of_both(pair: Pair) -> Drawing | None:
    """Median weight distance of candidate and control of two experiments; None where there is none."""
    medians = [median for side in pair for median in _medians(side)]
    return _medians_drawn(medians, "Weight distance of both", "Colour: the experiment")


def drift_beside(sides: Sequence[Side]) -> Drawing | None:
    """That of several candidates beside the control that they share, ``control control.float32``."""
    found = [median for side in sides for median in _medians(side)]
    shared = [m for m in found if m.arm.startswith(f"{sides[0].label} control.")]
    medians = [m for m in found if " control." not in m.arm]
    medians += [replace(m, arm=f"control {m.arm.partition(' ')[2]}") for m in shared]
    return _medians_drawn(medians, "Weight distance from the reference", "Colour: the candidate")


def _medians_drawn(medians: list[Bundle], title: str, colours: str) -> Drawing | None:
    if not medians:
        return None
    name = "drift-curves"
    with style(name):
        ax = _axes(medians)
        said = scale.distances(ax, medians, WEIGHT_DISTANCE.axis_label)
        for median in medians:
            _draw_median_of(ax, median)
        caption = [
            "Medians over the seeds of each; a seed that blew up counts as inf from there on.",
            f"{colours}; dashed: the control; thin: float64.",
        ]
        return _finished(ax, name, title, medians, caption + said)


def _medians(side: Side) -> list[Bundle]:
    """Of candidate and control; of what is compared at all where there is neither. "A candidate.float32"."""
    arms = judged_against(side.records)
    arms = [a for a in arms if a.startswith(("candidate.", "control."))] or arms
    found = bundles_of(side.records, WEIGHT_DISTANCE, arms)
    return [Bundle(f"{side.label} {d.arm}", [0], d.steps, d.median[None, :]) for d in found]


def _draw_median_of(ax: Axes, median: Bundle) -> None:
    label, _, arm = median.arm.partition(" ")
    line = {
        "color": SERIES[(ord(label) - ord("A")) % len(SERIES)] if len(label) == 1 else INK,
        "linestyle": (0, (4, 2)) if arm.startswith("control.") else "-",
        "linewidth": 1.1 if arm.endswith(".float64") else 1.9,
        "gid": arm_id(median.arm, "median"),
    }
    draw_line(ax, median.steps, median.values[0], **line)
