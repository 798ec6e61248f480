"""A network as compiled beside the same network as written, and what kind of error a difference is.

Compiled code cannot be followed by shadow execution. What it was compiled from can: the exact result of the
network as written is the truth for what runs in its place, in float32 and, where it compiles, in float64.

What is too far off for its dtype is told by its grain (``driftlab.arithmetic.grain``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn
from torch.optim import Optimizer

from driftlab.arithmetic.comparison import Comparison
from driftlab.arithmetic.difference import Difference, Nature
from driftlab.arithmetic.grain import TRIALS, Residual, inputs_near, nature_of, near
from driftlab.arithmetic.passes import CannotRunError, Passes, Recorded, run
from driftlab.arithmetic.quantities import differences, exact_passes, used_outputs
from driftlab.network.calling import copied


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
                both[arithmetic] = self._run(arithmetic), self._run(arithmetic, compiled=True)
            except CannotRunError as error:
                failed[arithmetic] = str(error)
        if "float32" not in both:
            raise CannotRunError(failed["float32"])
        found = differences(
            both, lambda t: t, ("", ""), used_outputs(self.whole), self._exact(), self.whole.precision
        )
        return Comparison(found, failed, tuple(both))

    @property
    def own(self) -> str:
        """The precision in which it runs as it is."""
        return self.whole.precision.name

    @property
    def known(self) -> bool:
        """Whether there is an exact result."""
        return any(d.errors for d in self.comparison.differences)

    def narrow(self) -> list[Difference]:
        """What float32 is further from the exact result in than the network as written."""
        return [d for d in self.comparison.differences if d.narrow]

    def nature(self, difference: Difference, arithmetic: str) -> Nature:
        """Of a difference that it has in this arithmetic, by ``TRIALS`` points nearby."""
        twins = map(self._near, range(TRIALS))
        there = (
            t._residual(difference, arithmetic) if t._beyond(difference, arithmetic) else None for t in twins
        )
        return nature_of(self._residual(difference, arithmetic), there)

    def _run(self, arithmetic: str, compiled: bool = False) -> Passes:
        how = {"compiled": compiled, "optimizer": self.optimizer}
        return run(self.network, self.whole, arithmetic, self.seed, **how)

    def _exact(self) -> Passes | None:
        return exact_passes(self.network, self.whole, seed=self.seed, optimizer=self.optimizer)

    def _beyond(self, d: Difference, arithmetic: str) -> bool:
        here = next((o for o in self.comparison.differences if (o.pass_, o.name) == (d.pass_, d.name)), None)
        if here is None:
            return False
        return here.excess("float64") > 1 if arithmetic == "float64" else here.narrow

    def _near(self, trial: int) -> Compiled:
        """The same network with its weights and inputs moved by up to ``COARSEST_GRAIN`` of themselves."""
        generator, twin = torch.Generator().manual_seed(trial), copied(self.network)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(near(parameter, generator))
        return replace(self, network=twin, whole=inputs_near(self.whole, generator))

    def _residual(self, d: Difference, arithmetic: str) -> Residual:
        compiled = self._run(arithmetic, compiled=True).tensors[d.pass_][d.name]
        exact = self._exact() if arithmetic == "float32" else None
        written = (exact or self._run("float64")).tensors[d.pass_][d.name]
        return Residual(written, compiled - written)
