"""Distances between two arms, after folding, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from driftlab.fold.layout import flat, gradient_of, joined, moves_only, numbered, relative_distance
from driftlab.lockstep.arm import Arm


def _gradients(arm: Arm) -> dict[str, Tensor]:
    """The gradients, zero where there is none, of the parameters that are trained."""
    return {n: gradient_of(p) for n, p in arm.trained.items()}


KINDS: Mapping[str, Callable[[Arm], dict[str, Tensor]]] = {
    "weight": lambda arm: arm.parameters,
    "gradient": _gradients,
    "buffer": lambda arm: {n: b for n, b in arm.module.named_buffers() if b.is_floating_point()},
}


class Layout:
    """How an arm's tensors of one kind become one vector in the reference's order.

    A fold moves entries and computes nothing, so it is read off once, by folding serial numbers, and is
    then one gather. A fold that does compute (somebody's own) is called each time instead.

    Attributes:
        names: the reference's tensors that the vector holds, in its order.
    """

    def __init__(self, arm: Arm, kind: str):
        self.arm, self.kind = arm, kind
        tensors = KINDS[kind](arm)
        serials = numbered(tensors)
        folded = arm.fold(serials)
        self.names = list(folded)
        numbers = flat(folded.values())
        # what is left of a candidate's own buffers is nothing, which lies on no device
        self.moves = bool(folded) and moves_only(arm.fold, serials, numbers)
        self.order = numbers.long() - 1
        # weights are updated in place, so views of them stay valid; gradients, and some buffers, come anew
        still = kind == "weight" and all(t.is_contiguous() for t in tensors.values())
        self._views = [t.detach().view(-1) for t in tensors.values()] if still else []
        self.in_order = self.moves and torch.equal(numbers, flat(serials.values()))

    def vector(self) -> Tensor:
        """The arm's tensors as they are now, folded, in one float64 vector."""
        tensors = KINDS[self.kind](self.arm)
        if not self.moves:
            return flat(self.arm.fold(tensors).values())
        vector = joined(self._views) if self._views else flat(tensors.values())
        return vector if self.in_order else vector.index_select(0, self.order)


class Folded:
    """The arms' vectors at one step, each made once, since several arms are compared with the same one.

    By the arm itself, not its name: two candidates beside one reference have the same.
    """

    def __init__(self, layouts: dict[tuple[int, str], Layout]):
        self._layouts, self._vectors = layouts, {}

    def distance(self, arm: Arm, kind: str) -> Tensor | None:
        """The relative distance of ``arm`` from its against over the tensors that both have.

        ``kind`` is a key of ``KINDS``. A float64 scalar on the device; None where the two share no tensor.
        """
        mine, theirs = self._layout(arm, kind), self._layout(arm.against, kind)
        if mine.names and mine.names == theirs.names:
            return relative_distance(self.vector(arm, kind), self.vector(arm.against, kind))
        own, other = arm.fold(KINDS[kind](arm)), arm.against.fold(KINDS[kind](arm.against))
        names = [name for name in theirs.names if name in own]
        if not names:
            return None
        return relative_distance(flat(own[n] for n in names), flat(other[n] for n in names))

    def _layout(self, arm: Arm, kind: str) -> Layout:
        if (id(arm), kind) not in self._layouts:
            self._layouts[id(arm), kind] = Layout(arm, kind)
        return self._layouts[id(arm), kind]

    def vector(self, arm: Arm, kind: str) -> Tensor:
        """Its tensors of that kind, in the reference's order, in one float64 vector on the device."""
        if (id(arm), kind) not in self._vectors:
            self._vectors[id(arm), kind] = self._layout(arm, kind).vector()
        return self._vectors[id(arm), kind]
