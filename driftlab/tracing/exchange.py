"""The reference with one value of the candidate's in the place of its own: does it then give its results?

An interchange intervention (Geiger et al., Causal Abstractions of Neural Networks, 2021; activation patching,
Vig et al., 2020). Put in where the mistake is, or behind it, the candidate's value makes the candidate's
results; before it, the reference's. So the first value of the candidate's that does so is what the mistake
made, whatever it is, and the place is where the reference has its own of it.

Which value stands for which nobody says. A mistake leaves most of a value as it is, so those are tried first
that are each other's nearest; one that leaves little comes soon after what both have. What a loop makes, or a
module that is called several times, is put in whenever it is made.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import nsmallest
from itertools import permutations, product

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.tracing.cone import reached
from driftlab.tracing.kept import Kept
from driftlab.tracing.prints import AGREE
from driftlab.tracing.rewriting import instead
from driftlab.tracing.running import Again
from driftlab.tracing.shared_rows import BothRows

# Runs of the reference at most, fewer of one that makes many numbers.
RUNS, NUMBERS = 400, 2e9
# A value is put in as it lies, or with its axes turned, in so many of the ways that come nearest.
LAYOUTS, AXES, LARGEST = 2, 4, 2**18
# Runs in which a value before one that fits is looked for; pairs soon after what both have, at a time.
BEFORE, SOON = 100, 30
# Two values that both have come as late as one so many operations further on.
LATER = 3

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
    users: the modules that go on with the reference's value.
    """

    scope: str
    scopes: frozenset[str]
    candidate_scope: str
    besides: bool
    users: frozenset[str]


def exchanged(
    mine: Again,
    theirs: Again,
    agrees: Callable[[dict[str, Tensor]], bool],
    rows: BothRows = (None, None),
) -> Exchanged | None:
    """The first value of the candidate's that makes its results of the reference's; None where none does.

    Args:
        mine, theirs: run reference and candidate.
        agrees: whether results, by the reference's names, are the candidate's.
        rows: of each those that the other has, where that leaves some out.
    """
    own, others = Kept(mine, rows[0]), Kept(theirs, rows[1])
    if own.full or others.full:
        return None
    own.compare(others.seen)
    others.compare(own.seen)
    search = _Search(own, others, _Trial(mine, own, agrees))
    while search.narrows():
        pass
    return search.found


