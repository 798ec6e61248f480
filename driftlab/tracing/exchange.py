"""The reference with one value of the candidate's in the place of its own: does it then give its results?

An interchange intervention (Geiger et al., Causal Abstractions of Neural Networks, 2021; activation patching,
Vig et al., 2020). Put in where the mistake is, or behind it, the candidate's value makes the candidate's
results; before it, the reference's. So the first value of the candidate's that does so is what the mistake
made, whatever it is, and the place is where the reference has its own of it.

What a loop makes, or a module that is called several times, is put in at all times together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise, permutations, product

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.arithmetic.shadow import plain
from driftlab.blame import callers
from driftlab.tracing.cone import before_the_loss, reached
from driftlab.tracing.flow import Flow, Value, writing
from driftlab.tracing.prints import AGREE, Seen, same_numbers

# Runs of the reference at most, and numbers that are kept of either network.
RUNS, KEPT = 150, 2e7
# A value is put in as it lies, or with its axes turned, in so many of the ways that come nearest.
LAYOUTS, AXES, LARGEST = 2, 4, 2**18

# So many operations lie between a value and what both networks have: those nearest to that are tried first.
DEPTHS = (0, 2, 3, 5, 9, 10**9)
# And so many may be done besides to a value that both have.
MORE = 4

Record = Callable[..., Flow]
# Values of the reference, by their numbers, each beside what is put in its place.
Change = dict[int, tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Exchanged:
    """Attributes:
    scope: the module that makes the reference's value.
    scopes: all that make something between what both have and that value.
    candidate_scope: the module that makes the candidate's.
    besides: whether the candidate comes by the reference's value, and something is done to it besides.
    """

    scope: str
    scopes: frozenset[str]
    candidate_scope: str
    besides: bool


def exchanged(mine: Record, theirs: Record, agrees: Callable[[dict[str, Tensor]], bool]) -> Exchanged | None:
    """The first value of the candidate's that makes its results of the reference's; None where none does.

    Args:
        mine, theirs: record the flow of reference and candidate; ``change`` as of ``Recorder``.
        agrees: whether results, by the reference's names, are the candidate's.
    """
    own, others = _Kept(mine), _Kept(theirs)
    if own.full or others.full:
        return None
    own.compare(others.seen)
    others.compare(own.seen)
    trial = _Trial(mine, agrees)
    for shallow, deep in pairwise(DEPTHS):
        for number in others.offered:
            spots = own.takes(others, number, range(shallow, deep))
            fits = [s for s in spots if any(map(trial.fits, own.changes(s, others, number)))]
            if fits:
                return own.exchanged(fits, others.flow.values[number].scope)
            if trial.left <= 0:
                return None
    return None


class _Trial:
    """Runs of the reference with a value put in.

    Attributes:
        left: how many there still may be.
    """

    def __init__(self, mine: Record, agrees: Callable[[dict[str, Tensor]], bool]):
        self._mine, self._agrees, self.left = mine, agrees, RUNS

    def fits(self, change: Change) -> bool:
        return any(self._agrees(self._ends(values)) for values in _laid_out(change))

    def _ends(self, values: Mapping[int, Tensor]) -> dict[str, Tensor]:
        def change(number: int, value: Value, tensor: Tensor) -> None:
            if number in values:
                with writing(tensor) as own:
                    own.copy_(values[number].reshape(tensor.shape))

        if self.left <= 0:
            return {}
        self.left -= 1
        try:
            return self._mine(change=change, known=True).ends
        except Exception:  # it does not run so, wherever that shows
            return {}


class _Kept:
    """A flow with the numbers of its values.

    Attributes:
        full: whether there were too many to be kept.
        offered: what may have been made by a mistake, in its order; once it was compared.
    """

    def __init__(self, record: Record):
        self.tensors: dict[int, Tensor] = {}
        self._alike: dict[int, set[int]] = {}
        self._callers: dict[int, tuple] = {}
        self._alike_made: defaultdict[tuple, list[int]] = defaultdict(list)
        self._size, self.full = 0, False
        self.flow = record(change=self._keep)
        self.seen = self.flow.seen()

    def _keep(self, number: int, value: Value, tensor: Tensor) -> None:
        self._size += tensor.numel()
        self.full = self.full or self._size > KEPT
        if not value.given and not self.full and value.prints is not None:
            self.tensors[number] = plain(tensor).cpu().squeeze().clone()
            self._callers[number] = callers()
            self._alike_made[value.scope, value.operation, value.place].append(number)

    def compare(self, other: Seen) -> None:
        """Which values the other network has, and where those begin that lead to the results without it."""
        self._other, values = other, self.flow.values
        self._shared = [v.prints is not None and other.has(v.prints) for v in values]
        self._made_of: list[set[int]] = []  # of each, the last ones before it that both have
        self._depth: list[int] = []
        for number, value in enumerate(values):
            made_of: set[int] = {number} if self._shared[number] else set()
            read = [i for i in value.inputs if not values[i].weight]
            if not made_of:
                made_of = set().union(*(self._made_of[i] for i in read))
            self._made_of.append(made_of)
            deeper = 1 + max((self._depth[i] for i in read), default=0)
            self._depth.append(0 if self._shared[number] else deeper)
        cone = reached((n for n in self.flow.results.values() if not self._shared[n]), self._lacked)
        begun = (i for n in cone for i in values[n].inputs if self._shared[i])
        edge = reached(begun, self._gives_its_order)  # which nobody sees in the prints
        self.offered = [n for n in sorted(cone | edge) if n in self.tensors and values[n].prints.telling]

    def _lacked(self, number: int) -> list[int]:
        """What a value is made of that the other network has not."""
        return [i for i in self.flow.values[number].inputs if not self._shared[i]]

    def _gives_its_order(self, number: int) -> list[int]:
        """What a value is joined of, or the one that it was made of number by number."""
        values = self.flow.values
        read = [i for i in values[number].inputs if self._shared[i]]
        size, sizes = _size(values[number]), [_size(values[i]) for i in read]
        if sum(sizes) == size and len(read) == len(values[number].inputs):
            return read
        alike = [i for i, own in zip(read, sizes, strict=True) if own == size]
        return alike if len(alike) == 1 else []

    def takes(self, others: _Kept, number: int, depths: range) -> Iterator[int]:
        """The values that ``number`` of the other's may stand for: of its size, and made of the same."""
        size, sources, before = others.tensors[number].numel(), others._made_of[number], self._before
        for spot in self.offered:
            if self._shared[spot] and others._depth[number] > MORE:
                continue
            if spot in before and self._depth[spot] in depths and self.tensors[spot].numel() == size:
                alike = self._made_of_theirs(spot)
                if alike == sources == set() or not alike.isdisjoint(sources):
                    yield spot

    def changes(self, spot: int, others: _Kept, number: int) -> Iterator[Change]:
        """``number`` of the other's in the place of ``spot``: from then on whenever it is made, or once."""
        tried, axes = [], others.tensors[number].dim()
        for mine, theirs in product(self._made_again(spot), others._made_again(number)):
            if (mine, theirs) in tried or len(mine) != len(theirs):
                continue
            tried.append((mine, theirs))
            change = {s: (self.tensors[s], others.tensors[n]) for s, n in zip(mine, theirs, strict=True)}
            if all(own.numel() == other.numel() and other.dim() == axes for own, other in change.values()):
                yield change

    def _made_again(self, number: int) -> list[list[int]]:
        """A value and those after it that the module makes so; at its line; called from there; none."""
        value, callers = self.flow.values[number], self._callers[number]
        later = [n for n in self._alike_made[value.scope, value.operation, value.place] if n >= number]
        line = [n for n in later if self._callers[n][:1] == callers[:1]]
        return [later, line, [n for n in line if self._callers[n] == callers], [number]]

    @cached_property
    def _before(self) -> range:
        return before_the_loss(self.flow)

    def _made_of_theirs(self, number: int) -> set[int]:
        """The other's values that look like those that it is made of."""
        if number not in self._alike:
            self._alike[number] = {found for n in self._made_of[number] for found in self._theirs(n)}
        return self._alike[number]

    def _theirs(self, number: int) -> list[int]:
        """The other's values that look like one of its own; where none does, like its slices."""
        found = self.flow.values[number].prints
        if found is None:
            return []
        slices = (p for axis in found.slices for p in axis)
        return self._other.find(found.whole) or [n for p in slices for n in self._other.find(p)]

    def exchanged(self, fits: list[int], candidate_scope: str) -> Exchanged:
        """Of several, that of the last that is no copy: what was made may pass through others unchanged."""
        own, values = [n for n in fits if not self._copies(n, set(fits))], self.flow.values
        spot = max(own or fits)
        scopes = frozenset(values[n].scope for n in reached([spot], self._lacked))
        return Exchanged(values[spot].scope, scopes, candidate_scope, self._shared[spot])

    def _copies(self, number: int, among: Iterable[int]) -> bool:
        values, read = self.flow.values, self.flow.values[number].inputs
        return any(same_numbers(values[number].prints, values[i].prints) for i in read if i in among)


def _size(value: Value) -> int:
    return value.prints.whole[0] if value.prints is not None else 0


def _laid_out(change: Change) -> Iterator[dict[int, Tensor]]:
    """As it lies, or with its axes turned: what has its shape first, then the nearest, until it is there.

    Of several the first tells how, and all are turned so.
    """
    like, values = next(iter(change.values()))
    orders = [tuple(range(values.dim()))]
    if values.dim() <= AXES and values.numel() <= LARGEST:
        orders += permutations(range(values.dim()))
    shaped = [(values.permute(order).shape != like.shape, values.permute(order), order) for order in orders]
    shaped.sort(key=lambda one: (one[0], distance(like, one[1].reshape(like.shape))))
    size, tried = float(torch.linalg.vector_norm(like)), []
    for _, turned, order in shaped:
        one = turned.reshape(like.shape)
        if len(tried) == LAYOUTS or any(torch.equal(one, t) for t in tried):
            continue
        if distance(like, one) <= AGREE * size:  # the same in the same order: nothing changes
            return
        tried.append(one)
        yield {n: other.permute(order).reshape(own.shape) for n, (own, other) in change.items()}
