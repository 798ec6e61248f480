"""What the seeds of a gradient check measured, put together."""

from __future__ import annotations

from statistics import median

import numpy as np

from driftlab.finite.prediction import Law
from suite.showing.wording import Values, each


def points(values: Values, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Numeric and autograd's derivative of every point of every seed."""
    numeric, autograd = (_of_all(values, dtype, key) for key in ("numeric", "autograd"))
    finite = np.isfinite(numeric)  # a step may leave the domain of the loss
    return numeric[finite], autograd[finite]


def _of_all(values: Values, *path: str) -> np.ndarray:
    return np.concatenate(each(values, "literal", *path)).astype(float)


def ratios(values: Values, dtype: str) -> np.ndarray:
    numeric, autograd = points(values, dtype)
    return numeric[autograd != 0] / autograd[autograd != 0]


def off(values: Values, dtype: str) -> np.ndarray:
    """|numeric - autograd| of every point."""
    numeric, autograd = points(values, dtype)
    return np.abs(numeric - autograd)


def typical_derivative(values: Values) -> float:
    """The median of |autograd's derivative| in float64 where it is not 0, over all points of all seeds."""
    sizes = np.abs(points(values, "float64")[1])
    return float(np.median(sizes[sizes > 0]))


def typical_curvature(values: Values) -> float:
    """The median of |L''|, over all points of all seeds."""
    found = _of_all(values, "curvature")
    return float(np.nanmedian(found)) if np.isfinite(found).any() else 0.0


def literal_law(values: Values, dtype: str) -> Law:
    """Of the one-sided difference in the literal case."""
    return Law(median(each(values, "literal", dtype, "loss")), typical_curvature(values), dtype)


def laws(values: Values, dtype: str, sides: int) -> Law:
    """Along the curve, with the medians over seeds."""
    derivatives = each(values, "curve", "second" if sides == 1 else "third")  # None: out of the domain
    return Law(median(each(values, "curve", "loss")), median(d or 0.0 for d in derivatives), dtype, sides)


def errors(values: Values, dtype: str, sides: int) -> np.ndarray:
    """Against eps: medians over seeds; NaN where eps leaves the domain of the loss in each of them."""
    of_seeds = np.array(each(values, "curve", "errors", f"{dtype}.{sides}"), dtype=float)
    known = np.isfinite(of_seeds).any(axis=0)
    medians = np.full(of_seeds.shape[1], np.nan)
    medians[known] = np.nanmedian(of_seeds[:, known], axis=0)
    return medians
