"""Distances between two arms, after folding, in float64."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass

import torch
from torch import Tensor

from driftlab.arm import Arm


def relative_distance(a: Tensor, b: Tensor) -> Tensor:
    """‖a - b‖₂ / ‖b‖₂ as a float64 scalar on the device; 0 where a equals b, also where both are 0."""
    difference = torch.linalg.vector_norm(a - b)
    return torch.where(difference == 0, difference, difference / torch.linalg.vector_norm(b))


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """All entries in one float64 vector: one copy, whatever the dtypes."""
    return joined([t.detach().reshape(-1) for t in tensors])


def joined(vectors: list[Tensor]) -> Tensor:
    """One-dimensional tensors, end to end, in one float64 vector."""
    if not vectors:
        return torch.zeros(0, dtype=torch.float64)
    out = torch.empty(sum(v.numel() for v in vectors), dtype=torch.float64, device=vectors[0].device)
    return torch.cat(vectors, out=out)


def named_leaves(outputs: object) -> dict[str, Tensor]:
    """The floating tensors in whatever a network returns, by their place in it: "", "0", "0.hidden".

    Entries of mappings come in the order of their keys, whatever order the network makes them in; fields of
    named tuples and data classes by number, so that a tuple with and one without names are the same.
    """
    found: dict[str, Tensor] = {}
    _collect(outputs, "", found)
    return found


def _collect(value: object, name: str, found: dict[str, Tensor]) -> None:
    below = f"{name}." if name else ""
    if isinstance(value, Tensor):
        if value.is_floating_point():
            found[name] = value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=str):
            _collect(value[key], f"{below}{key}", found)
    elif isinstance(value, tuple | list):
        for number, part in enumerate(value):
            _collect(part, f"{below}{number}", found)
    elif is_dataclass(value) and not isinstance(value, type):
        for number, part in enumerate(vars(value).values()):
            _collect(part, f"{below}{number}", found)


def outputs_as_vector(outputs: object) -> Tensor:
    """The floating tensors in whatever a network returns (tensor, tuple, dict), in one float64 vector."""
    return flat(named_leaves(outputs).values())


def _gradients(arm: Arm) -> dict[str, Tensor]:
    """The gradients, zero where there is none, of the parameters that are trained."""
    return {n: torch.zeros_like(p) if p.grad is None else p.grad for n, p in arm.trained.items()}


KINDS: Mapping[str, Callable[[Arm], dict[str, Tensor]]] = {
    "weight": lambda arm: arm.parameters,
    "gradient": _gradients,
    "buffer": lambda arm: {n: b for n, b in arm.module.named_buffers() if b.is_floating_point()},
}


def moves_only(fold: Callable, numbered: Mapping[str, Tensor], numbers: Tensor) -> bool:
    """Whether a fold puts entries in other places and computes nothing, seen by serial numbers from 1.

    What adds or scales does not give the squares of its own results, what multiplies or drops signs does not
    give them less a constant; a zero that is filled in is no serial.
    """
    squares = flat(fold({name: t * t for name, t in numbered.items()}).values())
    below = flat(fold({name: 0.5 - t for name, t in numbered.items()}).values())
    same = torch.equal(squares, numbers * numbers) and torch.equal(below, 0.5 - numbers)
    return same and bool((numbers > 0).all())


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
        starts = itertools.accumulate((t.numel() for t in tensors.values()), initial=1)
        numbered = {
            name: torch.arange(start, start + t.numel(), dtype=torch.float64, device=t.device).view(t.shape)
            for (name, t), start in zip(tensors.items(), starts, strict=False)
        }
        folded = arm.fold(numbered)
        self.names = list(folded)
        numbers = flat(folded.values())
        self.moves = moves_only(arm.fold, numbered, numbers)
        self.order = numbers.long() - 1
        # weights are updated in place, so views of them stay valid; gradients, and some buffers, come anew
        still = kind == "weight" and all(t.is_contiguous() for t in tensors.values())
        self._views = [t.detach().view(-1) for t in tensors.values()] if still else []
        self.in_order = torch.equal(numbers, flat(numbered.values()))

    def vector(self) -> Tensor:
        """The arm's tensors as they are now, folded, in one float64 vector."""
        tensors = KINDS[self.kind](self.arm)
        if not self.moves:
            return flat(self.arm.fold(tensors).values())
        vector = joined(self._views) if self._views else flat(tensors.values())
        return vector if self.in_order else vector.index_select(0, self.order)


class Folded:
    """The arms' vectors at one step, each made once, since several arms are compared with the same one."""

    def __init__(self, layouts: dict[tuple[str, str], Layout]):
        self._layouts, self._vectors = layouts, {}

    def distance(self, arm: Arm, kind: str) -> Tensor | None:
        """The relative distance of ``arm`` from its against over the tensors that both have.

        ``kind`` is a key of ``KINDS``. A float64 scalar on the device; None where the two share no tensor.
        """
        mine, theirs = self._layout(arm, kind), self._layout(arm.against, kind)
        if mine.names == theirs.names:
            return (
                relative_distance(self._vector(arm, kind), self._vector(arm.against, kind))
                if mine.names
                else None
            )
        own, other = arm.fold(KINDS[kind](arm)), arm.against.fold(KINDS[kind](arm.against))
        names = [name for name in theirs.names if name in own]
        if not names:
            return None
        return relative_distance(flat(own[n] for n in names), flat(other[n] for n in names))

    def _layout(self, arm: Arm, kind: str) -> Layout:
        if (arm.name, kind) not in self._layouts:
            self._layouts[arm.name, kind] = Layout(arm, kind)
        return self._layouts[arm.name, kind]

    def _vector(self, arm: Arm, kind: str) -> Tensor:
        if (arm.name, kind) not in self._vectors:
            self._vectors[arm.name, kind] = self._layout(arm, kind).vector()
        return self._vectors[arm.name, kind]
