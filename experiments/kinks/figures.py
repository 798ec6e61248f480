"""The figure: drift with and without kinks, and flips counted against flips predicted."""

from __future__ import annotations

import math
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from driftlab.report.axes import power
from driftlab.report.sections import Figure, Look
from experiments.kinks import series
from suite.showing.wording import Values

_COLOURS = dict(zip(series.GROUPS, (0, 1, 2, 4), strict=True))
_MARKERS = dict(zip(series.GROUPS, "osD^", strict=True))
_BINS = 2  # a decade of predicted flips
_FEWEST = 5  # steps in a bin, for a mean


def figure(values: Values) -> Figure:
    caption = (
        f"Top: a line a seed (n = {len(values)}). Bottom: float32, mean of the steps in each half decade; "
        "bar: their middle 90 %; line: counted as predicted; band: middle 90 % of a Poisson count."
    )
    title = "The drift of the weights, and flips as predicted and as counted"
    return Figure("kinks", title, partial(_draw, values), caption, aspect=1.3)


def _draw(values: Values, canvas: Canvas, look: Look) -> None:
    top, bottom = canvas.subplots(2, 1)
    canvas.subplots_adjust(top=0.985, bottom=0.08, left=0.15, right=0.97, hspace=0.25)
    _draw_drift(values, top, look)
    _draw_flips(values, bottom, look)


def _draw_drift(values: Values, ax: Axes, look: Look) -> None:
    networks = series.by_network(values)
    shown = [(n, c) for n, c in zip(series.extremes(values), look.series[:2], strict=True) if n]
    handles = []
    for name, colour in shown:
        for dtype, style in (("float32", "-"), ("float64", (0, (3, 1.5)))):
            for network in networks[name]:
                _draw_seed(ax, network, dtype, colour, style)
            handles.append(Line2D([], [], color=colour, linestyle=style, label=f"{name}, {dtype}"))
    if series.known(series.first_flip(n) for name, _ in shown for n in networks[name]):
        dot = {"color": look.ink, "marker": "o", "linestyle": "", "markersize": 4}
        handles.append(Line2D([], [], label="first flip", **dot))
    _log(ax)
    _leave_room(ax)
    ax.set_xlabel("step")
    ax.set_ylabel("drift of the weights (relative)")
    ax.legend(handles=handles, frameon=False, loc="upper left", fontsize="small", ncols=2, borderaxespad=0.1)


def _leave_room(ax: Axes) -> None:
    """For the legend above: the axis goes on, its ticks end with the lines."""
    low, high = ax.get_ylim()
    decades = range(math.ceil(math.log10(low)), math.floor(math.log10(high)) + 1)
    every = max(1, math.ceil(len(decades) / 7))
    ax.yaxis.set_major_locator(FixedLocator([10.0**d for d in decades if d % every == 0]))
    ax.set_ylim(low, high * (high / low) ** 0.24)


def _draw_seed(ax: Axes, network: series.Network, dtype: str, colour: str, style: object) -> None:
    found = {s: v for s, v in series.drift(network, dtype).items() if s > 0 and v > 0}
    ax.plot(list(found), list(found.values()), color=colour, linestyle=style, linewidth=0.9, alpha=0.65)
    first = series.first_flip(network, dtype)
    if first in found:
        ax.plot([first], [found[first]], "o", color=colour, markersize=4, markeredgecolor="none")


def _draw_flips(values: Values, ax: Axes, look: Look) -> None:
    steps = {label: series.steps_of(values, label) for label in series.GROUPS}
    found = {label: _binned([(s.near, s.counted) for s in listed]) for label, listed in steps.items()}
    means = [b for bins in found.values() for b in bins]
    least = min([v for p, mean, *_ in means if mean > 0 for v in (p, mean)], default=0.1) / 2
    most = max([v for p, _, _, high in means for v in (p, high)], default=10.0) * 2
    _draw_band(ax, least, most, look)
    for label, bins in found.items():
        mark = {"marker": _MARKERS[label], "color": look.series[_COLOURS[label]], "markersize": 4.5}
        for predicted, mean, low, high in (b for b in bins if b[0] >= least):
            ax.vlines(predicted, max(low, least), max(high, least), color=mark["color"], linewidth=0.9)
            if mean > 0:
                ax.plot([predicted], [mean], linestyle="", markeredgewidth=0, **mark)
        if bins:
            ax.plot([], [], linestyle="", label=label, **mark)
    _log(ax)
    ax.set(xlim=(least, most), ylim=(least, most))
    ax.set(xlabel="predicted changes a step", ylabel="counted changes a step")
    if means:
        ax.legend(frameon=False, loc="upper left", fontsize="small")


def _draw_band(ax: Axes, least: float, most: float, look: Look) -> None:
    from scipy.special import pdtr, pdtrik

    line = np.geomspace(least, most, 200)
    ends = (np.where(pdtr(0, line) >= s, 0.0, np.ceil(pdtrik(s, line))) for s in (0.05, 0.95))
    low, high = (np.maximum(end, least) for end in ends)
    ax.fill_between(line, low, high, color=look.ink, alpha=0.12, linewidth=0)
    ax.plot(line, line, color=look.ink, linewidth=0.8)


def _binned(found: list[tuple[float, float]]) -> list[tuple[float, float, float, float]]:
    """Of the steps in each half decade with enough of them: mean predicted, mean counted, middle 90 %.

    The latter of counted over predicted, times the mean predicted, so that the width of a bin adds nothing.
    """
    bins: dict[int, list[tuple[float, float]]] = {}
    for predicted, counted in found:
        if predicted > 0:
            bins.setdefault(math.floor(_BINS * math.log10(predicted)), []).append((predicted, counted))
    return [_bin(steps) for _, steps in sorted(bins.items()) if len(steps) >= _FEWEST]


def _bin(steps: list[tuple[float, float]]) -> tuple[float, float, float, float]:
    predicted = fmean(p for p, _ in steps)
    low, high = np.quantile([c / p for p, c in steps], [0.05, 0.95], method="inverted_cdf") * predicted
    return predicted, fmean(c for _, c in steps), float(low), float(high)


def _log(ax: Axes) -> None:
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if 0.01 <= v < 1000 else power(10, v)))
