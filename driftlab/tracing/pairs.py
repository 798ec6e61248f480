"""Which value of the candidate's may stand for which of the reference's, and how far the two are apart."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import permutations

import torch
from torch import Tensor

from driftlab.tracing.kept import Kept
from driftlab.tracing.prints import AGREE

# Axes are turned of values with at most so many axes and numbers.
AXES, LARGEST = 4, 2**18
# So many operations may be done besides to a value that both have.
MORE = 4
# Two values that both have come as late as one so many operations further on.
LATER = 3

# A value of the candidate's and one of the reference's that it may stand for.
Pair = tuple[int, int]


class Pairs:
    """All that are left: those that are apart, else the one is there already."""

    def __init__(self, own: Kept, others: Kept):
        offered = ((number, spot) for number in others.offered for spot in _taking(own, others, number))
        sizes = {n: AGREE * float(torch.linalg.vector_norm(tensor)) for n, tensor in own.tensors.items()}
        apart = {p: far for p, far in _apart(offered, own, others) if far > sizes[p[1]]}
        self._places = {pair: place for place, pair in enumerate(apart)}
        self._numbers, self._spots = torch.tensor(list(apart), dtype=torch.long).reshape(-1, 2).T
        self._far = torch.tensor(list(apart.values()), dtype=torch.float64)
        self._left = torch.ones(len(apart), dtype=torch.bool)
        self._originals = others.original, own.original
        self._copies: defaultdict[Pair, list[int]] = defaultdict(list)
        for place, pair in enumerate(apart):
            self._copies[self._original(*pair)].append(place)
        depths = torch.tensor(others.depth)[self._numbers] + torch.tensor(own.depth)[self._spots]
        self._depths = torch.where(depths == 0, LATER, depths)

    def _original(self, number: int, spot: int) -> Pair:
        numbers, spots = self._originals
        return numbers[number], spots[spot]

    def __contains__(self, pair: Pair) -> bool:
        return pair in self._places and bool(self._left[self._places[pair]])

    def leave_out(self, number: int, spot: int) -> None:
        """With all copies of the two."""
        self._left[self._copies[self._original(number, spot)]] = False

    def keep(self, numbers: Collection[int], spots: Collection[int]) -> None:
        """Of these values alone."""
        for own, kept in ((self._numbers, numbers), (self._spots, spots)):
            self._left &= torch.isin(own, torch.tensor(list(kept), dtype=torch.long))

    def nearest(self) -> dict[int, int]:
        """Those of which each is the other's nearest, by the reference's."""
        numbers, spots, far = (of[self._left] for of in (self._numbers, self._spots, self._far))
        mutual = torch.ones(len(far), dtype=torch.bool)
        for own in (numbers, spots):
            least = torch.full((int(own.max()) + 1 if len(own) else 0,), math.inf, dtype=far.dtype)
            mutual &= far <= least.scatter_reduce(0, own, far, "amin")[own] * (1 + AGREE)
        found: dict[int, int] = {}
        for number, spot in zip(numbers[mutual].tolist(), spots[mutual].tolist(), strict=True):
            found.setdefault(spot, number)
        return found

    def just_before(self, numbers: Mapping[int, int], spots: Mapping[int, int], most: int) -> list[Pair]:
        """Those the fewest steps before, which are given for each value of the two networks."""
        left = self._left.nonzero()[:, 0]
        pairs = zip(self._spots[left].tolist(), self._numbers[left].tolist(), strict=True)
        both = {(s, n): spots[s] + numbers[n] for s, n in pairs if s in spots and n in numbers}
        return sorted(both, key=lambda pair: both[pair])[:most]

    def soonest(self, most: int) -> list[Pair]:
        """Those that come soonest after what both have, the reference's first."""
        left = self._left.nonzero()[:, 0]
        first = left[torch.argsort(self._depths[left], stable=True)[:most]]
        return list(zip(self._spots[first].tolist(), self._numbers[first].tolist(), strict=True))


def _taking(own: Kept, others: Kept, number: int) -> Iterator[int]:
    """The reference's values that ``number`` may stand for: of its size, and made of the same.

    Of two that both networks have the one may be made of the other, or both of the same. So may one of which
    the reference has the slices alone, and the value that it stands for.
    """
    size, made_of = others.tensors[number].numel(), others.made_of[number]
    read, weight = others.read_shared(number), others.flow.values[number].weight
    in_parts = not (weight or others.has_whole(number))
    before = own.flow.before_the_loss()
    for spot in (n for n in own.offered if n in before and own.tensors[n].numel() == size):
        both = own.shared[spot] and others.shared[number]
        too_deep = own.shared[spot] and others.depth[number] > MORE
        if too_deep or (both and _of_one_table(own, spot, others, number)):
            continue
        sources = own.made_of[spot] | (own.read_shared(spot) if both else set())
        alike = set().union(*map(own.alike, own.fed(sources)))
        theirs = others.fed(made_of | (read if both or in_parts else set()))
        if alike == theirs == set() or not alike.isdisjoint(theirs):
            yield spot


def _of_one_table(own: Kept, spot: int, others: Kept, number: int) -> bool:
    """Whether both were taken out of the same tensor, of whose rows any may be taken."""
    mine, theirs = own.flow.values[spot], others.flow.values[number]
    if not (mine.part and theirs.part):
        return False
    return any(not own.alike(i).isdisjoint(theirs.inputs) for i in mine.inputs)


def _apart(pairs: Iterable[Pair], own: Kept, others: Kept) -> Iterator[tuple[Pair, float]]:
    """How far the two are apart, with their axes in the order that brings them nearest."""
    alike = defaultdict(list)
    for number, spot in pairs:
        alike[number, own.tensors[spot].shape].append(spot)
    for (number, _), spots in alike.items():
        values, other = torch.stack([own.tensors[s] for s in spots]), others.tensors[number]
        found = torch.full((len(spots),), math.inf, dtype=values.dtype)
        for turned in laid(values[0], other):
            differences = torch.where(values == turned, 0.0, values - turned).flatten(1)
            found = torch.minimum(found, torch.linalg.vector_norm(differences, dim=1).nan_to_num(math.inf))
        yield from zip(((number, spot) for spot in spots), found.tolist(), strict=True)


def orders(like: Tensor, values: Tensor) -> list[tuple[int, ...]]:
    """How its axes may lie: so that it has the shape, if it can have it; else as they do, or any way."""
    as_it_lies = tuple(range(values.dim()))
    if values.dim() > AXES or values.numel() > LARGEST:
        return [as_it_lies]
    orders = list(permutations(as_it_lies))
    shaped = [order for order in orders if [values.shape[a] for a in order] == list(like.shape)]
    return shaped or orders


def laid(like: Tensor, values: Tensor) -> Iterator[Tensor]:
    """In each of these orders, with its shape."""
    return (values.permute(order).reshape(like.shape) for order in orders(like, values))
