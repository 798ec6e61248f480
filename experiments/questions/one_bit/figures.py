"""The figure: disagreement and accuracy SD of every row, and how disagreement came about."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from driftlab.report.sections import Figure, Look
from experiments.questions.one_bit.intervals import LEVEL, Estimate
from experiments.questions.one_bit.summary import PUBLISHED, THEIR_EPOCHS, Summary

ROUND_OFF, SOURCES, THEIRS = 0, 1, 5  # which of the colours of a look
_STYLES = {"one_ulp": "-", "split": "--", "order": "-", "augmentation": "--", "init": "-.", "all": ":"}


def variation_figure(
    found: Mapping[str, Summary], looks: list[int], seen: Mapping[str, np.ndarray], images: int
) -> Figure:
    """Args: ``looks`` and ``seen`` are updates, and mean disagreement at each, of every row (percent)."""
    n = max(s.runs.n for s in found.values())
    caption = (
        f"Above: every row of the table, with its {100 * LEVEL:.0f} % interval over {n} runs; hollow: "
        f"published, after {THEIR_EPOCHS} epochs. Below: mean disagreement of two runs on {images:,} test "
        "images while they train."
    )
    title = "Round-off alone beside every other source of variation"
    return Figure("variation", title, partial(_draw, found, looks, seen), caption, aspect=1.08)


def _draw(
    found: Mapping[str, Summary],
    looks: list[int],
    seen: Mapping[str, np.ndarray],
    canvas: Canvas,
    look: Look,
) -> None:
    grid = canvas.add_gridspec(2, 2, height_ratios=(1, 1.05), hspace=0.66, wspace=0.1)
    canvas.subplots_adjust(left=0.275, right=0.965, top=0.94, bottom=0.09)
    left, right = canvas.add_subplot(grid[0, 0]), canvas.add_subplot(grid[0, 1])
    _draw_rows(left, {k: s.disagreement for k, s in found.items()}, found, look, "disagreement")
    _draw_rows(right, {k: s.spread for k, s in found.items()}, found, look, "spread")
    left.set_xlabel("disagreement of two runs (%)")
    right.set_xlabel("accuracy SD (points)")
    right.tick_params(labelleft=False)
    _legend(canvas, look)
    _draw_on_the_way(canvas.add_subplot(grid[1, :]), found, looks, seen, look)


def _draw_rows(
    ax: Axes, numbers: Mapping[str, Estimate], found: Mapping[str, Summary], look: Look, measure: str
) -> None:
    """One line a row, the first on top; what is not known is left out."""
    for place, (key, estimate) in enumerate(numbers.items()):
        if estimate.value is not None:
            colour = _colour(found[key], look)
            if estimate.bounded:
                ax.hlines(place, estimate.low, estimate.high, color=colour, linewidth=2, clip_on=False)
            ax.plot(estimate.value, place, "o", color=colour, markersize=5.5, clip_on=False)
        if key in PUBLISHED:
            theirs = getattr(PUBLISHED[key], measure)
            hollow = {"markerfacecolor": "none", "markeredgecolor": look.series[THEIRS]}
            ax.plot(theirs, place, "D", markersize=5, clip_on=False, **hollow)
    ax.set_yticks(range(len(found)), [s.row.name for s in found.values()])
    ax.set_ylim(len(found) - 0.5, -0.5)
    ax.set_xlim(left=0)
    ax.margins(x=0.06)
    ax.xaxis.set_major_locator(MaxNLocator(5))


def _colour(summary: Summary, look: Look) -> str:
    if summary.row.round_off:
        return look.series[ROUND_OFF]
    return look.series[SOURCES if summary.row.sources else THEIRS]


def _legend(canvas: Canvas, look: Look) -> None:
    marks = (("o", look.series[ROUND_OFF], "round-off alone"), ("o", look.series[SOURCES], "other sources"))
    handles = [Line2D([], [], marker=m, color=c, linestyle="", label=words) for m, c, words in marks]
    hollow = {"markerfacecolor": "none", "color": look.series[THEIRS], "linestyle": ""}
    handles.append(Line2D([], [], marker="D", label="published", **hollow))
    canvas.legend(
        handles=handles, loc="upper center", ncols=3, frameon=False, borderaxespad=0.1, handletextpad=0.1
    )


def _draw_on_the_way(
    ax: Axes, found: Mapping[str, Summary], looks: list[int], seen: Mapping[str, np.ndarray], look: Look
) -> None:
    for key, curve in seen.items():
        if len(curve):
            colour = _colour(found[key], look)
            ax.plot(looks, curve, _STYLES[key], color=colour, linewidth=1.5, label=found[key].row.name)
    ax.set_xscale("log")
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:,.0f}"))
    ax.set_ylim(bottom=0)
    ax.set_xlabel("updates")
    ax.set_ylabel("disagreement of\ntwo runs (%)")
    if ax.lines:
        placed = {"loc": "lower center", "bbox_to_anchor": (0.42, 1.0), "borderaxespad": 0.2}
        ax.legend(frameon=False, fontsize="small", ncols=3, handlelength=2.6, columnspacing=1.2, **placed)
