"""The axes of the figures: zeros, leaps of decades, what is not finite, and what is read along them."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from driftlab.measures.measure import Scale
from driftlab.report.series import MOST_LINES, Bundle
from driftlab.report.svg import INK
from driftlab.rounding import UNIT_ROUND_OFF

# Up to this step the axis is linear: a pair that differs mostly does so within the first few updates.
LINEAR_STEPS = 10
# Over more decades than this only powers of ten are labelled.
_CLOSE_DECADES = 2.5
# A relative distance or a loss this far above where it began is on its way to inf: how far it got before
# the last finite number says nothing, and would flatten all the rest.
CEILING = 1e3
# Steps that can be read, of one arm's seeds together.
_READINGS = 12000


def steps(ax: Axes, last: int, room: bool = True) -> None:
    """The step axis from 0 to ``last``: linear up to step 10, logarithmic above; ``room`` for many labels."""
    ax.set_xlabel("step")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    if last > LINEAR_STEPS:
        ax.set_xscale("symlog", linthresh=LINEAR_STEPS, linscale=0.8)
        ax.xaxis.set_major_locator(FixedLocator(_step_ticks(last, room)))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        ax.set_xlabel(f"step (logarithmic above {LINEAR_STEPS})")
    margin = 1.06 if last > LINEAR_STEPS else 1.015
    ax.set_xlim(0, max(last, 1) * margin)


def _step_ticks(last: int, room: bool) -> list[int]:
    """0, 5 and 10, then powers of ten, with their 2 and 5 where there is room."""
    decades = math.log10(last / LINEAR_STEPS)
    between = (1, 2, 5) if room and decades <= _CLOSE_DECADES else (1,)
    powers = [LINEAR_STEPS * 10**n for n in range(math.ceil(decades) + 1)]
    ticks = [part * power_ for power_ in powers for part in between]
    return [0, *([5] if len(between) > 1 else []), *(t for t in ticks if t <= last)]


def places(ax: Axes, at: np.ndarray) -> np.ndarray:
    """Where steps stand, in pixels of the SVG (72 to the inch) from its left edge."""
    points = np.column_stack([at.astype(float), np.ones(len(at))])
    return ax.transData.transform(points)[:, 0] / ax.figure.dpi * 72


def distances(ax: Axes, bundles: list[Bundle], label: str) -> list[str]:
    """A log axis whose bottom line stands for 0, with the unit round-off of both dtypes on the right."""
    values = _finite_values(bundles)
    positive = values[values > 0]
    low = min(positive.min(initial=1.0), UNIT_ROUND_OFF["float64"])
    top = min(max(positive.max(initial=1e-6), 1e-6), CEILING)
    floor = 10.0 ** (math.floor(math.log10(low)) - 1)
    ax.set_yscale("function", functions=(lambda v: np.log10(np.maximum(v, floor)), lambda e: 10.0**e))
    ax.set_ylim(floor, top * 3)
    ax.set_ylabel(label)
    decades = range(round(math.log10(floor)) + 1, math.floor(math.log10(top * 3)) + 1)
    every = max(1, math.ceil(len(decades) / 8))
    ax.yaxis.set_major_locator(FixedLocator([floor, *(10.0**n for n in decades if n % every == 0)]))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: "0" if v <= floor * 1.01 else power(10, v)))
    ax.yaxis.set_minor_locator(NullLocator())
    _unit_round_offs(ax)
    said = ["Right: unit round-off of float32 (2⁻²⁴) and of float64 (2⁻⁵³)."]
    if (values == 0).any():
        said.append("A distance of exactly 0 stands on the bottom line.")
    return said + _leaving(values, top)


def counts(ax: Axes, bundles: list[Bundle], label: str) -> list[str]:
    """0 and 1 apart, logarithmic above."""
    top = max(_finite_values(bundles).max(initial=1.0), 10.0)
    ax.set_yscale("symlog", linthresh=1, linscale=0.5)
    ax.set_ylim(-0.15, top * 2)
    ax.set_ylabel(label)
    ticks = [10**n for n in range(math.floor(math.log10(top * 2)) + 1)]
    ax.yaxis.set_major_locator(FixedLocator([0, *ticks]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0f}" if v < 100 else power(10, v)))
    return ["Logarithmic above 1."]


def plain_values(ax: Axes, bundles: list[Bundle], label: str) -> list[str]:
    """Linear while the values stay within two decades, else logarithmic (where all are positive)."""
    values = _finite_values(bundles)
    low, top = float(values.min(initial=0.0)), _top(bundles, values)
    least = float(values[values <= top].min(initial=np.inf))
    if 0 < least < top / 100:
        ax.set_ylabel(f"{label}, logarithmic")
        ax.set_yscale("log")
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:g}" if 1e-4 < v < 1e4 else power(10, v)))
        ax.set_ylim(least / 1.5, top * 1.5)
    else:
        ax.set_ylabel(label)
        ax.set_ylim(low, top + 0.05 * max(top - low, 1e-9))
    return _leaving(values, top)


def _top(bundles: list[Bundle], values: np.ndarray) -> float:
    """Where the axis ends: medians stay on it up to ``CEILING``, a lone seed up to 3 times the start."""
    first = np.concatenate([b.values[:, 0] for b in bundles])
    first = float(np.median(np.abs(first[np.isfinite(first)]))) if np.isfinite(first).any() else 1.0
    medians = np.concatenate([b.median for b in bundles])
    highest = float(medians[np.isfinite(medians)].max(initial=0.0))
    return min(float(values.max(initial=0.0)), max(3 * first, min(1.2 * highest, CEILING * first)))


SCALES = {Scale.DISTANCE: distances, Scale.COUNT: counts, Scale.VALUE: plain_values}


def _finite_values(bundles: list[Bundle]) -> np.ndarray:
    values = np.concatenate([b.values.ravel() for b in bundles])
    return values[np.isfinite(values)]


def _leaving(values: np.ndarray, top: float) -> list[str]:
    return [f"Values above {top:.2g} leave the axis."] if (values > top).any() else []


def _unit_round_offs(ax: Axes) -> None:
    for dtype, unit in UNIT_ROUND_OFF.items():
        # a zoom moves what is named so
        ax.axhline(unit, color=INK, linewidth=0.7, linestyle=(0, (1, 3)), gid=f"{dtype}-level-line")
        ax.text(
            *(1.01, unit, power(2, unit)),
            **{"transform": ax.get_yaxis_transform(), "va": "center", "gid": f"{dtype}-level-text"},
        )


def readings(ax: Axes, bundles: list[Bundle]) -> dict:
    """Step and place (in pixels of the SVG) of what can be read, and each arm's values there.

    An arm has ``median``, ``low`` and ``high`` and, up to ``MOST_LINES`` seeds, ``seeds`` by their number;
    None where nothing was measured, "inf" where the value was not finite.
    """
    steps = np.unique(np.concatenate([b.steps for b in bundles]))
    most = max(100, min(400, _READINGS // len(bundles[0].values)))
    kept = steps[np.unique(np.linspace(0, len(steps) - 1, min(len(steps), most)).astype(int))]
    box = ax.get_position()
    width, height = ax.figure.get_size_inches() * 72
    return {
        "axis": "step",
        "at": [int(s) for s in kept],
        "place": [round(float(p), 1) for p in places(ax, kept)],
        "box": [
            round(v, 1)
            for v in (box.x0 * width, box.x1 * width, (1 - box.y1) * height, (1 - box.y0) * height)
        ],
        "scale": _height_scale(ax),
        "arms": {b.arm: _of_arm(b, kept) for b in bundles},
    }


def _height_scale(ax: Axes) -> dict:
    """How values become heights, for labels of a part of the axis.

    ``anchors`` are values and their heights in pixels of the SVG; from one to the next the axis is linear
    where it begins at 0 or below, else logarithmic. ``zero`` is the value that stands for 0, or None.
    """
    low, top = ax.get_ylim()
    kind = ax.get_yscale()
    values = [low, 1.0, top] if kind == "symlog" else [low, top]
    pixels = ax.transData.transform([(0, value) for value in values])[:, 1] / ax.figure.dpi * 72
    height = ax.figure.get_size_inches()[1] * 72
    anchors = [[float(f"{v:.6g}"), round(float(height - p), 1)] for v, p in zip(values, pixels, strict=True)]
    return {"anchors": anchors, "zero": anchors[0][0] if kind == "function" else None}


def _of_arm(drawn: Bundle, kept: np.ndarray) -> dict:
    index = {int(step): i for i, step in enumerate(drawn.steps)}

    def at_kept(values: np.ndarray) -> list:
        return [_digits(values[index[s]]) if (s := int(step)) in index else None for step in kept]

    if len(drawn.values) == 1:
        return {"median": at_kept(drawn.median)}
    low, high = drawn.range
    over_seeds = {"median": at_kept(drawn.median), "low": at_kept(low), "high": at_kept(high)}
    if len(drawn.values) > MOST_LINES:
        return over_seeds
    by_seed = zip(drawn.seeds, drawn.values, strict=True)
    return over_seeds | {"seeds": {str(seed): at_kept(values) for seed, values in by_seed}}


def _digits(value: float) -> float | str | None:
    if math.isnan(value):
        return None
    return float(f"{value:.3g}") if math.isfinite(value) else "inf"


def power(base: int, value: float) -> str:
    """``value`` as a power of ``base``, in letters: "10⁻³"."""
    exponent = str(round(math.log(value, base)))
    return f"{base}{exponent.translate(str.maketrans('-0123456789', '⁻⁰¹²³⁴⁵⁶⁷⁸⁹'))}"
