"""What a finite difference must be off by: truncation on one side, round-off on the other, and the best step.

For a loss L that is moved along one number by eps (Press et al., "Numerical Recipes", 3rd ed., section 5.7;
Higham, "Accuracy and Stability of Numerical Algorithms", 2nd ed., section 1.14):

    one-sided  (L(x + eps) - L(x)) / eps              off by  eps |L''| / 2     + u |L| / eps
    central    (L(x + eps) - L(x - eps)) / (2 eps)    off by  eps^2 |L'''| / 6  + u |L| / eps

The second term is the size of one rounding of L; a sum of many terms that rounds on the way may carry more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from driftlab.rounding import UNIT_ROUND_OFF

UNITS = UNIT_ROUND_OFF | {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True)
class Law:
    """The error of a finite difference as a function of its step.

    Attributes:
        loss: L at the point.
        curvature: |L''| of a one-sided difference, |L'''| of a central one, along the number that is moved.
        dtype: that L is computed in, a key of ``UNITS``.
        sides: 1 or 2.
    """

    loss: float
    curvature: float
    dtype: str
    sides: int = 1

    def truncation(self, step: float) -> float:
        return self.curvature * step / 2 if self.sides == 1 else self.curvature * step**2 / 6

    def round_off(self, step: float) -> float:
        return UNITS[self.dtype] * abs(self.loss) / step if self.loss else 0.0

    @property
    def best_step(self) -> float:
        """Where the sum of the two is least: inf where there is no truncation, else 0 where no round-off."""
        if not self.curvature:
            return math.inf
        unit = UNITS[self.dtype] * abs(self.loss)
        if self.sides == 1:
            return math.sqrt(2 * unit / self.curvature)
        return (3 * unit / self.curvature) ** (1 / 3)

    def error(self, step: float) -> float:
        """Absolute, in units of the derivative; at a step of inf, where there is no truncation, 0."""
        if math.isinf(step):
            return 0.0
        return self.truncation(step) + self.round_off(step)


def spacing(value: float, dtype: str) -> float:
    """The distance from ``|value|`` to the next larger number of its dtype (normal range); of 0 it is 0."""
    return math.ldexp(UNITS[dtype], math.frexp(value)[1]) if value else 0.0


def advice(loss: float, derivative: float, curvature: float, step: float) -> str:
    """What to do about a one-sided difference in float32, in sentences with the numbers of the loss at hand.

    Args:
        loss: its value.
        derivative: by the number that is moved.
        curvature: |L''| by that number.
        step: that was meant.
    """
    move = abs(derivative) * step
    if not move:
        return f"The loss is {loss:.2g} and does not move with this number: its derivative is 0."
    gap = spacing(max(abs(loss), move), "float32")
    narrow, wide = Law(loss, curvature, "float32"), Law(loss, curvature, "float64")
    rounded = narrow.error(step) > 2 * wide.error(step)
    off = f"{_share(wide.error(step), derivative)} (predicted)"
    best = narrow.best_step
    words = [
        f"The loss is {loss:.2g} and moves by {move:.1g}; float32 numbers of that size lie {gap:.1g} apart, "
        f"so float32 leaves {_digits(move / gap)}.",
        f"Use float64: off by {off} at the same eps."
        if rounded
        else f"Float64 would be as far off, by {off}: at this eps truncation outweighs rounding.",
    ]
    if math.isinf(best):
        words.append("Or a larger eps: the loss is linear in this number.")
    elif best and narrow.error(best) < min(narrow.error(step), abs(derivative)) / 2:
        words.append(f"Or eps = {best:.1g} in float32: off by {_share(narrow.error(best), derivative)}.")
    if rounded:
        words.append(
            "Or subtract before you sum: the terms of the loss that the step does not reach then cancel "
            "exactly. Averaging the loss instead of summing it changes nothing: loss and move shrink alike."
        )
    return " ".join(words)


def _digits(spacings: float) -> str:
    """How many decimal digits are left of a move of so many spacings."""
    digits = math.log10(spacings)
    return f"about {digits:.1f} digits" if digits >= 0.5 else "no digit" if digits < 0 else "hardly a digit"


def _share(error: float, derivative: float) -> str:
    return f"{100 * error / abs(derivative):.2g} %"
