"""The figure: how often each arm diverges, and how each ends beside the reference."""

from __future__ import annotations

from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas

from driftlab.report.sections import Figure, Look
from driftlab.verdict.statistics import clopper_pearson
from experiments.edge_of_stability import outcomes as over
from suite.showing.wording import Values, seeds

_MARKERS = {"reference": "o", "control": "s", "candidate": "^", "bug": "D"}
_APART = 0.13  # between the arms at one rate, in units of the distance between two rates


def figure(values: Values) -> Figure:
    alike = "Networks of the same function diverge in different seeds"
    return Figure(
        "edge-of-stability",
        alike if _alike(values) else "Which runs diverge, by learning rate",
        partial(_draw, values),
        f"Above: share of {seeds(len(values))} that diverged; bars: 95 % intervals. Below: each arm beside "
        "the reference in the same seed. Coloured: one of the two diverged alone.",
        aspect=1.0,
    )


def _alike(values: Values) -> bool:
    """Whether control and candidate both end differently somewhere, and no probe accuses the candidate."""
    differ = [
        any(over.differing(v["runs"], arm) for v in values.values()) for arm in ("control", "candidate")
    ]
    return all(differ) and not over.accused(values, "candidate")


def _draw(values: Values, canvas: Canvas, look: Look) -> None:
    grid = canvas.add_gridspec(2, 3, height_ratios=[1.25, 1], hspace=0.5, wspace=0.12)
    canvas.subplots_adjust(left=0.11, right=0.985, top=0.93, bottom=0.15)
    _shares(values, canvas.add_subplot(grid[0, :]), look)
    first = None
    for column, arm in enumerate(over.COMPARED):
        ax = canvas.add_subplot(grid[1, column], sharey=first)
        first = first or ax
        _pairs(values, arm, ax, look)
        ax.tick_params(labelleft=column == 0)
    first.set_ylabel("seeds")
    handles, names = first.get_legend_handles_labels()
    canvas.legend(
        handles, names, loc="lower center", ncols=4, frameon=False, fontsize="small", columnspacing=1.2
    )


def _shares(values: Values, ax: Axes, look: Look) -> None:
    rates = over.rates(values)
    colours = dict(zip(over.ARMS, (look.ink, look.series[1], look.series[2], look.series[0]), strict=True))
    for number, arm in enumerate(over.ARMS):
        places = np.arange(len(rates)) + _APART * (number - 1.5)
        found = [over.paired(values, arm, rate) for rate in rates]
        shares = np.array([pairs.fallen / pairs.n for pairs in found])
        ends = np.array([clopper_pearson(pairs.fallen, pairs.n) for pairs in found])
        bars = np.abs(ends.T - shares)
        ax.errorbar(
            places, shares, bars, color=colours[arm], marker=_MARKERS[arm], markersize=4.5, linewidth=0,
            elinewidth=1, label=arm,
        )  # fmt: skip
    _rates_below(ax, rates)
    ax.set_xlabel("learning rate")
    ax.set_ylabel("share that diverged")
    ax.set_ylim(-0.03, 1.03)
    ax.legend(frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 0.99))


def _pairs(values: Values, arm: str, ax: Axes, look: Look) -> None:
    rates, bottom = over.rates(values), 0
    found = over.Pairs(*np.array([over.paired(values, arm, rate) for rate in rates]).T)
    kinds = (
        ("neither fell", found.neither, look.grid, 1.0),
        ("only reference", found.only_reference, look.series[4], 1.0),
        ("only this arm", found.only_arm, look.series[3], 1.0),
        ("both fell", found.both, look.ink, 0.45),
    )
    for name, counts, colour, alpha in kinds:
        ax.bar(np.arange(len(rates)), counts, 0.8, bottom, color=colour, alpha=alpha, label=name)
        bottom = bottom + counts
    _rates_below(ax, rates)
    ax.grid(False)
    ax.set_title(arm, fontsize="medium", color=look.ink)
    ax.set_xlabel("learning rate")
    ax.tick_params(axis="x", labelsize="small")


def _rates_below(ax: Axes, rates: list[float]) -> None:
    ax.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
    ax.set_xlim(-0.6, len(rates) - 0.4)
