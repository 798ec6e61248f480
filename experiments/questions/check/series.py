"""What the seeds of a gradient check measured, put together."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median

import numpy as np

from driftlab.finite.prediction import Law

Values = Mapping[int, dict]


def points(values: Values, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numeric and autograd's derivative of every point of every seed."""
    keys = ("numeric", "autograd")
    both = [np.concatenate([v["literal"][dtype][k] for v in values.values()]).astype(float) for k in keys]
    finite = np.isfinite(both[0])  # a step may leave the domain of the loss
    return both[0][finite], both[1][finite]


def ratios(values: Values, dtype: str) -> np.ndarray:
    numeric, autograd = points(values, dtype)
    return numeric[autograd != 0] / autograd[autograd != 0]


def typical_derivative(values: Values) -> float:
    """The median of |autograd's derivative| in float64 where it is not 0, over all points of all seeds."""
    sizes = np.abs(points(values, "float64")[1])
    return float(np.median(sizes[sizes > 0]))


def typical_curvature(values: Values) -> float:
    """The median of |L''|, over all points of all seeds."""
    found = np.concatenate([v["literal"]["curvature"] for v in values.values()]).astype(float)
    return float(np.nanmedian(found)) if np.isfinite(found).any() else 0.0


def laws(values: Values, dtype: str, sides: int) -> Law:
    """With the medians over seeds."""
    curves = [v["curve"] for v in values.values()]
    curvatures = [c["second" if sides == 1 else "third"] or 0.0 for c in curves]  # None: out of the domain
    return Law(median(c["loss"] for c in curves), median(curvatures), dtype, sides)


def errors(values: Values, dtype: str, sides: int) -> np.ndarray:
    """Against eps: medians over seeds; NaN where eps leaves the domain of the loss in each of them."""
    of_seeds = np.array([v["curve"]["errors"][f"{dtype}.{sides}"] for v in values.values()], dtype=float)
    known = np.isfinite(of_seeds).any(axis=0)
    medians = np.full(of_seeds.shape[1], np.nan)
    medians[known] = np.nanmedian(of_seeds[:, known], axis=0)
    return medians
