"""The search for a value of the candidate's that makes its results of the reference's.

Which value stands for which nobody says. A mistake leaves most of a value as it is, so those are tried first
that are each other's nearest; one that leaves little comes soon after what both have. What a loop makes, or a
module that is called several times, is put in whenever it is made.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

from torch import Tensor

from driftlab.tracing.flow import in_steps, reached
from driftlab.tracing.kept import Kept
from driftlab.tracing.pairs import Pairs, laid
from driftlab.tracing.prints import AGREE, same_numbers
from driftlab.tracing.trial import Change, Trial, laid_out

# Runs in which a value before one that fits is looked for, and one for a single taker; pairs soon after what
# both have, at a time.
BEFORE, SOON = 100, 30
# Where so few values lie before one that fits, so many pairs that lie just before it are tried first.
CLOSE, JUST_BEFORE = 24, 12


@dataclass(frozen=True)
class Exchanged:
    """Attributes:
    scope: the module that makes the reference's value.
    scopes: all that make something between what both have and that value, and for it alone; what the
        candidate has in parts alone, each of which might stand elsewhere, counts as between.
    candidate_scope: the module that makes the candidate's.
    besides: whether the candidate comes by the reference's value, and something is done to it besides; not
        where it is made of the same slices, of which it has others more often. Or whether it goes on with
        one that the same code makes in another turn.
    users: the modules that go on with the reference's value; none where it is a result as well, which what
        they do to it leaves as it is.
    inside: whether the module that makes the reference's value goes on with it, and no other; not of what is
        made of weights alone.
    fed: whether the module that makes it would make the candidate's of another of the candidate's values; not
        asked where something is done besides.
    turned: whether what is done besides is that it has another order.
    in_part: whether some rows of it are the candidate's, and others are not.
    """

    scope: str
    scopes: frozenset[str]
    candidate_scope: str
    besides: bool
    users: frozenset[str]
    inside: bool = False
    fed: bool = False
    turned: bool = False
    in_part: bool = False


class Search:
    """Pairs of which each is the other's nearest are tried, then those that are so among the others.

    And those that come soonest after what both have, where a mistake may leave nothing near: when half of the
    runs are left, and first in later rounds.

    Attributes:
        found: by the first that fits; then by one of those before it, if that fits as well.
        spot, number: of the reference's value, infinite where there is none, and of the candidate's.
    """

    def __init__(self, own: Kept, others: Kept, trial: Trial):
        self._own, self._others, self._trial = own, others, trial
        self._pairs = Pairs(own, others)
        self._least, self._waits = 0.0, trial.left / 2
        self._next: list[tuple[int, int]] = []
        self.found: Exchanged | None = None
        self.spot: float = math.inf
        self.number = -1

    def narrows(self) -> bool:
        """Tries the nearest ones, those first that come first; whether there may be more."""
        own, others, pairs = self._own, self._others, self._pairs
        partners = pairs.nearest()
        order = sorted(partners.items(), key=lambda p: (own.depth[p[0]], others.depth[p[1]]))
        waits, self._waits = self._waits, math.inf
        for spot, number in self._in_turn(order, waits):
            if self._trial.left <= self._least:
                return False
            if (number, spot) not in pairs:  # a copy of what was tried
                continue
            fit = self._trial.fit(self._changes(number, spot, partners))
            pairs.leave_out(number, spot)
            if fit:
                self._least = max(0.0, self._trial.left - BEFORE)
                before = self._fits(number, spot, fit)
                if self._in_another_order(before) or len(self.found.scopes) == 1:  # it lies in one module
                    return False
                pairs.keep(reached([number], others.lacked_whole), before)
                self._next = self._just_before(number, spot) if len(before) <= CLOSE else []
                return True
        return bool(partners)

    def turns(self, trial: Trial) -> None:
        """Tries what both have but for its order before the first that the candidate has not."""
        self._trial = trial
        self._in_another_order({i for n in self._own.begun for i in self._own.flow.values[n].inputs})

    def _fits(self, number: int, spot: int, fit: Change) -> set[int]:
        """What the reference makes of its own before that value, and for it alone."""
        before = self._own.before(spot, fit)
        moved = self._own.left_out(before)
        if moved and any(self._trial.gives_theirs({**moved, **values}) for values in laid_out(fit)):
            before = self._own.before(spot, fit, alone=False)  # a way that it takes elsewhere ends on the way
        self.found, self.spot, self.number = self._exchanged(number, spot, before), spot, number
        return before

    def _in_another_order(self, before: set[int]) -> bool:
        """Whether one before it fits that both have but for its order, which the prints do not tell."""
        earlier = [spot for spot in self._own.in_order_of(before) if spot < self.spot]
        alike = [(number, spot) for spot in earlier for number in self._own.looks_like(spot)]
        for number, spot in (pair for pair in alike if pair[0] in self._others.tensors):
            if fit := self._trial.fit(self._changes(number, spot, {spot: number})):
                self._in_another_order(self._fits(number, spot, fit))
                return True
        return False

    def _just_before(self, number: int, spot: int) -> list[tuple[int, int]]:
        both = ((self._others, number), (self._own, spot))
        steps = (
            {n: far for far, made in enumerate(in_steps(last, kept.lacked_whole, CLOSE)) for n in made}
            for kept, last in both
        )
        return self._pairs.just_before(*steps, JUST_BEFORE)

    def _in_turn(self, order: Sequence[tuple[int, int]], waits: float) -> Iterator[tuple[int, int]]:
        """Those just before, then these, and the soonest once no more runs are left than it ``waits`` for."""
        yield from self._next
        for pair in order:
            if self._trial.left <= waits:
                waits = -math.inf
                yield from self._pairs.soonest(SOON)
            yield pair

    def _changes(self, number: int, spot: int, partners: Mapping[int, int]) -> Iterator[Change]:
        """From then on whenever it is made, or once."""
        own, others, axes = self._own.tensors, self._others.tensors, self._others.tensors[number].dim()
        again = self._own.turns.again(spot)
        both = [(mine, [partners[s] for s in mine]) for mine in again if partners.keys() >= set(mine)]
        both += [b for b in product(again, self._others.turns.again(number)) if len(b[0]) == len(b[1])]
        for mine, theirs in (b for at, b in enumerate(both) if b not in both[:at]):
            change = {s: (own[s], others[n]) for s, n in zip(mine, theirs, strict=True)}
            if all(one.numel() == other.numel() and other.dim() == axes for one, other in change.values()):
                yield change

    def _exchanged(self, number: int, spot: int, before: Collection[int]) -> Exchanged:
        """What was made may pass through others unchanged, or be taken out of what was made.

        Of one that both have but for its order that is where it got its order, done to it besides.
        """
        own, others, values = self._own, self._others, self._own.flow.values
        theirs = others.flow.values[number]
        turned = same_numbers(values[spot].prints, theirs.prints)
        made = own.written(spot if turned else own.original[spot])
        whole = own.written(own.taken_from(made))
        whole = whole if values[whole].made_by[0] else made  # or of a weight, which nobody makes
        moved = {n for n in before if own.original[n] != n and own.original[n] in before}
        lacked = (n for n in before if n not in moved and (n == spot or not own.has_whole(n)))
        made_there = {n for n in lacked if values[n].made_by[0] and values[n].prints is not None}
        scopes = frozenset(values[n].scope for n in made_there | ({whole} - {made}))
        used = set[int]() if own.is_a_result(made) else own.users(made)
        goes_on = {values[n].scope for n in used}
        users = frozenset() if turned else frozenset(goes_on)
        besides = own.shared[made] and not (others.shared[number] and not own.seen.find_whole(theirs.prints))
        made_once = len(others.seen.find_whole(theirs.prints)) == 1  # not once more, where it is kept
        besides = besides or (made_once and own.in_another_turn(made, theirs.prints))
        scope = values[whole].scope
        inside = goes_on == {scope} and not values[whole].weight
        in_part = _agree_in_part(own.tensors[spot], others.tensors[number])
        besides = besides or turned
        return Exchanged(scope, scopes, theirs.scope, besides, users, inside, turned=turned, in_part=in_part)


def _agree_in_part(one: Tensor, other: Tensor) -> bool:
    """Whether some rows, of numbers along the last axis, agree, and others do not; of zeros nobody knows."""
    if one.dim() < 2:
        return False
    sizes = one.abs().flatten(0, -2).amax(1)
    for turned in laid(one, other):
        apart = (turned - one).abs().flatten(0, -2).amax(1)
        alike = apart <= AGREE * sizes.max()
        if bool((alike & (sizes > 0)).any()) and not bool(alike.all()):
            return True
    return False
