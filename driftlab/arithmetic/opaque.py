"""Two modules that shadow execution cannot follow: what is beyond rounding in them, told by its grain."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import nn

from driftlab.arithmetic.difference import Difference, Nature, finite_norm
from driftlab.arithmetic.grain import LARGEST_GRAIN, TRIALS, Residual, inputs_near, nature_of, near
from driftlab.arithmetic.passes import CannotRunError, Recorded
from driftlab.arithmetic.quantities import by_reference_names, exact_passes, read_both
from driftlab.fold.layout import AnyFold, FoldError
from driftlab.fold.unfold import put_weights
from driftlab.network.calling import copied, tensors_in
from driftlab.rounding import HALFWAY_BITS

Key = tuple[str, str]  # pass, name


@dataclass(frozen=True)
class Opaque:
    """Two modules, what they are given, and the arithmetic in which they are looked at.

    Attributes:
        options: of ``run``.
    """

    reference: nn.Module
    candidate: nn.Module
    recorded: Recorded
    fold: AnyFold
    prefixes: tuple[str, str]
    arithmetic: str
    options: dict

    def with_natures(self, found: list[Difference]) -> list[Difference]:
        """Each difference, told what it is if it is beyond rounding."""
        asked = [(d.pass_, d.name) for d in found if self._beyond(d)]
        natures = self._natures(asked) if asked else {}
        return [replace(d, nature=natures.get((d.pass_, d.name))) for d in found]

    def _beyond(self, d: Difference) -> bool:
        if d.overflows or d.immeasurable:
            return False
        return d.narrow if self.arithmetic == "float32" else d.excess(self.arithmetic) > 1

    def _natures(self, asked: list[Key]) -> dict[Key, Nature]:
        """Empty where nothing can be moved, or where what is moved does not run."""
        try:
            here = self._residuals(self.reference, self.candidate, self.recorded)
            nearby = [self._near(trial) for trial in range(TRIALS)]
        except CannotRunError:
            return {}
        if None in nearby:
            return {}
        return {
            key: _nature(here[key], [n.get(key) for n in nearby])
            for key in asked
            if key in here and not here[key].missing
        }

    def _near(self, trial: int) -> dict[Key, Residual] | None:
        """At a point nearby; the inputs alone move where the fold has no way back, None if nothing does."""
        generator = torch.Generator().manual_seed(trial)
        mine, theirs = copied(self.reference), copied(self.candidate)
        try:
            put_weights(mine, theirs, self.fold, lambda _, t: near(t, generator), self.prefixes)
        except FoldError:
            inputs = tensors_in((self.recorded.args, self.recorded.kwargs))
            if not any(t.is_floating_point() for t in inputs):
                return None
        return self._residuals(mine, theirs, inputs_near(self.recorded, generator))

    def _residuals(self, mine: nn.Module, theirs: nn.Module, recorded: Recorded) -> dict[Key, Residual]:
        how = self.fold, self.prefixes
        exact, found = read_both((mine, theirs), recorded, self.arithmetic, *how, **self.options)
        known = {k: self.options[k] for k in ("seed", "evaluate")}
        if self.arithmetic == "float32" and (truth := exact_passes(mine, recorded, **known)):
            exact = by_reference_names(truth, *how, 0)
        return {
            (pass_, name): Residual(tensor, found[pass_][name] - tensor)
            for pass_, tensors in exact.items()
            for name, tensor in tensors.items()
            if name in found.get(pass_, {}) and found[pass_][name].shape == tensor.shape
        }


def _nature(here: Residual, nearby: list[Residual | None]) -> Nature:
    found = nature_of(here, [_if_large(here, there) for there in nearby])
    return Nature.UNTOLD if found is Nature.FEWER_BITS and here.size > LARGEST_GRAIN else found


def _if_large(here: Residual, there: Residual | None) -> Residual | None:
    """None where it is gone, as at a kink that these inputs alone come upon."""
    gone = there is None or finite_norm(there.residual) * HALFWAY_BITS < finite_norm(here.residual)
    return None if gone else there
