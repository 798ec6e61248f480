"""The reference with one value of the candidate's in the place of its own: does it then give its results?

An interchange intervention (Geiger et al., Causal Abstractions of Neural Networks, 2021; activation patching,
Vig et al., 2020). Put in where the mistake is, or behind it, the candidate's value makes the candidate's
results; before it, the reference's. So the first value of the candidate's that does so is what the mistake
made, whatever it is, and the place is where the reference has its own of it.

Which value stands for which nobody says. A mistake leaves most of a value as it is, so those are tried first
that are each other's nearest. What a loop makes, or a module that is called several times, is put in whenever
it is made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise, permutations, product

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.tracing.kept import Kept
from driftlab.tracing.parting import Again
from driftlab.tracing.prints import AGREE

# Runs of the reference at most, fewer of one that makes many numbers.
RUNS, NUMBERS = 400, 2e9
# A value is put in as it lies, or with its axes turned, in so many of the ways that come nearest.
LAYOUTS, AXES, LARGEST = 2, 4, 2**18
# So many operations lie between a value and what both networks have: those nearest to that are tried first.
DEPTHS = (0, 2, 3, 5, 9, 10**9)

# A value of the candidate's and one of the reference's that it may stand for.
Pair = tuple[int, int]
# Values of the reference, each beside what is put in its place.
Change = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Exchanged:
    """Attributes:
    scope: the module that makes the reference's value.
    scopes: all that make something between what both have and that value, and for it alone.
    candidate_scope: the module that makes the candidate's.
    besides: whether the candidate comes by the reference's value, and something is done to it besides.
    """

    scope: str
    scopes: frozenset[str]
    candidate_scope: str
    besides: bool


def exchanged(mine: Again, theirs: Again, agrees: Callable[[dict[str, Tensor]], bool]) -> Exchanged | None:
    """The first value of the candidate's that makes its results of the reference's; None where none does.

    Args:
        mine, theirs: run reference and candidate.
        agrees: whether results, by the reference's names, are the candidate's.
    """
    own, others = Kept(mine), Kept(theirs)
    if own.full or others.full:
        return None
    own.compare(others.seen)
    others.compare(own.seen)
    trial = _Trial(mine, own, others, agrees)
    pairs = [(number, spot) for number in others.offered for spot in own.takes(others, number)]
    for some in (_nearest(pairs, own, others), *_by_depth(pairs, own)):
        for number, spot in some:
            if fit := trial.fit((number, spot)):
                also = [s for n, s in some if n == number and s != spot]
                fits = {spot: fit} | {s: f for s in also if (f := trial.fit((number, s)))}
                return _found(own, fits, others.flow.values[number].scope)
            if trial.left <= 0:
                return None
    return None


def _nearest(pairs: Iterable[Pair], own: Kept, others: Kept) -> list[Pair]:
    """Those of which each is the nearest to the other, by the way from what both networks have; no copies."""
    sizes = {n: AGREE * float(torch.linalg.vector_norm(tensor)) for n, tensor in own.tensors.items()}
    apart = {p: far for p, far in _apart(pairs, own, others) if far > sizes[p[1]]}  # or nothing changes
    least: dict[tuple[int, int], float] = {}
    for pair, far in apart.items():
        for side in enumerate(pair):
            least[side] = min(far, least.get(side, far))
    found = [p for p, far in apart.items() if all(far <= least[side] * (1 + AGREE) for side in enumerate(p))]
    found.sort(key=lambda p: own.tensors[p[1]].shape != others.tensors[p[0]].shape)
    first: dict[Pair, Pair] = {}
    for number, spot in found:
        first.setdefault((others.original[number], own.original[spot]), (number, spot))
    return sorted(first.values(), key=lambda pair: (own.depth[pair[1]], others.depth[pair[0]]))


def _apart(pairs: Iterable[Pair], own: Kept, others: Kept) -> Iterator[tuple[Pair, float]]:
    """How far the two are apart, with their axes in the order that brings them nearest."""
    alike = defaultdict(list)
    for number, spot in pairs:
        alike[number, own.tensors[spot].shape].append(spot)
    for (number, _), spots in alike.items():
        values, other = torch.stack([own.tensors[s] for s in spots]), others.tensors[number]
        found = torch.full((len(spots),), math.inf, dtype=values.dtype)
        for order in _orders(values[0], other):
            turned = other.permute(order).reshape(values[0].shape)
            differences = torch.where(values == turned, 0.0, values - turned).flatten(1)
            found = torch.minimum(found, torch.linalg.vector_norm(differences, dim=1).nan_to_num(math.inf))
        yield from zip(((number, spot) for spot in spots), found.tolist(), strict=True)


def _by_depth(pairs: Iterable[Pair], own: Kept) -> Iterator[list[Pair]]:
    for shallow, deep in pairwise(DEPTHS):
        yield [pair for pair in pairs if shallow <= own.depth[pair[1]] < deep]


def _found(own: Kept, fits: Mapping[int, Change], candidate_scope: str) -> Exchanged:
    """Of several, that of the last that is no copy: what was made may pass through others unchanged."""
    spot = max([n for n in fits if own.original[n] not in fits or own.original[n] == n] or fits)
    scope, scopes = own.flow.values[spot].scope, own.scopes_before(spot, fits[spot])
    return Exchanged(scope, scopes, candidate_scope, own.shared[spot])


class _Trial:
    """Runs of the reference with values put in.

    Attributes:
        left: how many there still may be.
    """

    def __init__(self, mine: Again, own: Kept, others: Kept, agrees: Callable[[dict[str, Tensor]], bool]):
        self._mine, self._own, self._others, self._agrees = mine, own, others, agrees
        self._tried: dict[Pair, Change | None] = {}
        self.left = min(RUNS, NUMBERS / max(1, own.size))

    def fit(self, pair: Pair) -> Change | None:
        if pair not in self._tried:
            changes = (c for c in self._changes(*pair) if any(map(self._gives_theirs, _laid_out(c))))
            self._tried[pair] = next(changes, None)
        return self._tried[pair]

    def _changes(self, number: int, spot: int) -> Iterator[Change]:
        """From then on whenever it is made, or once."""
        own, others, tried = self._own.tensors, self._others.tensors, []
        for mine, theirs in product(self._own.made_again(spot), self._others.made_again(number)):
            if (mine, theirs) in tried or len(mine) != len(theirs):
                continue
            tried.append((mine, theirs))
            change = {s: (own[s], others[n]) for s, n in zip(mine, theirs, strict=True)}
            axes = others[number].dim()
            if all(one.numel() == other.numel() and other.dim() == axes for one, other in change.values()):
                yield change

    def _gives_theirs(self, values: Mapping[int, Tensor]) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        made_by = {number: self._own.flow.values[number].made_by for number in values}
        try:
            ends = self._mine.results({(made_by[n][0], made_by[n][2]): t for n, t in values.items()})
        except Exception:  # it does not run so, wherever that shows
            return False
        return self._agrees(ends)


def _laid_out(change: Change) -> Iterator[dict[int, Tensor]]:
    """As it lies, or with its axes turned: what has its shape first, then the nearest, until it is there.

    Of several the first tells how, and all are turned so.
    """
    like, values = next(iter(change.values()))
    shaped = [(values.permute(order).reshape(like.shape), order) for order in _orders(like, values)]
    shaped.sort(key=lambda one: distance(like, one[0]))
    size, tried = float(torch.linalg.vector_norm(like)), []
    for one, order in shaped:
        if len(tried) == LAYOUTS or any(torch.equal(one, t) for t in tried):
            continue
        if distance(like, one) <= AGREE * size:  # the same in the same order: nothing changes
            return
        tried.append(one)
        yield {n: other.permute(order).reshape(own.shape) for n, (own, other) in change.items()}


def _orders(like: Tensor, values: Tensor) -> list[tuple[int, ...]]:
    """How its axes may lie: as they do, and turned so that it has the shape, if it can have it."""
    as_it_lies = tuple(range(values.dim()))
    if values.dim() > AXES or values.numel() > LARGEST:
        return [as_it_lies]
    orders = list(permutations(as_it_lies))
    shaped = [order for order in orders if [values.shape[a] for a in order] == list(like.shape)]
    return [as_it_lies, *(shaped or orders)]
