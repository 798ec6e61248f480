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
from experiments.one_bit.summary import LEVEL, PUBLISHED, THEIR_EPOCHS, Summary

LONGEST = 4  # times the largest value: where the interval of a few runs is cut
ROUND_OFF, SOURCES, THEIRS = 0, 1, 5  # which of the colours of a look
_STYLES = {"one_ulp": "-", "split": "--", "order": "-", "augmentation": "--", "init": "-.", "all": ":"}


def variation_figure(
    found: Mapping[str, Summary], looks: list[int], seen: Mapping[str, np.ndarray], images: int
) -> Figure:
    """Args: ``looks`` and ``seen`` are updates, and mean disagreement at each, of every row (percent)."""
    n = max(s.runs.n for s in found.values())
    caption = (
        f"Above: every row of the table, with its {100 * LEVEL:.0f} % interval over {n} runs; hollow: "
        f"published, after {THEIR_EPOCHS} epochs; an interval is cut at {LONGEST} times the largest value. "
        f"Below: mean disagreement of two runs on {images:,} test images while they train."
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
    _draw_rows(left, found, "disagreement", look)
    _draw_rows(right, found, "spread", look)
    left.set_xlabel("disagreement of two runs (%)")
    right.set_xlabel("accuracy SD (points)")
    right.tick_params(labelleft=False)
    _legend(canvas, look)
    _draw_on_the_way(canvas.add_subplot(grid[1, :]), found, looks, seen, look)


def _draw_rows(ax: Axes, found: Mapping[str, Summary], measure: str, look: Look) -> None:
    """One line a row, the first on top; what is not known is left out."""
    hollow = {"markerfacecolor": "none", "markeredgecolor": look.series[THEIRS]}
    values = [getattr(s, measure).value or 0.0 for s in found.values()]
    most = LONGEST * max([*values, *(getattr(p, measure) for p in PUBLISHED.values())])
    for place, (key, summary) in enumerate(found.items()):
        estimate, colour = getattr(summary, measure), _colour(summary, look)
        if estimate.bounded:
            high = min(estimate.high, most)
            ax.hlines(place, estimate.low, high, color=colour, linewidth=2, clip_on=False)
        if estimate.value is not None:
            ax.plot(estimate.value, place, "o", color=colour, markersize=5.5, clip_on=False)
        if key in PUBLISHED:
            ax.plot(getattr(PUBLISHED[key], measure), place, "D", markersize=5, clip_on=False, **hollow)
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
    marks = {
        "round-off alone": {"marker": "o", "color": look.series[ROUND_OFF]},
        "other sources": {"marker": "o", "color": look.series[SOURCES]},
        "published": {"marker": "D", "color": look.series[THEIRS], "markerfacecolor": "none"},
    }
    handles = [Line2D([], [], linestyle="", label=words, **mark) for words, mark in marks.items()]
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
