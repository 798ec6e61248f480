"""A module that is handed another value: all calls in it that take the value, changed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from driftlab.mistakes.mutant import HANDED, Mutant
from driftlab.mistakes.operands import Another, last_alike
from driftlab.mistakes.orders import MOVES
from driftlab.mistakes.torch_call import Call
from driftlab.network.modules import lies_in
from driftlab.tracing.scopes import Entered


@dataclass
class _Value:
    """One that a call of a module is given.

    Attributes:
        scope: of the module.
        caller: who calls it.
        others: of its shape, made before it is taken: their places among all values that were made.
        places: in which it is taken, by the number of the call.
        moved: whether a call takes it that only moves it, which is not changed by itself.
    """

    scope: str
    caller: str
    others: list[int]
    places: dict[int, list[int]] = field(default_factory=dict)
    moved: bool = False


class Handed:
    """What modules are given, and where in them it is taken."""

    def __init__(self) -> None:
        self._values: dict[tuple[Entered, int], _Value] = {}
        self._made: dict[int, int] = {}  # where each of ``earlier`` stands, by its ``id``
        self._begun: dict[Entered, int] = {}  # how many were made when a module was entered
        self._parts: defaultdict[str, list[Entered]] = defaultdict(list)  # that it called, by the module
        self._moved: dict[int, Tensor] = {}  # what they are made of, if it was only moved
        self._at_hand: defaultdict[str, set[int]] = defaultdict(set)  # the places of what is, by the module
        self._hands: dict[str, set[int]] = {}  # and of what it gets, once all calls were seen

    def see(
        self, number: int, call: Call, out: Any, entered: Sequence[Entered], earlier: Sequence[Tensor]
    ) -> None:
        self._made |= {id(earlier[at]): at for at in range(len(self._made), len(earlier))}
        self._has_at_hand(entered[-1].scope if entered else "", call.tensors)
        for at, one in enumerate(entered):
            if one not in self._begun:
                self._begun[one] = len(earlier)
                self._parts[entered[at - 1].scope if at else ""].append(one)
                for module in entered[max(0, at - 1) : at + 1]:
                    self._has_at_hand(module.scope, one.given)
        if call.name in MOVES and call.tensors and out is not call.tensors[0] and out.is_floating_point():
            self._moved[id(out)] = call.tensors[0]  # alive in ``earlier``, so that nobody else gets its id
        taken: defaultdict[int, list[int]] = defaultdict(list)
        for place, tensor in enumerate(call.tensors):
            if tensor.is_floating_point():
                taken[id(tensor)].append(place)
        for caller, one in pairwise(entered):
            for at, tensor in enumerate(one.given):
                if places := taken.get(id(tensor)):
                    if (one, at) not in self._values:
                        others = last_alike(tensor, earlier)
                        self._values[one, at] = _Value(one.scope, caller.scope, others)
                    self._values[one, at].places[number] = places
                    self._values[one, at].moved |= call.name in MOVES

    def _has_at_hand(self, scope: str, tensors: Sequence[Tensor]) -> None:
        self._at_hand[scope].update(self._made[id(t)] for t in tensors if id(t) in self._made)

    def is_at_hand(self, scope: str, value: Tensor) -> bool:
        """Whether a module takes it itself, hands it on, or gets it; asked when all calls were seen."""
        return self._made.get(id(value)) in self._hand_of(scope)

    def _hand_of(self, scope: str) -> set[int]:
        if scope not in self._hands:
            gets = (self._made.get(id(t)) for one in self._parts[scope] for t in one.gave)
            self._hands[scope] = self._at_hand[scope].union(at for at in gets if at is not None)
        return self._hands[scope]

    def by(self, another: Another, entered: Sequence[Entered]) -> tuple[str | None, str | None]:
        """The module that hands on the value that another stands for, and one further in that has both.

        Of a call that takes several values who has both mistook the one for the other; but not a module that
        is given both.
        """
        own = another.own
        if id(own) not in self._made:
            return None, None
        handed = [at for at, one in enumerate(entered) if not self._is_given(one, own)]
        if len(handed) in (0, len(entered)):  # no module's, or its own
            return None, None
        have_both = [one for one in entered[handed[-1] + 1 :] if self._has(one, another.value)]
        has_both = have_both[0].scope if have_both else None
        if has_both is None or sum(id(t) in self._made for t in another.call.tensors) == 1:
            return entered[handed[-1]].scope, has_both
        made_one = (one.scope for one in reversed(have_both) if not self._is_given(one, another.value))
        return next(made_one, None), has_both

    def goes_on_with(self, number: int, place: int, by: str) -> str | None:
        """The module that a call's operand is handed to ``by`` another, if other calls in it take it as well.

        These go on with the right value, so that it was handed on; unless it was, as two arguments, twice.
        Asked when all calls were seen.
        """
        given = [v for v in self._values.values() if v.caller == by and place in v.places.get(number, ())]
        return given[0].scope if len(given) == 1 and len(given[0].places) > 1 else None

    def _has(self, one: Entered, value: Tensor) -> bool:
        """Whether a module was given a value, or made it."""
        return self._is_given(one, value) or self._made.get(id(value), -1) >= self._begun[one]

    def _is_given(self, one: Entered, value: Tensor) -> bool:
        return not set(map(id, self._forms(value))).isdisjoint(map(id, one.given))

    def _forms(self, tensor: Tensor) -> Iterator[Tensor]:
        """A value, and what it was before it was moved."""
        yield tensor
        while (tensor := self._moved.get(id(tensor))) is not None:
            yield tensor

    def mutants(self) -> Iterator[Mutant]:
        """Of what is taken in several places, or moved; if handed on, of the outermost that takes it.

        Its caller has the other at hand: it takes it, or hands it on.
        """
        seen: set[tuple] = set()
        for value in self._values.values():
            taken = tuple(sorted((number, tuple(places)) for number, places in value.places.items()))
            alone = len(taken) < 2 and not value.moved
            if alone or taken in seen or lies_in(value.caller, value.scope):
                continue
            seen.add(taken)
            hand = self._hand_of(value.caller)
            for other in filter(hand.__contains__, value.others):
                change = partial(_given, value.places, other)
                words = f"what `{value.scope}` is given is another value"
                calls = frozenset(value.places)
                has_both = value.scope if other in self._at_hand[value.scope] else None
                given = Mutant(value.caller, words, HANDED, calls, change, made_in=value.scope)
                yield replace(given, has_both=has_both)


def _given(
    places: Mapping[int, list[int]],
    other: int,
    number: int,
    call: Call,
    earlier: Sequence[Tensor],
    times: float,
) -> Any:
    return call.with_tensors(lambda at, own: earlier[other] if at in places[number] else own).run()
