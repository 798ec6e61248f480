"""Fewer bits, or another function? What the size of a difference does not tell, its grain does.

The tanh form of gelu is as far off as float16. But a rounding error has a grain: once weights and inputs have
moved by a grain or more it is another one, as large and independent of the first, sqrt(2) of its size away
from it. The difference of two functions moves along with the functions, by their own share.

So where shadow execution does not serve (compiled code, foreign kernels), what is too far off for its dtype
is looked at again at points nearby.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.arithmetic.difference import Difference, Nature, distance, finite_norm
from driftlab.arithmetic.passes import CannotRunError, Recorded
from driftlab.fold.layout import AnyFold, FoldError
from driftlab.fold.unfold import put_weights
from driftlab.network.calling import copied, each_tensor
from driftlab.rounding import HALFWAY_BITS

# bfloat16 keeps 8 bits, the fewest in use: numbers of its grid are at most 2^-7 of themselves apart.
COARSEST_GRAIN = 2.0**-7
TRIALS = 3
# Two errors of one size that know nothing of each other.
INDEPENDENT = 2.0**0.5
# A function that moves by more of itself than this is too rough for its difference to be told from a grain.
TOO_ROUGH = 0.25

Key = tuple[str, str]


@dataclass(frozen=True)
class Residual:
    """A quantity of the reference, as exact as it is known, and what the other's is beside it."""

    exact: Tensor
    residual: Tensor


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


@dataclass(frozen=True)
class Opaque:
    """Two modules that shadow execution cannot follow.

    Attributes:
        residuals: (reference, candidate, what they are given) -> (pass, name) -> what the two are apart.
    """

    reference: nn.Module
    candidate: nn.Module
    recorded: Recorded
    fold: AnyFold
    prefixes: tuple[str, str]
    residuals: Callable[[nn.Module, nn.Module, Recorded], dict[Key, Residual]]

    def natures(self, asked: Iterable[Difference]) -> dict[Key, Nature]:
        """Of each difference; empty where nothing can be moved, or what is moved does not run."""
        try:
            here = self.residuals(self.reference, self.candidate, self.recorded)
            nearby = [self._near(trial) for trial in range(TRIALS)]
        except CannotRunError:
            return {}
        keys = [(d.pass_, d.name) for d in asked]
        if None in nearby:
            return {}
        return {key: nature_of(here[key], [_if_large(here[key], n.get(key)) for n in nearby]) for key in keys}

    def _near(self, trial: int) -> dict[Key, Residual] | None:
        generator = torch.Generator().manual_seed(trial)
        mine, theirs = copied(self.reference), copied(self.candidate)
        moving = any(isinstance(t, Tensor) and t.is_floating_point() for t in _leaves(self.recorded))
        try:
            put_weights(mine, theirs, self.fold, lambda _, t: near(t, generator), self.prefixes)
        except FoldError:
            if not moving:
                return None
        return self.residuals(mine, theirs, inputs_near(self.recorded, generator))


def _leaves(recorded: Recorded) -> list:
    return pytree.tree_leaves((recorded.args, recorded.kwargs))


def _if_large(here: Residual, there: Residual | None) -> Residual | None:
    """None where it is gone, as at a kink that these inputs alone come upon."""
    gone = there is None or finite_norm(there.residual) * HALFWAY_BITS < finite_norm(here.residual)
    return None if gone else there


def _moved(a: Tensor, b: Tensor) -> float:
    """How far the two are apart, in units of the larger."""
    size = max(finite_norm(a), finite_norm(b))
    return distance(b, a) / size if size else 0.0
