"""A network as compiled beside the same network as written, and what kind of error a difference is.

Compiled code cannot be followed by shadow execution. What it was compiled from can: the exact result of the
network as written is the truth for what runs in its place, in float32 and, where it compiles, in float64.

Where the two differ in both dtypes, or in float32 alone, size does not tell fewer bits from another function:
the tanh form of gelu is as far off as float16. But a rounding error has a grain. Once weights and inputs have
moved by a grain or more it is another one, as large and independent of the first: sqrt(2) of its size away
from it. The difference of two functions moves along with the functions, by their own share.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from statistics import median

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from driftlab.arithmetic.comparison import Comparison, differences, exact_passes, used_outputs
from driftlab.arithmetic.difference import Difference, distance, finite_norm
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.network.calling import copied
from driftlab.rounding import HALFWAY_BITS

# bfloat16 keeps 8 bits, the fewest in use: numbers of its grid are at most 2^-7 of themselves apart.
COARSEST_GRAIN = 2.0**-7
TRIALS = 3
# Two errors of one size that know nothing of each other.
INDEPENDENT = 2.0**0.5
# A function that moves by more of itself than this is too rough for its difference to be told from a grain.
TOO_ROUGH = 0.25


class Nature(Enum):
    """What a difference is that is too large for the rounding of its dtype."""

    ANOTHER_FUNCTION = "another function"
    FEWER_BITS = "fewer bits"
    PASSING = "rounding that these inputs alone make large"  # a kink, a cancellation
    UNTOLD = "too rough a function to tell"


@dataclass
class Compiled:
    """A network, what it is given, and what its optimizer is; ``comparison`` holds it beside itself."""

    network: nn.Module
    whole: Recorded
    seed: int
    optimizer: Callable[[nn.Module], Optimizer] | None

    @cached_property
    def comparison(self) -> Comparison:
        """As written in the reference's place. Raises CannotRunError where it does not run in float32."""
        both: dict[str, tuple[Passes, Passes]] = {}
        failed: dict[str, str] = {}
        for arithmetic in ("float32", "float64"):
            try:
                both[arithmetic] = self._as_written(arithmetic), self._as_compiled(arithmetic)
            except CannotRunError as error:
                failed[arithmetic] = str(error)
        if "float32" not in both:
            raise CannotRunError(failed["float32"])
        found = differences(both, lambda t: t, ("", ""), used_outputs(self.whole), self._exact())
        return Comparison(found, failed, tuple(both))

    @property
    def known(self) -> bool:
        """Whether there is an exact result."""
        return any(d.errors for d in self.comparison.differences)

    def narrow(self) -> list[Difference]:
        """What float32 is further from the exact result in than the network as written."""
        return [d for d in self.comparison.differences if d.lost > HALFWAY_BITS]

    def nature(self, difference: Difference, arithmetic: str) -> Nature:
        """Of a difference that it has in this arithmetic, by ``TRIALS`` points nearby."""
        here, rough, moved = self._residual(difference, arithmetic), [], []
        for trial in range(TRIALS):
            near = self._near(trial)
            there = near._residual(difference, arithmetic)
            if not near._beyond(difference, arithmetic):
                return Nature.PASSING
            rough.append(_moved(here.residual, there.residual))
            moved.append(_moved(here.exact, there.exact))
        own = max(median(moved), COARSEST_GRAIN)
        if own > TOO_ROUGH:
            return Nature.UNTOLD
        # halfway, in powers of two, between a difference that moves as its function does and a new one
        grainy = median(rough) > (own * INDEPENDENT) ** 0.5
        return Nature.FEWER_BITS if grainy else Nature.ANOTHER_FUNCTION

    def _as_written(self, arithmetic: str) -> Passes:
        return run(self.network, self.whole, arithmetic, self.seed, optimizer=self.optimizer)

    def _as_compiled(self, arithmetic: str) -> Passes:
        return run(self.network, self.whole, arithmetic, self.seed, compiled=True, optimizer=self.optimizer)

    def _exact(self) -> Passes | None:
        return exact_passes(self.network, self.whole, seed=self.seed, optimizer=self.optimizer)

    def _beyond(self, d: Difference, arithmetic: str) -> bool:
        here = next((o for o in self.comparison.differences if (o.pass_, o.name) == (d.pass_, d.name)), None)
        if here is None:
            return False
        return here.excess("float64") > 1 if arithmetic == "float64" else here.lost > HALFWAY_BITS

    def _near(self, trial: int) -> Compiled:
        """The same network with its weights and inputs moved by up to ``COARSEST_GRAIN`` of themselves."""
        generator = torch.Generator().manual_seed(trial)

        def near(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            noise = 2 * torch.rand(tensor.shape, generator=generator).to(tensor) - 1
            return (tensor.detach() * (1 + COARSEST_GRAIN * noise)).requires_grad_(tensor.requires_grad)

        twin = copied(self.network)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(near(parameter))
        args, kwargs = pytree.tree_map_only(Tensor, near, (self.whole.args, self.whole.kwargs))
        return replace(self, network=twin, whole=replace(self.whole, args=args, kwargs=kwargs))

    def _residual(self, d: Difference, arithmetic: str) -> _Residual:
        compiled = self._as_compiled(arithmetic).tensors[d.pass_][d.name]
        exact = self._exact() if arithmetic == "float32" else None
        written = (exact or self._as_written("float64")).tensors[d.pass_][d.name]
        return _Residual(written, compiled - written)


@dataclass(frozen=True)
class _Residual:
    exact: Tensor
    residual: Tensor


def _moved(a: Tensor, b: Tensor) -> float:
    """How far the two are apart, in units of the larger."""
    size = max(finite_norm(a), finite_norm(b))
    return distance(b, a) / size if size else 0.0
