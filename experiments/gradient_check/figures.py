"""The figures of a gradient check: the staircase of float32, and error against eps with its two branches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure as Canvas
from omegaconf import DictConfig

from driftlab.finite.prediction import Law
from driftlab.report.sections import Figure, Look
from experiments.gradient_check.series import errors, laws, points, typical_derivative
from suite.showing.wording import Values, each, first_of


def figures(settings: DictConfig, values: Values) -> Sequence[Figure]:
    counts = [len(numeric) for numeric in each(values, "literal", "float64", "numeric")]
    few = min(settings.curve.points, *counts)
    gap = max(each(values, "literal", "float32", "quantum"))
    coarse = gap > typical_derivative(values) / 20
    return (
        Figure(
            "staircase",
            "In float32 a numeric derivative can only be a step of a staircase"
            if coarse
            else "Numeric against autograd's derivative, in both dtypes",
            partial(_staircase, values),
            f"Numeric against autograd's derivative at {sum(counts)} random points ({len(values)} seeds), "
            f"one-sided with eps {settings.case.eps:g}. On the line the two agree. The steps are the "
            "spacing of float32 numbers at the size of the loss, divided by eps.",
        ),
        Figure(
            "error-by-eps",
            "The smaller eps, the less truncation and the more round-off",
            partial(_error_by_eps, values),
            f"Median error over {few} points a seed and {len(values)} seeds. Lines: measured; dots: what the "
            "laws predict, eps |L''| / 2 for the one-sided difference and u |L| / eps for round-off; ring: "
            "predicted best eps, one-sided. Where float32 does not see the loss move, the error is the "
            "derivative itself.",
        ),
    )


def _staircase(values: Values, canvas: Canvas, look: Look) -> None:
    ax = canvas.subplots()
    for dtype, colour, marker in (("float32", look.series[0], "o"), ("float64", look.series[1], "s")):
        y, x = points(values, dtype)
        ax.plot(x, y, marker, color=colour, markersize=3, alpha=0.6, markeredgewidth=0, label=dtype)
    ends = np.array(ax.get_xlim())
    ax.plot(ends, ends, color=look.ink, linewidth=0.8, zorder=0, label="equal")
    ax.set_xlim(*ends)
    ax.set_xlabel("autograd's derivative")
    ax.set_ylabel("numeric derivative")
    ax.legend(frameon=False, loc="upper left")


def _error_by_eps(values: Values, canvas: Canvas, look: Look) -> None:
    ax = canvas.subplots()
    steps = np.array(first_of(values)["curve"]["steps"])
    found = np.concatenate([errors(values, d, s) for d in ("float32", "float64") for s in (1, 2)])
    known = found[found > 0]
    low, high = (known.min(), known.max()) if known.size else (1e-16, 1.0)
    zero = low / 30  # where a log axis shows what is exactly 0
    for dtype, colour in (("float32", look.series[0]), ("float64", look.series[1])):
        for sides, style in ((1, "-"), (2, (0, (4, 2)))):
            measured = errors(values, dtype, sides)
            name = f"{dtype}, {'one-sided' if sides == 1 else 'central'}"
            shown = np.where(measured == 0, zero, measured)
            ax.plot(steps, shown, color=colour, linestyle=style, label=name)
        _draw_law(ax, laws(values, dtype, 1), steps, colour)
    ax.plot([], [], ":", color=look.ink, label="law")
    if (found == 0).any():
        ax.axhline(zero, color=look.ink, linewidth=0.6)
        ax.text(steps[-1], zero, "exactly 0", va="top", color=look.ink, fontsize="small")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_ylim(zero / 40, high * 10)
    ax.set_xlabel("eps")
    ax.set_ylabel("|numeric - autograd| (absolute)")
    ax.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 0.1))


def _draw_law(ax: Axes, law: Law, steps: np.ndarray, colour: str) -> None:
    """The two branches, each where it matters, and a ring at the best eps."""
    for branch in (law.truncation, law.round_off):
        near = [h for h in steps if branch(h) > 0 and law.error(law.best_step) / 100 < branch(h)]
        ax.plot(near, [branch(h) for h in near], ":", color=colour, linewidth=1.2)
    if 0 < law.best_step < math.inf:
        ring = {"marker": "o", "markersize": 8, "fillstyle": "none", "linestyle": "", "color": colour}
        ax.plot([law.best_step], [law.error(law.best_step)], **ring)
