"""Central differences along a direction, with their own uncertainty, against autograd's gradient.

Along a direction v the residual r(t) = f(x + t v) - f(x) - <g, t v> is known at t = -3h ... 3h. If g is the
gradient, r has no linear part. Its odd part gives d = (r(h) - r(-h)) / 2h, how far autograd is off; how
uncertain d is comes from the same seven values:

- truncation: d at 2h differs from d at h by three times the error of d, for a smooth f;
- a kink that nobody counted: a smooth even part grows fourfold from h to 2h, that of a kink less;
- round-off in f: fourth differences annihilate whatever is smooth and leave the noise, sqrt(70) times
  (Hamming, "Introduction to Applied Numerical Analysis", 1971; More & Wild, "Estimating computational
  noise", SIAM J. Sci. Comput. 33, 2011); at least one rounding of the loss, and of what it is made of.

The step starts near the cube root of the unit round-off, the best one for central differences of a smooth
function, and shrinks while a pre-activation flips sign between the two ends, while the loss is not finite
there, or while truncation outweighs noise. Where autograd seems to be off, or the loss full of noise, much
smaller steps are tried: a fault and noise stay, the alias of an oscillation goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from driftlab.arithmetic.kinks import sign_flips
from driftlab.finite.point import Move, Point
from driftlab.rounding import UNIT_ROUND_OFF

FIRST_STEP = 2.0**-16
LEAST_STEP = 2.0**-42  # below, a difference of float64 numbers keeps fewer than 11 bits of the step
UNIT = UNIT_ROUND_OFF["float64"]
# A right gradient is off by about its own uncertainty: of 20,000 checks of right networks of 40 kinds 0.1 %
# were beyond 2.0 and one was at 2.9 (python -m tests.driftlab.finite.kinds 500). Odder ones went up to 12.
LIMIT = 32.0
# Noise of so many roundings of the loss is not the rounding of float64.
NOISY = 2.0**10 * UNIT
# What varies by such a share of the loss from value to value varies faster than the step can follow.
WILD = 2.0**-10
_OFFSETS = (-3, 3, -2, 2, -1, 1)  # the ends first: they tell whether the others are needed


@dataclass(frozen=True)
class Difference:
    """What one direction says.

    Attributes:
        step: h, in units of the direction.
        autograd: the directional derivative <g, v>.
        off: measured derivative less autograd's; NaN where there is none to be had.
        uncertain: of ``off``: one standard deviation of noise, plus truncation and kinks.
        noise: of the loss, one standard deviation of an evaluation (absolute).
        flips: pre-activations that lie on different sides at the two ends; None where they cannot be paired.
        size: the root of the sum of (g_i v_i)^2: what a typical direction of this kind gives.
        stairs: whether some of the losses are the same number, as on the stairs of a narrower dtype.
        wild: whether the loss varies from value to value as much as it is large: no slope to be seen.
    """

    step: float
    autograd: float
    off: float
    uncertain: float
    noise: float
    flips: int | None
    size: float
    stairs: bool = False
    wild: bool = False

    @property
    def measured(self) -> float:
        return self.autograd + self.off

    @property
    def usable(self) -> bool:
        """Whether there is a difference: finite at both ends, and no flip in between."""
        return math.isfinite(self.off) and math.isfinite(self.uncertain)

    def noisy(self, loss: float) -> bool:
        """Whether the noise is more than the rounding of float64, of the loss and what it is made of."""
        scale = max(abs(loss), self.size)
        return 0 < NOISY * scale < self.noise

    @property
    def ratio(self) -> float:
        """|off| in units of its uncertainty."""
        return abs(self.off) / self.uncertain if self.uncertain else math.inf if self.off else 0.0


class Slope:
    """The function along directions from the base of a point.

    Args:
        gradient: autograd's, at the base.
        noise: the least noise of the loss that any direction has to count with.
    """

    def __init__(self, point: Point, gradient: Mapping[str, Tensor], noise: float = 0.0):
        self.point, self.gradient, self.noise = point, gradient, noise
        self.start = point.start()

    def best(self, direction: Move, step: float = FIRST_STEP) -> Difference:
        """At the step, from ``step`` downwards, with the least uncertainty; confirmed where it is a fault."""
        kept = self._least_uncertain(direction, step)
        noisy = kept.noisy(self.start)
        while kept.usable and (noisy or kept.ratio > LIMIT) and (step := step / 64) > LEAST_STEP:
            tried = self._least_uncertain(direction, min(step, kept.step / 64))
            # what tells the two apart must be certain at both
            gone = abs(tried.off) < abs(kept.off) / 4 and tried.uncertain < abs(kept.off) / LIMIT
            quieter = noisy and tried.uncertain < kept.uncertain and not tried.stairs
            if tried.usable and (gone or quieter):
                kept = tried
        return kept

    def _least_uncertain(self, direction: Move, step: float) -> Difference:
        kept = self.measure(direction, step)
        while not kept.usable and step > LEAST_STEP:
            step /= 8
            kept = self.measure(direction, step)
        while kept.usable and kept.uncertain > 4 * _by_noise(kept.noise, kept.step) and step > LEAST_STEP:
            step /= 4
            tried = self.measure(direction, step)
            if not tried.uncertain < kept.uncertain:
                break
            kept = tried
        return kept

    def measure(self, direction: Move, step: float) -> Difference:
        """At one step."""
        residuals, sides, flips, losses = {0: 0.0}, {}, 0, {0: self.start}
        for offset in _OFFSETS:
            loss, moved, sides[offset] = self.point.at({n: offset * step * v for n, v in direction.items()})
            losses[offset] = loss
            residuals[offset] = (loss - self.start) - _inner(self.gradient, moved)
            if not math.isfinite(residuals[offset]):
                break
            if offset == 3:
                flips = _flips(sides[-3], sides[3])
                if flips:
                    break
        autograd, size = _inner(self.gradient, direction), _size(self.gradient, direction)
        if len(residuals) <= len(_OFFSETS) or flips or not math.isfinite(residuals[1]):
            return Difference(step, autograd, math.nan, math.inf, math.nan, flips, size)
        # numbers are rounded, the loss as well as those that it is made of
        floor = max(UNIT * abs(self.start), UNIT * size, self.noise)
        off, noise, uncertain = _judged(residuals, step, floor)
        stairs = len(set(losses.values())) < len(losses)
        wild = _noise(losses) > WILD * max(map(abs, losses.values()))
        return Difference(step, autograd, off, uncertain, noise, flips, size, stairs, wild)


def _flips(one, other) -> int | None:
    found = sign_flips(one, other)
    return None if found is None else int(found)


def _judged(r: Mapping[int, float], step: float, floor: float) -> tuple[float, float, float]:
    """``off``, noise (at least ``floor``) and uncertainty from the seven residuals."""
    off, wider = (r[1] - r[-1]) / (2 * step), (r[2] - r[-2]) / (4 * step)
    even, wider_even = r[1] + r[-1], r[2] + r[-2]
    noise = max(_noise(r), floor)
    kinked = abs(wider_even - 4 * even) / (4 * step)
    return off, noise, abs(wider - off) + kinked + _by_noise(noise, step)


def _noise(values: Mapping[int, float]) -> float:
    """One standard deviation of what is not smooth in seven values."""
    at = values
    fourth = [at[i - 2] - 4 * at[i - 1] + 6 * at[i] - 4 * at[i + 1] + at[i + 2] for i in (-1, 0, 1)]
    return math.hypot(*fourth) / math.sqrt(70 * len(fourth))


def _by_noise(noise: float, step: float) -> float:
    """The standard deviation of a central difference of two evaluations."""
    return noise / (math.sqrt(2) * step)


def _inner(gradient: Mapping[str, Tensor], move: Move) -> float:
    """<g, v>; of complex numbers the real and imaginary parts, as autograd means it."""
    return sum(float(product.sum()) for product in _products(gradient, move))


def _size(gradient: Mapping[str, Tensor], direction: Move) -> float:
    """The root of the sum of squares, however large or small they are."""
    products = [p for p in _products(gradient, direction) if p.numel()]
    most = max((float(p.abs().max()) for p in products), default=0.0)
    return most * math.sqrt(sum(float((p / most).square().sum()) for p in products)) if most else 0.0


def _products(gradient: Mapping[str, Tensor], move: Move) -> Iterator[Tensor]:
    for name, v in move.items():
        product = gradient[name].conj() * v
        yield product.real if product.is_complex() else product


def leaf_sizes(gradient: Mapping[str, Tensor], direction: Move) -> dict[str, float]:
    """Of each leaf, what ``Difference.size`` is of all."""
    return {name: _size(gradient, {name: v}) for name, v in direction.items()}
