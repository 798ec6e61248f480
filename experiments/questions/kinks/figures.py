"""The figure: drift with and without kinks, and flips counted against flips predicted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from statistics import fmean

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullLocator

from driftlab.report.sections import Figure, Look
from experiments.questions.kinks.seeds import GROUPS, by_network, extremes, steps_of
from experiments.questions.kinks.series import Network, Values, drift, first_flip

_COLOURS = dict(zip(GROUPS, (0, 1, 2, 4), strict=True))
_MARKERS = dict(zip(GROUPS, "osD^", strict=True))
_BINS = 2  # a decade of predicted flips
_FEWEST = 5  # steps in a bin, for a mean


def figure(values: Values) -> Figure:
    n = len(values)
    caption = (
        f"Top: a line a seed (n = {n}). Bottom: float32, mean of the steps in each half decade; bar: their "
        "middle 90 %; line: counted as predicted; band: middle 90 % of a Poisson count."
    )
    title = "Drift leaps at the first flip, and flips can be predicted"
    return Figure("kinks", title, partial(_draw, values), caption, aspect=1.3)


def _draw(values: Values, canvas: Canvas, look: Look) -> None:
    top, bottom = canvas.subplots(2, 1)
    canvas.subplots_adjust(top=0.985, bottom=0.08, left=0.15, right=0.97, hspace=0.25)
    _draw_drift(values, top, look)
    _draw_flips(values, bottom, look)


def _draw_drift(values: Values, ax: Axes, look: Look) -> None:
    shown = [(name, colour) for name, colour in zip(extremes(values), look.series[:2], strict=True) if name]
    handles = []
    for name, colour in shown:
        networks = by_network(values)[name]
        for dtype, style in (("float32", "-"), ("float64", (0, (3, 1.5)))):
            for network in networks.values():
                _draw_seed(ax, network, dtype, {"color": colour, "linestyle": style})
            handles.append(Line2D([], [], color=colour, linestyle=style, label=f"{name}, {dtype}"))
    if any(first_flip(n) is not None for name, _ in shown for n in by_network(values)[name].values()):
        handles.append(
            Line2D([], [], color=look.ink, marker="o", linestyle="", markersize=4, label="first flip")
        )
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


def _draw_seed(ax: Axes, network: Network, dtype: str, look: Mapping) -> None:
    found = {s: v for s, v in drift(network, dtype).items() if s > 0 and v > 0}
    ax.plot(list(found), list(found.values()), linewidth=0.9, alpha=0.65, **look)
    first = first_flip(network, dtype)
    if first in found:
        ax.plot([first], [found[first]], "o", color=look["color"], markersize=4, markeredgecolor="none")


def _draw_flips(values: Values, ax: Axes, look: Look) -> None:
    found = {label: _binned([(s.near, s.counted) for s in steps_of(values, label)]) for label in GROUPS}
    means = [b for bins in found.values() for b in bins]
    least = min([v for p, mean, *_ in means if mean > 0 for v in (p, mean)], default=0.1) / 2
    most = max([v for p, _, _, high in means for v in (p, high)], default=10.0) * 2
    _draw_band(ax, least, most, look)
    for label, bins in found.items():
        colour = look.series[_COLOURS[label]]
        for predicted, mean, low, high in (b for b in bins if b[0] >= least):
            ax.vlines(predicted, max(low, least), max(high, least), color=colour, linewidth=0.9)
            if mean > 0:
                ax.plot([predicted], [mean], _MARKERS[label], color=colour, markersize=4.5, markeredgewidth=0)
        if bins:
            ax.plot([], [], _MARKERS[label], color=colour, markersize=4.5, label=label)
    _log(ax)
    ax.set_xlim(least, most)
    ax.set_ylim(least, most)
    ax.set_xlabel("predicted changes a step")
    ax.set_ylabel("counted changes a step")
    if means:
        ax.legend(frameon=False, loc="upper left", fontsize="small")


def _draw_band(ax: Axes, least: float, most: float, look: Look) -> None:
    from scipy.special import pdtr, pdtrik

    line = np.geomspace(least, most, 200)
    low, high = (np.ceil(pdtrik(share, line)) for share in (0.05, 0.95))
    low = np.where(pdtr(0, line) >= 0.05, 0.0, low)
    high = np.where(pdtr(0, line) >= 0.95, 0.0, high)
    ax.fill_between(
        line, np.maximum(low, least), np.maximum(high, least), color=look.ink, alpha=0.12, linewidth=0
    )
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
    ax.set_xscale("log")
    ax.set_yscale("log")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(numticks=9))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if 0.01 <= v < 1000 else _power(v)))


def _power(value: float) -> str:
    digits = str(round(math.log10(value))).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return f"10{digits}"