class _Search:
    """Pairs of which each is the other's nearest are tried, then those that are so among the others.

    And those that come soonest after what both have, where a mistake may leave nothing near: when half of the
    runs are left, and first in later rounds.

    Attributes:
        found: by the first that fits; then by one of those before it, if that fits as well.
    """

    def __init__(self, own: Kept, others: Kept, trial: _Trial):
        self._own, self._others, self._trial = own, others, trial
        pairs = ((number, spot) for number in others.offered for spot in own.takes(others, number))
        sizes = {n: AGREE * float(torch.linalg.vector_norm(tensor)) for n, tensor in own.tensors.items()}
        self._apart = {p: far for p, far in _apart(pairs, own, others) if far > sizes[p[1]]}  # or it is there
        self._copies: defaultdict[Pair, list[Pair]] = defaultdict(list)
        for number, spot in self._apart:
            self._copies[others.original[number], own.original[spot]].append((number, spot))
        self._least, self._waits = 0.0, trial.left / 2
        self.found: Exchanged | None = None

    def narrows(self) -> bool:
        """Tries the nearest ones, those first that come first; whether there may be more."""
        own, others = self._own, self._others
        partners = _nearest(self._apart)
        order = sorted(partners.items(), key=lambda p: (own.depth[p[0]], others.depth[p[1]]))
        waits, self._waits = self._waits, math.inf
        for spot, number in self._in_turn(order, waits):
            if self._trial.left <= self._least:
                return False
            if (number, spot) not in self._apart:  # a copy of what was tried
                continue
            fit = self._trial.fit(self._changes(number, spot, partners))
            for copy in self._copies[others.original[number], own.original[spot]]:
                self._apart.pop(copy, None)
            if fit:
                self._least = self._trial.left - BEFORE
                self.found = self._exchanged(number, spot, fit)
                mine, theirs = own.before(spot, fit), reached([number], others.lacked)
                self._apart = {p: far for p, far in self._apart.items() if p[0] in theirs and p[1] in mine}
                return len(self.found.scopes) > 1  # else it lies in one module
        return bool(partners)

    def _in_turn(self, order: Sequence[tuple[int, int]], waits: float) -> Iterator[tuple[int, int]]:
        """These, and those that come soonest once no more runs are left than it ``waits`` for."""
        for pair in order:
            if self._trial.left <= waits:
                waits = -math.inf
                yield from self._soon()
            yield pair

    def _soon(self) -> list[Pair]:
        own, others = self._own.depth, self._others.depth
        soonest = nsmallest(SOON, self._apart, key=lambda p: own[p[1]] + others[p[0]] or LATER)
        return [(spot, number) for number, spot in soonest]

    def _changes(self, number: int, spot: int, partners: Mapping[int, int]) -> Iterator[Change]:
        """From then on whenever it is made, or once."""
        own, others, axes = self._own.tensors, self._others.tensors, self._others.tensors[number].dim()
        again = self._own.made_again(spot)
        both = [(mine, [partners[s] for s in mine]) for mine in again if partners.keys() >= set(mine)]
        both += [b for b in product(again, self._others.made_again(number)) if len(b[0]) == len(b[1])]
        for mine, theirs in (b for at, b in enumerate(both) if b not in both[:at]):
            change = {s: (own[s], others[n]) for s, n in zip(mine, theirs, strict=True)}
            if all(one.numel() == other.numel() and other.dim() == axes for one, other in change.values()):
                yield change

    def _exchanged(self, number: int, spot: int, fit: Change) -> Exchanged:
        """What was made may pass through others unchanged."""
        own, made = self._own, self._own.original[spot]
        values = own.flow.values
        while not values[made].made_by[0] and values[made].inputs:  # it was written into
            made = max(values[made].inputs)
        lacked = (n for n in own.before(spot, fit) if n == spot or not own.shared[n])
        made_there = (n for n in lacked if values[n].made_by[0] and values[n].prints is not None)
        scopes = frozenset(values[n].scope for n in made_there)
        users = frozenset(values[n].scope for n in own.users(made))
        candidate_scope = self._others.flow.values[number].scope
        return Exchanged(values[made].scope, scopes, candidate_scope, own.shared[made], users)


def _nearest(apart: Mapping[Pair, float]) -> dict[int, int]:
    """Those of which each is the other's nearest, by the reference's."""
    least: dict[tuple[int, int], float] = {}
    for pair, far in apart.items():
        for side in enumerate(pair):
            least[side] = min(far, least.get(side, far))
    found: dict[int, int] = {}
    for pair, far in apart.items():
        if all(far <= least[side] * (1 + AGREE) for side in enumerate(pair)):
            found.setdefault(pair[1], pair[0])
    return found


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


class _Trial:
    """Runs of the reference with values put in.

    Attributes:
        left: how many there still may be.
    """

    def __init__(self, mine: Again, own: Kept, agrees: Callable[[dict[str, Tensor]], bool]):
        self._mine, self._values, self._agrees, self._rows = mine, own.flow.values, agrees, own.rows
        self.left = min(RUNS, NUMBERS / max(1, own.size))

    def fit(self, changes: Iterable[Change]) -> Change | None:
        """The first that gives the candidate's results, and does not without its own first value."""
        return next((c for c in changes if any(map(self._fits, _laid_out(c)))), None)

    def _fits(self, values: Mapping[int, Tensor]) -> bool:
        if not self._gives_theirs(values):
            return False
        _, *later = values
        return not later or not self._gives_theirs({number: values[number] for number in later})

    def _gives_theirs(self, values: Mapping[int, Tensor]) -> bool:
        if self.left <= 0:
            return False
        self.left -= 1
        made_by = {number: self._values[number].made_by for number in values}
        try:
            ends = self._mine.results(
                {(made_by[n][0], made_by[n][2]): instead(t, self._rows) for n, t in values.items()}
            )
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
