"""A mistake that may turn a network into another, and integers of one use that stand in another's place."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from driftlab.mistakes.mutations import checks_integers
from driftlab.mistakes.torch_call import Call
from driftlab.network.modules import lies_in

NUMBER, WEIGHTS, TOGETHER, INDEX, HANDED = "another number", "weights", "together", "index", "handed"
FREQUENCY, MODE, GATE = "another frequency", "the other mode", "another gate"
EXCHANGED = "exchanged"

# So many tensors of integers are told apart: a loop may make new ones without end.
MOST = 32

# The number of a call, itself, what was made before it, and the number that is to be found; gives the result.
Made = Callable[[int, Call, Sequence[Tensor], float], Any]


def _as_it_is(number: int, call: Call, earlier: Sequence[Tensor], times: float) -> Any:
    return call.run()


def _as_they_are(network: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Mutant:
    """Calls, or weights, changed in one way.

    Attributes:
        scope: the module in which the mistake is: where the first stands, or who hands on what it is given,
            or who owns the weights.
        words: what was changed.
        kind: the operator of which the change is one, or another kind of change.
        calls: their numbers.
        change: what is made of each in its place.
        line: of code, and the place in it, where they stand.
        weights: changes them, in the network that it is given.
        made_in: the module in which the first call is made, where that is another.
        which: of the changes of a call that have these words.
        has_both: a module inside of ``scope`` that has the value that is handed to it, and the other as well.
        spelled: whether the number that was found is one that people write down.
    """

    scope: str
    words: str
    kind: Hashable
    calls: frozenset[int] = frozenset()
    change: Made = _as_it_is
    line: tuple = ()
    weights: Callable[[nn.Module], None] = _as_they_are
    made_in: str | None = None
    which: int = 0
    has_both: str | None = None
    spelled: bool = False

    @property
    def at(self) -> str:
        """The module in which the first call is made."""
        return self.scope if self.made_in is None else self.made_in

    @property
    def said(self) -> str:
        several = len(self.calls) > 1 and self.kind not in (TOGETHER, INDEX, HANDED, EXCHANGED)
        return f"{self.words}, each time" if several else self.words


@dataclass
class _Index:
    values: Tensor
    calls: dict[str, set[int]] = field(default_factory=lambda: defaultdict(set))  # by the module

    def within(self, scope: str) -> frozenset[int]:
        return frozenset(n for own, calls in self.calls.items() if lies_in(own, scope) for n in calls)


class Indices:
    """Integers, by which a network looks up, gathers or compares: edges from and to, positions, owners."""

    def __init__(self) -> None:
        self._seen: list[_Index] = []

    def see(self, number: int, scope: str, call: Call) -> None:
        for tensor in call.tensors if checks_integers(call) else ():
            if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel() > 1:
                alike = next((i for i in self._seen if _equal(i.values, tensor)), None)
                if alike is None and len(self._seen) == MOST:
                    continue
                if alike is None:
                    self._seen.append(alike := _Index(tensor.clone()))
                alike.calls[scope].add(number)

    def mutants(self) -> Iterator[Mutant]:
        """In a module, others of one shape for some; the module around it where only that has the others."""
        scopes = {scope for index in self._seen for scope in index.calls}
        for scope in sorted(scopes, key=lambda s: -s.count(".")):
            parent = scope.rpartition(".")[0]
            for one in self._seen:
                for other in self._seen if (calls := one.within(scope)) else ():
                    alike = other is not one and _alike(one.values, other.values)
                    if alike and other.within(parent):
                        place = scope if other.within(scope) else parent
                        change = partial(_looked_up, one.values, other.values)
                        words = f"integers {_shown(other.values)} for {_shown(one.values)}"
                        yield Mutant(place, words, INDEX, calls, change)


def _shown(values: Tensor) -> str:
    first = values.flatten()[:4].tolist()
    return f"[{', '.join(map(str, first))}{', ...' if values.numel() > 4 else ''}]"


def _alike(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype is other.dtype


def _equal(one: Tensor, other: Tensor) -> bool:
    return _alike(one, other) and torch.equal(one, other)


def _looked_up(
    own: Tensor, others: Tensor, number: int, call: Call, earlier: Sequence[Tensor], times: float
) -> Any:
    return call.with_tensors(lambda place, tensor: others if _equal(tensor, own) else tensor).run()
