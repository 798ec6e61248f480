"""Distances between two arms, after folding, in float64."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from driftlab.arm import Arm


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """‖a - b‖₂ / ‖b‖₂ as a float64 scalar on the device; 0 where a equals b, also where both are 0."""
    difference = torch.linalg.vector_norm(a - b)
    return torch.where(difference == 0, difference, difference / torch.linalg.vector_norm(b))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in one float64 vector: one copy, whatever the dtypes."""
    vectors = [t.detach().reshape(-1) for t in tensors]
    if not vectors:
        return torch.zeros(0, dtype=torch.float64)
    out = torch.empty(sum(v.numel() for v in vectors), dtype=torch.float64, device=vectors[0].device)
    return torch.cat(vectors, out=out)


def outputs_as_vector(outputs: object) -> Tensor:
    """The floating tensors in whatever a network returns (tensor, tuple, dict), in one float64 vector."""
    return flat(t for t in pytree.tree_leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point())


def _zero_where_missing(parameters: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {
        n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in parameters if p.requires_grad
    }


KINDS: Mapping[str, Callable[[Arm], dict[str, Tensor]]] = {
    "weight": lambda arm: dict(arm.module.named_parameters()),
    "gradient": lambda arm: _zero_where_missing(arm.module.named_parameters()),
    "buffer": lambda arm: {n: b for n, b in arm.module.named_buffers() if b.is_floating_point()},
}


class Folded:
    """What the arms hold at one step, each folded once, since several are compared with the same one."""

    def __init__(self) -> None:
        self._tensors: dict[tuple[str, str], Mapping[str, Tensor]] = {}
        self._vectors: dict[tuple[str, str], Tensor] = {}

    def distance(self, arm: Arm, kind: str) -> Tensor | None:
        """The relative distance of ``arm`` from its against over the tensors that both have.

        ``kind`` is a key of ``KINDS``. A float64 scalar on the device; None where the two share no tensor.
        """
        mine, theirs = self.tensors(arm, kind), self.tensors(arm.against, kind)
        if mine.keys() == theirs.keys() and list(mine) == list(theirs):
            return (
                relative_distance(self._vector(arm, kind), self._vector(arm.against, kind)) if mine else None
            )
        names = [n for n in theirs if n in mine]
        if not names:
            return None
        return relative_distance(flat(mine[n] for n in names), flat(theirs[n] for n in names))

    def tensors(self, arm: Arm, kind: str) -> Mapping[str, Tensor]:
        """The arm's weights, gradients or buffers under the reference's names and shapes."""
        if (arm.name, kind) not in self._tensors:
            self._tensors[arm.name, kind] = arm.fold(KINDS[kind](arm))
        return self._tensors[arm.name, kind]

    def _vector(self, arm: Arm, kind: str) -> Tensor:
        if (arm.name, kind) not in self._vectors:
            self._vectors[arm.name, kind] = flat(self.tensors(arm, kind).values())
        return self._vectors[arm.name, kind]
