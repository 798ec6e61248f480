"""The two figures: the differences of the split that was asked about, and error against K over the sweep."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from driftlab.report.axes import power
from driftlab.report.sections import Figure, Look
from experiments.split_gradient.case import Case
from experiments.split_gradient.factors import bound_in_words
from experiments.split_gradient.literal import DTYPES, FULL_FLOAT64
from experiments.split_gradient.passes import PASSES, unit_round_off
from experiments.split_gradient.seeds import Groups, groups
from experiments.split_gradient.sweep import BLOCKED, DATA, LEFT_TO_RIGHT, SUMS
from suite.showing.wording import Rows, Values, all_rows, chosen, grouped, middle, numbers, seeds

_MARKERS = dict(zip(PASSES, ("o", "s", "D"), strict=True))
_ROOM = 10  # points beside the tick labels: on a small screen words are larger than drawn
_LABELS = {FULL_FLOAT64: "float64,\n53 bits"}


def literal_figure(values: Values, case: Case) -> Figure:
    found, n = groups(values), len(values)
    inside = all(row["share"] <= 1 for rows in found.values() for row in rows)
    caption = (
        f"{case.title}. Largest absolute difference of each pass, a mark a seed (n = {n}). Long line: the "
        "largest a-priori bound of an element; short line: one ulp of the largest element; medians over "
        "seeds. Bottom line: equal bit for bit. "
        f"{'Every' if inside else 'Not every'} difference lies within its bound."
    )
    title = "Original against split, by dtype and pass"
    return Figure("split_differences", title, partial(_draw_literal, found), caption)


def _draw_literal(found: Groups, canvas: Canvas, look: Look) -> None:
    ax = canvas.subplots()
    canvas.subplots_adjust(top=0.91, bottom=0.13, right=0.985, left=0.19)
    shown = ("difference", "bound", "ulp")
    zero = log_axis_with_zero(ax, [row[key] for rows in found.values() for row in rows for key in shown])
    coarsest_first = sorted(DTYPES, key=lambda d: (-unit_round_off(DTYPES[d]), d == FULL_FLOAT64))
    present = [d for d in coarsest_first if (d, PASSES[0]) in found]
    for column, dtype in enumerate(present):
        for index, pass_ in enumerate(PASSES):
            _draw_group(ax, found[dtype, pass_], column + (index - 1) * 0.3, zero, look.series[index])
    ax.set_xticks(range(len(present)), [_LABELS.get(d, d) for d in present])
    ax.set_xlim(-0.55, len(present) - 0.45)
    ax.set_ylabel("largest difference (absolute)", labelpad=_ROOM)
    ax.grid(visible=False, axis="x")
    _name_marks(ax, found["float32", "input gradient"], present.index("float32") + 0.3, look)
    _legend(canvas, look)


def _draw_group(ax: Axes, rows: Rows, x: float, zero: float, colour: str) -> None:
    spread = np.linspace(-0.1, 0.1, len(rows)) if len(rows) > 1 else np.zeros(1)
    heights = [v or zero for v in numbers(rows, "difference")]
    mark = {"color": colour, "marker": _MARKERS[rows[0]["pass"]], "linestyle": "", "markersize": 3.2}
    ax.plot(x + spread, heights, alpha=0.7, markeredgewidth=0, clip_on=False, **mark)
    for key, half in (("bound", 0.13), ("ulp", 0.07)):
        if np.isfinite(at := middle(key)(rows)):
            ax.hlines(at, x - half, x + half, color=colour, linewidth=1.6)


def _name_marks(ax: Axes, rows: Rows, x: float, look: Look) -> None:
    """What the two lines are, said at one group for all."""
    for key, words in (("bound", "bound"), ("ulp", "1 ulp")):
        beside = {"xytext": (10, 0), "textcoords": "offset points", "va": "center", "color": look.ink}
        ax.annotate(words, (x + 0.05, middle(key)(rows)), fontsize="small", **beside)


def log_axis_with_zero(ax: Axes, values: Sequence[float]) -> float:
    """A log y axis over the positive values whose bottom line stands for 0; returns where that lies."""
    positive = [v for v in values if v > 0 and np.isfinite(v)] or [1.0]
    low, high = np.floor(np.log10(min(positive))), np.ceil(np.log10(max(positive)))
    zero = 10.0 ** (low - max(0.7, 0.09 * (high - low)))
    step = max(1, int(np.ceil((high - low) / 8)))
    ax.set_yscale("log")
    ax.set_ylim(zero, 10.0**high * 1.5)
    ax.yaxis.set_major_locator(FixedLocator([zero, *(10.0 ** np.arange(low, high + 1, step))]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: "0" if v < zero * 1.01 else power(10, v)))
    return zero


def _legend(canvas: Canvas, look: Look) -> None:
    """The passes in a row above the axes."""
    handles = [
        Line2D([], [], marker=_MARKERS[p], color=look.series[i], linestyle="", markersize=5)
        for i, p in enumerate(PASSES)
    ]
    tight = {"handletextpad": 0.1, "columnspacing": 2.4, "borderaxespad": 0.2, "frameon": False}
    canvas.legend(handles, PASSES, loc="upper center", ncols=len(PASSES), **tight)


def sweep_figure(values: Values) -> Figure:
    rows, controls = all_rows(values, "sweep"), all_rows(values, "controls")
    points = len({(r["case"], r["layout"]) for r in rows})
    caption = (
        f"Largest |original - split| over u·(|W| * |x|) against K of the element where it is: {points} cases "
        f"and layouts, median of {seeds(values)}, whisker least to greatest. "
        "Filled: float32; hollow: float64, in its own u. Bottom line: equal bit for bit. Solid: the bound "
        f"2 gamma_K / u; dotted: √K. Dashed, dash-dotted: largest error of {SUMS} float32 sums, added "
        f"{LEFT_TO_RIGHT} and in {BLOCKED}. {bound_in_words(rows)}"
    )
    title = "Difference against the length of the sum"
    return Figure("split_sweep", title, partial(_draw_sweep, rows, controls), caption, aspect=0.78)


def _draw_sweep(rows: Rows, controls: Rows, canvas: Canvas, look: Look) -> None:
    axes = canvas.subplots(1, len(DATA), sharex=True, sharey=True)
    canvas.subplots_adjust(top=0.87, wspace=0.08, right=0.985, left=0.145, bottom=0.14)
    lengths = [r["terms"] for r in (*rows, *controls)]
    zero = log_axis_with_zero(axes[0], [2 * max(lengths), *(r["largest"] for r in rows)])
    for ax, data in zip(axes, reversed(DATA), strict=True):
        ax.set_xscale("log")
        ax.xaxis.set_major_locator(LogLocator(10, numticks=4))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlim(min(lengths) / 1.6, max(lengths) * 1.6)
        ax.set_title(f"{data.replace(' ', '-')} numbers", fontsize="medium", color=look.ink)
        ax.set_xlabel("K, length of the sum")
        _draw_points(ax, chosen(rows, data=data), zero, look)
        _draw_laws(ax, lengths, look)
        _draw_controls(ax, chosen(controls, data=data), look, named=data == "zero mean")
    axes[0].set_ylabel("difference (u·|W|*|x|)", labelpad=_ROOM)
    axes[1].tick_params(labelleft=False)
    _legend(canvas, look)


def _draw_points(ax: Axes, rows: Rows, zero: float, look: Look) -> None:
    for (pass_, dtype), found in grouped(rows, "pass", "dtype").items():
        cases = grouped(found, "case", "layout").values()
        colour = look.series[PASSES.index(pass_)]
        k, low, heights, high = np.array([_spread(one, zero) for one in cases]).T
        fill = {"markerfacecolor": colour if dtype == "float32" else "none", "markeredgecolor": colour}
        shape = {"marker": _MARKERS[pass_], "markersize": 3.2, "markeredgewidth": 0.8, "linestyle": ""}
        ax.vlines(k, low, high, color=colour, linewidth=0.7, alpha=0.5)
        ax.plot(k, heights, alpha=0.8, clip_on=False, **shape, **fill)


def _spread(rows: Rows, zero: float) -> tuple[float, float, float, float]:
    """K (median), and the least, median and greatest difference."""
    seen = [row["largest"] or zero for row in rows]
    return middle("terms")(rows), min(seen), median(seen), max(seen)


def _draw_laws(ax: Axes, lengths: Sequence[int], look: Look) -> None:
    ends = np.array([min(lengths), max(lengths)], dtype=float)
    ax.plot(ends, 2 * ends, color=look.ink, linewidth=1.2)
    ax.plot(ends, np.sqrt(ends), color=look.ink, linewidth=1.2, linestyle=":")
    centre = ends.prod() ** 0.5
    _name(ax, "bound 2K", (centre, 2 * centre), (-4, 4), look.ink)
    _name(ax, "√K", (ends[1], ends[1] ** 0.5), (-3, 5), look.ink)


def _draw_controls(ax: Axes, controls: Rows, look: Look, named: bool) -> None:
    for order, style, away in ((LEFT_TO_RIGHT, "--", 5), (BLOCKED, "-.", -17)):
        seen = grouped(chosen(controls, order=order), "terms")
        heights = [middle("largest_whole")(rows) for rows in seen.values()]
        ax.plot(list(seen), heights, color=look.series[4], linewidth=1.3, linestyle=style)
        if named:
            _name(ax, order, (list(seen)[-1], heights[-1]), (6, away), look.series[4])


def _name(ax: Axes, words: str, at: tuple[float, float], away: tuple[float, float], colour: str) -> None:
    placed = {"xytext": away, "textcoords": "offset points", "ha": "right"}
    ax.annotate(words, at, fontsize="small", color=colour, **placed)
