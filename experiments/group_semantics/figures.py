"""What is connected, and how far groups are from convs side by side: drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.patches import Rectangle

from driftlab.arithmetic.integers import EXACT_PASSES
from driftlab.report.sections import Figure, Look
from experiments.group_semantics.reach import GROUPED, INTERLEAVED, PLAIN
from experiments.group_semantics.reach_tables import kind_label, least_share
from experiments.group_semantics.verdicts import ASKED
from suite.showing.wording import Values, all_rows, chosen, percent, seeds

_LINES = {"fontsize": "medium", "linespacing": 1.5}  # on a small screen words are larger than drawn
TARGETS = ("conv2_s1", "conv3_s1", "conv5_s1", "scores")


def figures(values: Values) -> list[Figure]:
    """The matrices are of the first seed, the differences of all."""
    seed, first = next(iter(values.items()))
    return [
        _conv_figure(first["literal"]["case"], first["layers"][ASKED], seed),
        _layers_figure({name: kinds for name, kinds in first["layers"].items() if name != ASKED}, seed),
        _through_figure(first["through"], seed),
        _differences_figure(values),
    ]


def _conv_figure(name: str, kinds: Mapping[str, dict], seed: int) -> Figure:
    def draw(canvas: Canvas, look: Look) -> None:
        for number, kind in enumerate((PLAIN, GROUPED, INTERLEAVED), start=1):
            axes = canvas.add_subplot(1, 3, number)
            _matrix(axes, kinds[kind], look)
            axes.set_title(kind_label(kind, kinds[kind]["groups"]).replace(", ", ",\n"), **_LINES)
            axes.set_xlabel("input channel")
            axes.set_ylabel("output channel" if number == 1 else "")
        canvas.tight_layout()

    shares = ", ".join(percent(least_share([kinds[kind]])) for kind in (PLAIN, GROUPED, INTERLEAVED))
    caption = (
        f"{name}. Filled where the output has a nonzero gradient with respect to the channel, seed "
        f"{seed}: {shares} of the pairs."
    )
    return Figure("conv", "Which input channels reach which outputs: one convolution", draw, caption, 0.5)


def _layers_figure(layers: Mapping[str, dict], seed: int) -> Figure:
    def draw(canvas: Canvas, look: Look) -> None:
        for column, (name, kinds) in enumerate(layers.items(), start=1):
            for row, kind in enumerate((PLAIN, GROUPED)):
                axes = canvas.add_subplot(2, len(layers), row * len(layers) + column)
                _matrix(axes, kinds[kind], look)
                axes.set_title("" if row else name.removeprefix("conv."), fontsize="medium")
                axes.set_xlabel("input channel" if row else "")
                label = kind_label(kind, kinds[kind]["groups"])
                axes.set_ylabel(f"{label}\noutput channel" if column == 1 else "", **_LINES)
        canvas.tight_layout()

    plain, grouped = (
        ", ".join(percent(least_share([k[kind]])) for k in layers.values()) for kind in (PLAIN, GROUPED)
    )
    caption = (
        f"Filled where the output depends on the channel, in bins of a few channels, seed {seed}. Above "
        f"with groups=1: {plain} of the pairs. Below grouped: {grouped}."
    )
    title = "Which input channels reach which outputs: the grouped layers of the network"
    return Figure("layers", title, draw, caption, 0.75)


def _through_figure(nets: Mapping[str, dict], seed: int) -> Figure:
    def draw(canvas: Canvas, look: Look) -> None:
        for row, (net, found) in enumerate(nets.items()):
            for column, target in enumerate(TARGETS, start=1):
                axes = canvas.add_subplot(2, len(TARGETS), row * len(TARGETS) + column)
                _matrix(axes, found[target], look)
                axes.set_title("" if row else target, fontsize="medium")
                axes.set_xlabel("conv1 channel" if row else "")
                axes.set_ylabel(f"{net}\noutput" if column == 1 else "", **_LINES)
        canvas.tight_layout()

    said = "; ".join(
        f"{net}: " + ", ".join(f"{target} {percent(least_share([found[target]]))}" for target in TARGETS)
        for net, found in nets.items()
    )
    caption = (
        "Filled where the output depends on the channel of conv1. Above the network as it is, where "
        f"conv3 has groups=1; below with conv3 grouped too. Pairs that depend, seed {seed}: {said}."
    )
    return Figure("through", "From the channels of conv1 through the network", draw, caption, 0.75)


def _differences_figure(values: Values) -> Figure:
    cases = [f for case in all_rows(values, "sweep") for f in case["passes"]]
    literal = all_rows(values, "literal", "passes", dtype="float32")
    floor = _below([f["u"] for f in (*cases, *literal)])

    def draw(canvas: Canvas, look: Look) -> None:
        axes = canvas.add_subplot()
        for number, pass_ in enumerate(("forward", "weight gradient", "input gradient")):
            style = {"color": look.series[number], "marker": "osD"[number], "alpha": 0.55}
            _points(axes, chosen(cases, pass_=pass_), floor, **style, label=pass_)
        style = {"color": look.ink, "marker": "x", "markersize": 5}
        _points(axes, literal, floor, **style, label=ASKED)
        _bound(axes, sorted({f["terms"] for f in (*cases, *literal)}), floor, look)
        axes.set_xlabel("products in the longest sum, K")
        axes.set_ylabel("largest difference (u |W| * |x|)")
        axes.grid(color=look.grid)
        axes.legend(frameon=False, loc="upper left", fontsize="small", labelspacing=0.8)
        canvas.tight_layout()

    equal = sum(f["u"] == 0 for f in cases)
    largest = max(f["u"] for f in cases)
    caption = (
        f"{len(cases) // len(EXACT_PASSES)} convolutions of all kinds ({seeds(values)}), three "
        f"passes each, float32, u = 2^-24: {equal} of {len(cases)} points are equal in every bit, the "
        f"largest is {largest:.3g}. The bound is that of two sums of K products in any order."
    )
    return Figure(
        "differences", "Groups against convs side by side, beside the rounding bound", draw, caption
    )


def _below(heights: Sequence[float]) -> float:
    """A power of ten with room below all that is not zero: where the zeros are drawn on a log axis."""
    return 10.0 ** math.floor(math.log10(min([1.0, *(h for h in heights if h)]) / 2))


def _points(axes: Axes, found: Sequence[dict], floor: float, **style) -> None:
    heights = [f["u"] or floor for f in found]
    axes.plot([f["terms"] for f in found], heights, **{"linestyle": "", "markersize": 4} | style)


def _bound(axes: Axes, terms: Sequence[int], floor: float, look: Look) -> None:
    """The line that no rounding crosses, and a line of their own for differences of zero."""
    axes.set(xscale="log", yscale="log")
    axes.plot(terms, [2 * k for k in terms], color=look.ink, linewidth=1.5)
    last, place = terms[-1], {"textcoords": "offset points", "ha": "right", "color": look.ink}
    axes.annotate("bound, 2 K", (last, 2 * last), (-28, -2), **place)
    axes.axhline(floor, color=look.grid, linewidth=1)
    axes.annotate("equal in every bit", (last, floor), (0, 6), **place)
    powers = [10.0**k for k in range(round(math.log10(floor)) + 1, len(str(2 * last)))]
    axes.set_yticks([floor, *powers], ["0", *(f"{p:,g}" for p in powers)])
    axes.minorticks_off()


def _matrix(axes: Axes, found: dict, look: Look) -> None:
    """Filled as far as the pairs of a bin depend, output 0 at the top.

    As few rectangles as there are blocks: an image would keep its colours on a page that turns dark.
    """
    rows, columns = len(found["bins"]), len(found["bins"][0])
    height, width, top = found["outputs"] / rows, found["inputs"] / columns, -0.5
    for line, alike in groupby(found["bins"]):
        tall, left = len(list(alike)) * height, -0.5
        for share, run in groupby(line):
            wide = len(list(run)) * width
            if share:
                axes.add_patch(
                    Rectangle((left, top), wide, tall, color=look.series[0], alpha=share, linewidth=0)
                )
            left += wide
        top += tall
    axes.set(xlim=(-0.5, found["inputs"] - 0.5), ylim=(found["outputs"] - 0.5, -0.5))
    axes.set_xticks([0, found["inputs"] - 1])
    axes.set_yticks([0, found["outputs"] - 1])
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
