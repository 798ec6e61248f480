"""The difference by batch size, by depth and layer by layer, drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from statistics import median
from typing import TYPE_CHECKING

from driftlab.report.sections import Figure, Look
from experiments.batch_size.plan import Plan
from experiments.batch_size.seeds import NORM_NAMES, arithmetic_names, largest_of, sweeps_of
from experiments.batch_size.why_tables import BLOCK
from suite.showing.wording import Values, all_rows, counted, each, seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

Lines = Mapping[tuple[str, str], tuple[Sequence[int], Sequence[float]]]
# Marker and colour of what a kind of layer adds; the line of what is carried has the first colour.
MARKS = {
    **{"convolution": ("o", 1), "BatchNorm": ("s", 2), "ReLU": ("^", 3)},
    **{"linear": ("D", 4), "residual add": ("x", 5)},
}


def figures(plan: Plan, values: Values) -> list[Figure]:
    drawn = [_by_batch_size(values, plan)]
    if plan.invariant:
        return drawn
    return [*drawn, *([_by_depth(values, plan)] if plan.blocks else []), _by_layer(values, plan)]


def _by_batch_size(values: Values, plan: Plan) -> Figure:
    shown = {"zeros": "zero boards", "random": "random boards"}

    def draw(canvas: Canvas, look: Look) -> None:
        axes = canvas.add_subplot()
        lines = {
            (name, inputs): _curve(sweeps_of(values, "batch", name, inputs))
            for name in arithmetic_names(values)
            for inputs in shown
        }
        _draw_lines(axes, look, lines, shown)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        _finish(axes, look, "batch size", "largest difference (absolute)")

    return Figure(
        "batch_sizes",
        "The first row's logits by batch size",
        draw,
        "Largest absolute difference of the first row's logits in a batch from those alone, "
        f"{counted(plan.blocks, 'residual block')} with BatchNorm, {seeds(values)} (largest). "
        + (
            "A line steps where the library takes another kernel or blocking."
            if any(largest_of(values, "batch", name) for name in arithmetic_names(values))
            else "All are exactly 0."
        ),
    )


def _curve(sweeps: Sequence[dict]) -> tuple[list[int], list[float]]:
    by_size = zip(*(s["differences"] for s in sweeps), strict=True)
    return sweeps[0]["sizes"], [max(at) for at in by_size]


def _by_depth(values: Values, plan: Plan) -> Figure:
    def draw(canvas: Canvas, look: Look) -> None:
        axes = canvas.add_subplot()
        depths = range(plan.blocks + 1)
        lines = {
            (name, norm): (depths, [largest_of(values, norm, name, d, "common") for d in depths])
            for name in arithmetic_names(values)
            for norm in ("identity", "batch")
        }
        _draw_lines(axes, look, lines, {n: NORM_NAMES[n] for n in ("identity", "batch")})
        axes.xaxis.get_major_locator().set_params(integer=True)
        _finish(axes, look, "residual blocks", "largest difference (absolute)")

    return Figure(
        "depths",
        "By depth, BatchNorm against Identity in its place",
        draw,
        f"Largest absolute difference of the first row's logits over {counted(len(plan.few), 'batch size')}, "
        f"zero and random boards, {seeds(values)} (largest).",
    )


def _draw_lines(axes: Axes, look: Look, lines: Lines, kinds: Mapping[str, str]) -> None:
    """A colour for each arithmetic; of the two ``kinds`` the first is dashed and hollow."""
    names = list(dict.fromkeys(name for name, _ in lines))
    dashed = next(iter(kinds))
    zero = _log_axis(axes, look, [y for _, ys in lines.values() for y in ys])
    for (name, kind), (xs, ys) in lines.items():
        colour = look.series[names.index(name)]
        axes.plot(xs, [y or zero for y in ys], color=colour, **_manner(kind == dashed, colour))
    arithmetics = [(n, {"color": look.series[i], "linewidth": 2.5}) for i, n in enumerate(names)]
    manners = [(k, {"color": look.ink, **_manner(n == dashed, look.ink)}) for n, k in kinds.items()]
    # a legend fills its columns first: the arithmetics in its upper row, what is dashed in its lower
    for label, manner in (x for pair in zip_longest(arithmetics, manners) for x in pair if x):
        axes.plot([], [], label=label, **manner)


def _manner(dashed: bool, colour: str) -> dict:
    hollow = {"linestyle": "--", "markersize": 4, "markerfacecolor": "none"}
    filled = {"linestyle": "-", "markersize": 2.4, "markerfacecolor": colour}
    return {"linewidth": 1.2, "marker": "o"} | (hollow if dashed else filled)


def _by_layer(values: Values, plan: Plan) -> Figure:
    def draw(canvas: Canvas, look: Look) -> None:
        axes = canvas.add_subplot()
        layers = each(values, "layers", "random")
        parts = [i for i, layer in enumerate(layers[0]) if layer["kind"] != BLOCK]
        carried, fresh = (
            [median(seed[i][what] or 0.0 for seed in layers) for i in parts] for what in ("carried", "fresh")
        )
        zero = _log_axis(axes, look, carried + fresh)
        place = range(1, len(parts) + 1)
        axes.plot(place, [y or zero for y in carried], color=look.series[0], linewidth=1.4, label="carried")
        kinds = [layers[0][i]["kind"] for i in parts]
        for kind, (marker, colour) in MARKS.items():
            at = [i for i, k in enumerate(kinds) if k == kind]
            mark = {"marker": marker, "markersize": 3, "markerfacecolor": "none", "linestyle": ""}
            if at:
                xs, ys = [place[i] for i in at], [fresh[i] or zero for i in at]
                axes.plot(xs, ys, color=look.series[colour], label=kind, **mark)
        _finish(axes, look, "layer, in the order of execution", "relative difference (2-norms)")

    return Figure(
        "layers",
        "What each layer carries, and what it adds itself",
        draw,
        f"First row of a batch of {plan.at} against alone, random boards, float32, median of "
        f"{seeds(values)}. Line: the difference that a layer's output carries. Markers: what the "
        f"layer adds, fed exactly the row that it is fed alone; other than 0 for {_adding(values)}.",
    )


def _adding(values: Values) -> str:
    """The kinds of layer that add a difference of their own."""
    layers = [layer for layer in all_rows(values, "layers", "random") if layer["fresh"]]
    kinds = dict.fromkeys(layer["kind"] for layer in layers if layer["kind"] != BLOCK)
    return f"{' and '.join(kinds)} alone" if kinds else "none"


def _log_axis(axes: Axes, look: Look, ys: Sequence[float]) -> float:
    """Log scale for ``ys``; a line for zeros, below the rest, at the height that is returned."""
    seen = [y for y in ys if y]
    has_zeros = len(seen) < len(ys)
    low, high = (min(seen), max(seen)) if seen else (1.0, 1.0)
    axes.set_yscale("log")
    ticks = _ticks(low, high) if seen else []
    axes.set_yticks(ticks, [f"{tick:.0e}" for tick in ticks])
    axes.minorticks_off()
    zero = low * (high / low) ** -0.12 / 3
    axes.set_ylim((zero * (high / low) ** -0.08 if has_zeros else low) / 2, high * 3)
    if has_zeros:
        axes.axhline(zero, color=look.ink, linewidth=0.6, alpha=0.5)
        below = {"textcoords": "offset points", "ha": "right", "va": "top", "fontsize": "small"}
        axes.annotate(
            "exactly 0", (1, zero), (-2, -4), xycoords=("axes fraction", "data"), color=look.ink, **below
        )
    return zero


def _ticks(low: float, high: float) -> list[float]:
    """Round numbers within the data, eight at most: a tick below them would belong to no value."""
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1, 2, 5) if len(decades) < 5 else (1,)
    ticks = [s * 10.0**k for k in decades for s in steps if low / 2 <= s * 10.0**k <= high * 2]
    return ticks[:: len(ticks) // 9 + 1]


def _finish(axes: Axes, look: Look, x: str, y: str) -> None:
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(color=look.grid, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.figure.subplots_adjust(top=0.85)
    # wide columns: on a small screen the words grow by half, and what is drawn does not
    place = {"loc": "lower center", "bbox_to_anchor": (0.42, 1.0), "ncols": 3, "columnspacing": 4.2}
    axes.legend(frameon=False, labelcolor=look.ink, fontsize="small", handlelength=1.8, **place)
