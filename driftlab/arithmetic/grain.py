"""Fewer bits, or another function? What the size of a difference does not tell, its grain does.

The tanh form of gelu is as far off as float16. But a rounding error has a grain: once weights and inputs have
moved by a grain or more it is another one, as large and independent of the first, sqrt(2) of its size away
from it. The difference of two functions moves along with the functions, by their own share.

So where shadow execution does not serve (compiled code, foreign kernels), what is too far off for its dtype
is looked at again at points nearby.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from driftlab.arithmetic.difference import Nature, distance, finite_norm
from driftlab.arithmetic.passes import Recorded
from driftlab.network.calling import each_tensor

# bfloat16 keeps 8 bits, the fewest in use: numbers of its grid are at most 2^-7 of themselves apart.
COARSEST_GRAIN = 2.0**-7
TRIALS = 3
# Two errors of one size that know nothing of each other.
INDEPENDENT = 2.0**0.5
# A function that moves by more of itself than this is too rough for its difference to be told from a grain.
TOO_ROUGH = 0.25
# bfloat16 errs by 2^-9 of what it rounds; what is off by more than 32 times that leaps by itself (another
# expert chosen, another maximum), and would look like a grain.
LARGEST_GRAIN = 2.0**-4


@dataclass(frozen=True)
class Residual:
    """A quantity of the reference, as exact as it is known, and what the other's is beside it."""

    exact: Tensor
    residual: Tensor

    @property
    def size(self) -> float:
        """Relative."""
        return finite_norm(self.residual) / max(finite_norm(self.exact), 1e-300)

    @property
    def missing(self) -> bool:
        """Whether the other has nothing there, as a quantised kernel has no gradient."""
        return torch.equal(self.residual, -self.exact)


def nature_of(here: Residual, nearby: Iterable[Residual | None]) -> Nature:
    """Of a difference, by points nearby; None stands for one where there is none beyond rounding."""
    rough, moved = [], []
    for there in nearby:
        if there is None:
            return Nature.PASSING
        rough.append(_moved(here.residual, there.residual))
        moved.append(_moved(here.exact, there.exact))
    own = max(median(moved), COARSEST_GRAIN)
    if own > TOO_ROUGH:
        return Nature.UNTOLD
    # halfway, in powers of two, between a difference that moves as its function does and a new one
    grainy = median(rough) > (own * INDEPENDENT) ** 0.5
    return Nature.FEWER_BITS if grainy else Nature.ANOTHER_FUNCTION


def near(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Moved by up to ``COARSEST_GRAIN`` of itself."""
    if not tensor.is_floating_point():
        return tensor
    noise = 2 * torch.rand(tensor.shape, generator=generator).to(tensor) - 1
    return (tensor.detach() * (1 + COARSEST_GRAIN * noise)).requires_grad_(tensor.requires_grad)


def inputs_near(recorded: Recorded, generator: torch.Generator) -> Recorded:
    args, kwargs = each_tensor(lambda t: near(t, generator), (recorded.args, recorded.kwargs))
    return replace(recorded, args=args, kwargs=kwargs)


def _moved(a: Tensor, b: Tensor) -> float:
    """How far the two are apart, in units of the larger."""
    size = max(finite_norm(a), finite_norm(b))
    return distance(b, a) / size if size else 0.0
