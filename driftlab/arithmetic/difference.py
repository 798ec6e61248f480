"""Is a difference rounding, fewer bits, or another function? One module on one set of inputs decides it.

Reference and candidate get bit for bit the same inputs, in several arithmetics. Rounding shrinks by 2^-29
from float32 to float64, and vanishes where the float32 path is computed in float64; a difference in the
function does not. So a difference d in float64 arithmetic is no rounding where

    d > HALFWAY * max(u64 * |y|, 2^-29 * e32, c)

with e32 the error that float32 is seen to make in the same quantity (the larger of the two networks'), |y|
the quantity itself, u64 = 2^-53 and HALFWAY = 2^14.5, the middle between the two hypotheses in powers of two.
e32 scales with cancellation and conditioning as d does, so an ill-conditioned layer is not accused. c is the
control: what one unit in the last place makes of the reference in the same arithmetic, which is measured
where the first two would accuse (``driftlab.arithmetic.control``).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from driftlab.precision import FLOAT32, Precision
from driftlab.rounding import HALFWAY, HALFWAY_BITS, UNIT_ROUND_OFF

# ``side effect``: what a whole network has made of the inputs that it was handed.
PASSES = ("forward", "input gradient", "weight gradient", "buffer", "eval", "update", "side effect")


# The threshold of few bits stands near to 1, so there the mean counts and not the largest: numbers spread
# evenly over a binade, each rounded to nearest, are off by this share of a unit round-off, as 2-norms.
ROUNDED_ONCE = (1 / 3) ** 0.5 / (7 / 3) ** 0.5
# Of fewer numbers two errors of one size may stand 4 apart by chance; of 32, two of which one is twice the
# other do in 1 of 10^4 cases (F distribution of 32 and 32 degrees).
FEWEST = 32


class Nature(Enum):
    """What a difference is that is too large for the rounding of its dtype."""

    ANOTHER_FUNCTION = "another function"
    FEWER_BITS = "fewer bits"
    PASSING = "rounding that these inputs alone make large"  # a kink, a cancellation
    UNTOLD = "too rough a function to tell"


@dataclass(frozen=True)
class Difference:
    """One quantity of one module: how far the candidate's is from the reference's, as 2-norms.

    Attributes:
        pass_, name: which quantity (``weight gradient`` of ``conv1.weight``).
        size: of the reference's own.
        apart: arithmetic -> ‖candidate - reference‖ in it.
        errors: "candidate" and "reference" -> the error of its float32 against the truth; "control" -> that
            of the reference moved by one unit in float32's last place, where that was measured.
        same: whether no bit differs, in any arithmetic that is torch's own.
        scale: of the largest quantity of its kind beside it. A gradient that is nothing but rounding (of a
        bias before a norm) is small beside it, and its own size is no yardstick.
        finite: whether the reference's own has a finite number.
        own_change: how far the reference's float64 code is from its float32 code, rounding taken away from
            both; None where that was not asked.
        numbers: how many it holds.
        control: ‖reference moved by one unit in the last place - reference‖ in float64; 0 where not measured.
        reshaped: whether the candidate's has another shape.
        less_finite: whether the candidate's has NaN or inf where the reference's has a number.
        nature: what it is if it is beyond rounding, where shadow execution could not say that.
        precision: in which the two networks ran as they are, which "float32" stands for here.
        unit: round-off of the dtype that the reference stores it in.
    """

    pass_: str
    name: str
    size: float
    apart: dict[str, float]
    errors: dict[str, float]
    same: bool
    scale: float = 0.0
    finite: bool = True
    own_change: float | None = None
    numbers: int = 0
    control: float = 0.0
    reshaped: bool = False
    less_finite: bool = False
    nature: Nature | None = None
    precision: Precision = FLOAT32
    unit: float = UNIT_ROUND_OFF["float32"]

    def excess(self, arithmetic: str) -> float:
        """The difference as a multiple of what rounding may make of it; above 1 it is no rounding.

        Of float64 and of shadow execution; ``lost`` is what there is of float32.
        """
        if self.immeasurable:
            return math.inf
        if math.isinf(max(self.errors.values(), default=0.0)) and not self.overflows:
            return 0.0  # beyond what float32 can hold in both: nothing to hold it against
        apart, allowed = self.apart.get(arithmetic, 0.0), self.allowed
        return 0.0 if apart == 0 else apart / allowed if allowed else math.inf

    @property
    def allowed(self) -> float:
        """What rounding may make of it, as a 2-norm."""
        rounding = max(self.errors.values(), default=0.0) * 2.0**-29
        rounding = 0.0 if math.isinf(rounding) else rounding
        unit = UNIT_ROUND_OFF["float64"] * max(self.size, self.scale)
        return HALFWAY * max(unit, rounding, self.control)

    @property
    def saturated(self) -> bool:
        """Whether rounding alone may make of it as much as there is, so that no difference tells anything."""
        return HALFWAY * self.control >= max(self.size, self.scale) > 0

    def shown_otherwise(self, arithmetic: str) -> bool:
        """Whether float32 would have to show the difference in ``arithmetic``, and does not.

        So it is where one stores what the other rounds alike. Only of differences of more than four units in
        the last place of float32; smaller ones it may swallow.
        """
        shown, exact = self.apart.get("float32", math.inf), self.apart.get(arithmetic, 0.0)
        return self.relative > 4 * self.precision.unit_round_off and shown < exact / 8

    @property
    def by_dtype(self) -> bool:
        """A difference in float64 alone that is none in float32: it lies in what the code makes of its dtype.

        So it is where the reference itself is another function in float64 (it reads ``finfo(x.dtype).eps``),
        or where it is so little that float32, which rounds by nearly as much, could not show it; not where
        the candidate alone goes another way by more.
        """
        if self.own_change is None:
            return False
        apart = self.apart["shadow64"]
        return self.own_change > apart / 2 or apart < HALFWAY_BITS * self._own_error

    @property
    def relative(self) -> float:
        """The difference in the function, relative to the reference's quantity."""
        return self.relative_in(next(a for a in ("shadow", "float64", "float32") if a in self.apart))

    def relative_in(self, arithmetic: str) -> float:
        """As it is in one arithmetic."""
        apart = self.apart.get(arithmetic, 0.0)
        return apart / self.size if self.size else (math.inf if apart else 0.0)

    @property
    def overflows(self) -> bool:
        """NaN or inf in the candidate's float32 alone."""
        return not self.immeasurable and self.errors.get("candidate") == math.inf > self.errors["reference"]

    @property
    def immeasurable(self) -> bool:
        """No arithmetic says how far the two are apart: other shapes, or NaN and inf in one alone."""
        return all(math.isinf(a) for a in self.apart.values())

    @property
    def float32_units(self) -> float:
        """How far the two are apart in float32, in units of its round-off."""
        apart, size = self.apart.get("float32", 0.0), max(self.size, self.scale)
        return apart / size / self.unit if size else (math.inf if apart else 0.0)

    @property
    def lost(self) -> float:
        """How much worse the candidate's float32 is than the reference's, at least one unit round-off."""
        worse, own = self.errors.get("candidate", 0.0), self.expected_error
        return worse / own if worse and own else 0.0

    @property
    def narrow(self) -> bool:
        """Whether the candidate's float32 loses so much that it is an error of fewer bits."""
        return self.counts and self.lost > self.precision.narrower

    @property
    def counts(self) -> bool:
        """Whether it holds numbers enough for ``lost`` to be held against the threshold of its precision."""
        return self.precision is FLOAT32 or self.numbers >= FEWEST

    @property
    def expected_error(self) -> float:
        """Of a float32 that loses nothing: the reference's, or what one unit makes of the reference."""
        return max(self._own_error, self.errors.get("control", 0.0))

    @property
    def _own_error(self) -> float:
        """Of the reference's float32, at least that of one rounding."""
        one = self.unit if self.precision is FLOAT32 else ROUNDED_ONCE * self.unit
        floor = one * max(self.size, self.scale)
        return max(self.errors.get("reference", 0.0), floor)


def same_values(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all())


def finite_norm(a: Tensor) -> float:
    """‖a‖₂ over the finite entries."""
    return float(torch.linalg.vector_norm(torch.where(a.isfinite(), a, torch.zeros_like(a))))


def distance(a: Tensor, b: Tensor) -> float:
    """‖a - b‖₂; NaN in both, or the same infinity, counts as equal, another shape as infinitely far."""
    if a.shape != b.shape:
        return math.inf
    apart = torch.where((a == b) | (a.isnan() & b.isnan()), torch.zeros_like(a), a - b)
    size = float(torch.linalg.vector_norm(apart))
    return math.inf if math.isnan(size) else size
