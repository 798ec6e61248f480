"""A module that is handed another value: all calls in it that take the value, changed together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

from torch import Tensor

from driftlab.mistakes.mutant import HANDED, Mutant
from driftlab.mistakes.mutations import last_alike
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
        self._made: set[int] = set()  # those of ``earlier``, by their ``id``
        self._moved: dict[int, Tensor] = {}  # what they are made of, if it was only moved
        self._looked_at = 0

    def see(
        self, number: int, call: Call, out: Any, entered: Sequence[Entered], earlier: Sequence[Tensor]
    ) -> None:
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

    def by(self, call: Call, entered: Sequence[Entered], earlier: Sequence[Tensor]) -> str | None:
        """The module that hands on the one value that a call takes besides weights; None of several."""
        self._made.update(map(id, earlier[self._looked_at :]))
        self._looked_at = len(earlier)
        values = [t for t in call.tensors if id(t) in self._made]
        if len(values) != 1:
            return None
        forms = set(map(id, self._forms(values[0])))
        handed = [one for one in entered if forms.isdisjoint(map(id, one.given))]
        return None if len(handed) in (0, len(entered)) else handed[-1].scope  # no module's, or its own

    def _forms(self, tensor: Tensor) -> Iterator[Tensor]:
        """A value, and what it was before it was moved."""
        yield tensor
        while (tensor := self._moved.get(id(tensor))) is not None:
            yield tensor

    def mutants(self) -> Iterator[Mutant]:
        """Of what is taken in several places, or moved; if handed on, of the outermost that takes it."""
        seen: set[tuple] = set()
        for value in self._values.values():
            taken = tuple(sorted((number, tuple(places)) for number, places in value.places.items()))
            alone = len(taken) < 2 and not value.moved
            if alone or taken in seen or lies_in(value.caller, value.scope):
                continue
            seen.add(taken)
            for other in value.others:
                change = partial(_given, value.places, other)
                words = f"what `{value.scope}` is given is another value"
                calls = frozenset(value.places)
                yield Mutant(value.caller, words, HANDED, calls, change, made_in=value.scope)


def _given(
    places: Mapping[int, list[int]],
    other: int,
    number: int,
    call: Call,
    earlier: Sequence[Tensor],
    times: float,
) -> Any:
    return call.with_tensors(lambda at, own: earlier[other] if at in places[number] else own).run()
