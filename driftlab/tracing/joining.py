"""One value of the one network for what the other makes in several calls, as of a prompt and what follows it.

What a rewrite computes at once for all that the reference computes in turn (parts of a text, maps of several
sizes, steps of a loop) has none of its values, and no value of its size: it has them joined.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.tracing.kept import Kept
from driftlab.tracing.pairs import laid
from driftlab.tracing.prints import AGREE
from driftlab.tracing.trial import Trial

# Values of the candidate's that are tried for what is joined, the nearest first.
NEAREST = 3


@dataclass(frozen=True)
class Joined:
    """Values that one operation makes in several calls, or one value alone.

    Attributes:
        tensor: all of them, joined.
        axis: along which, that in which their sizes differ; -1 where these are equal, of a new first one.
    """

    numbers: tuple[int, ...]
    tensor: Tensor
    axis: int

    def parts(self, kept: Kept, values: Tensor) -> dict[int, Tensor]:
        """Of other values that lie as these do."""
        if len(self.numbers) == 1:
            return {self.numbers[0]: values}
        like = [kept.tensors[n] for n in self.numbers]
        if self.axis < 0:
            return dict(zip(self.numbers, values.unbind(0), strict=True))
        flat = [_flat(t, values.dim()) for t in like]
        parts = values.split([t.shape[self.axis] for t in flat], self.axis)
        return {n: p.reshape(t.shape) for n, p, t in zip(self.numbers, parts, like, strict=True)}


@dataclass(frozen=True)
class Otherwise:
    """Attributes:
    spots: the reference's values.
    number: the candidate's, the last of several.
    cut: whether that is zero wherever it is not the reference's.
    """

    spots: tuple[int, ...]
    number: int
    cut: bool


def joined_otherwise(own: Kept, others: Kept, trial: Trial) -> Otherwise | None:
    """The first of the reference's values for which the candidate's make its results; None where none do."""
    for mine, theirs in _pairs(own, others):
        values = nearest(mine.tensor, theirs.tensor)
        size = float(torch.linalg.vector_norm(mine.tensor))
        if distance(mine.tensor, values) > AGREE * size and trial.gives_theirs(mine.parts(own, values)):
            apart = (values - mine.tensor).abs() > AGREE * mine.tensor.abs().max()
            return Otherwise(mine.numbers, theirs.numbers[-1], not bool(values[apart].any()))
    return None


def _pairs(own: Kept, others: Kept) -> Iterator[tuple[Joined, Joined]]:
    """Several of the one and one of the other, the reference's first ones first."""
    alone = [[Joined((n,), k.tensors[n], -1) for n in k.offered if not k.shared[n]] for k in (own, others)]
    several = [list(_joined(k)) for k in (own, others)]
    both = [(m, alone[1]) for m in several[0]] + [(m, several[1]) for m in alone[0]]
    before = own.flow.before_the_loss()
    for mine, theirs in sorted(both, key=lambda b: (max(own.depth[n] for n in b[0].numbers), b[0].numbers)):
        if mine.numbers[-1] in before:
            alike = (t for t in theirs if t.tensor.numel() == mine.tensor.numel())
            far = [(distance(mine.tensor, nearest(mine.tensor, t.tensor)), t.numbers, t) for t in alike]
            yield from ((mine, one) for _, _, one in sorted(far, key=itemgetter(0, 1))[:NEAREST])


def _joined(kept: Kept) -> Iterator[Joined]:
    """What each line of a module makes in several calls, of which the other network lacks one."""
    offered = set(kept.offered)
    for numbers in kept.turns.at_one_line(kept.tensors):
        mistaken = not offered.isdisjoint(numbers) and not all(kept.shared[n] for n in numbers)
        if mistaken and (found := joined_in_one(kept, numbers)) is not None:
            yield found


def joined_in_one(kept: Kept, numbers: Sequence[int]) -> Joined | None:
    """These, or the one; None where they cannot be joined."""
    tensors = [kept.tensors[n] for n in numbers]
    found = _along_one_axis(tensors) if len(tensors) > 1 else (tensors[0], -1)
    return None if found is None else Joined(tuple(numbers), *found)


def _along_one_axis(tensors: Sequence[Tensor]) -> tuple[Tensor, int] | None:
    """Joined, and the axis; -1 of a new one. Maps of several sizes along their places."""
    if len({t.shape for t in tensors}) == 1:
        return torch.stack(list(tensors)), -1
    if len({t.dim() for t in tensors}) > 1:
        return None
    for dims in (tensors[0].dim(), tensors[0].dim() - 1):
        flat = [_flat(t, dims) for t in tensors]
        differ = [axis for axis in range(dims) if len({t.shape[axis] for t in flat}) > 1]
        if len(differ) == 1:
            return torch.cat(flat, differ[0]), differ[0]
    return None


def _flat(tensor: Tensor, dims: int) -> Tensor:
    """With its last two axes as one, where it has one more than that."""
    return tensor.flatten(-2) if tensor.dim() > max(dims, 1) else tensor


def nearest(like: Tensor, values: Tensor) -> Tensor:
    """With its axes in the order that brings it nearest."""
    return min(laid(like, values), key=lambda one: distance(like, one))
