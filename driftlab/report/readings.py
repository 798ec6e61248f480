"""The numbers behind a figure, for the pointer and the keys."""

from __future__ import annotations

import math

import numpy as np
from matplotlib.axes import Axes

from driftlab.report import axes as scale
from driftlab.report.series import MOST_LINES, Bundle

# Steps that can be read, of one arm's seeds together.
_READINGS = 12000


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
        "place": [round(float(p), 1) for p in scale.places(ax, kept)],
        "box": [
            round(v, 1)
            for v in (box.x0 * width, box.x1 * width, (1 - box.y1) * height, (1 - box.y0) * height)
        ],
        "arms": {b.arm: _of_arm(b, kept) for b in bundles},
    }


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
