"""Which candidate elements each reference tensor is taken from, as known so far while a fold is sought."""

from __future__ import annotations

import torch
from torch import Tensor

from driftlab.fold.layout import Layout, NamedTensors
from driftlab.fold.views import Placement, placement, whole


class Assignment:
    """Reference tensors on one side, candidate elements on the other, each used once.

    Attributes:
        reference, candidate: what is assigned to what.
        mine, theirs: their tensors, on the CPU.
        constant: the reference's tensors that are all one number, so that values cannot tell them apart.
        layout: of the candidate's tensors.
        placed: reference name -> how to read it.
        how: reference name -> "tags", "value" or "name".
        free: for every position in the layout, whether nothing was taken from it yet.
        touched: the candidate's tensors that something was taken from.
        repeated: the reference's tensors that stand in several places of the candidate.
    """

    def __init__(self, reference: NamedTensors, candidate: NamedTensors):
        self.reference, self.candidate = reference, candidate
        self.mine = {name: tensor.cpu() for name, tensor in reference.tensors.items()}
        self.theirs = {name: tensor.cpu() for name, tensor in candidate.tensors.items()}
        self.constant = {name for name, tensor in self.mine.items() if _is_constant(tensor)}
        self.layout = Layout(self.theirs)
        self.placed: dict[str, Placement] = {}
        self.how: dict[str, str] = {}
        self.free = torch.ones(self.layout.size, dtype=torch.bool)
        self.touched: set[str] = set()
        self.repeated: list[str] = []
        self._rank = {name: rank for rank, name in enumerate(self.mine)}
        self._rank_of_theirs = {name: rank for rank, name in enumerate(self.theirs)}

    def place(self, name: str, positions: Tensor, how: str, exact: bool = True) -> bool:
        """Take the reference tensor ``name`` from ``positions``; ``exact``: only if the values agree."""
        if not bool(self.free[positions].all()):
            return False
        built = placement(positions, self.layout)
        if exact and not same_values(self.mine[name], built.take(self.theirs)):
            return False
        self.placed[name], self.how[name] = built, how
        self.free[positions] = False
        self.touched.update(built.sources)
        return True

    def place_whole(self, name: str, source: str, how: str) -> None:
        """Take ``name`` from a candidate tensor of its shape, unless that is in use for another."""
        if name in self.candidate.aliases or source not in self.touched:
            self.placed[name], self.how[name] = whole(source, self.layout.shapes[source]), how
            self.free_of(source).fill_(False)
            self.touched.add(source)

    def missing(self, dtype: torch.dtype | None = None) -> list[str]:
        """Reference tensors without a place; with ``dtype``, those to be sought among tensors of it."""
        missing = [name for name in self.mine if name not in self.placed]
        if dtype is None:
            return missing
        real = [name for name in missing if self.mine[name].numel() and not self.mine[name].is_complex()]
        return [name for name in real if self.mine[name].is_floating_point() == dtype.is_floating_point]

    def unused(self, dtype: torch.dtype) -> list[str]:
        """Candidate tensors of ``dtype`` of which something is free, in the order of definition."""
        same = [name for name, tensor in self.theirs.items() if tensor.dtype == dtype and tensor.numel()]
        return [name for name in same if name not in self.touched or bool(self.free_of(name).any())]

    def free_of(self, source: str) -> Tensor:
        """The part of ``free`` that belongs to a candidate tensor, in its shape."""
        start, shape = self.layout.starts[source], self.layout.shapes[source]
        return self.free[start : start + torch.Size(shape).numel()].view(shape)

    def namesake(self, name: str) -> str | None:
        """The candidate tensor with this name and shape, under its first name; None where there is none."""
        source = self.candidate.first_name(name)
        return source if source is not None and self.theirs[source].shape == self.mine[name].shape else None

    def distances(self, name: str) -> dict[str, int]:
        """How far each candidate tensor is from where ``name`` should be, had definitions kept their order.

        Counted from the nearest reference tensor before it that has a place.
        """
        before = [other for other in self.placed if self._rank[other] < self._rank[name]]
        expected = self._rank[name]
        if before:
            anchor = max(before, key=self._rank.__getitem__)
            last = max(self._rank_of_theirs[source] for source in self.placed[anchor].sources)
            expected += last - self._rank[anchor]
        return {source: abs(rank - expected) for source, rank in self._rank_of_theirs.items()}


def same_values(mine: Tensor, theirs: Tensor) -> bool:
    """Same shape, same kind of number, and same values once cast to the candidate's dtype."""
    same_kind = mine.is_floating_point() == theirs.is_floating_point()
    return same_kind and torch.equal(mine.to(theirs.dtype), theirs)


def _is_constant(tensor: Tensor) -> bool:
    return not tensor.numel() or bool((tensor == tensor.reshape(-1)[:1]).all())
