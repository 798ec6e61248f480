"""Two values that one module makes alike, each in the other's place: two gates, or a sine and a cosine."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from driftlab.mistakes.mutant import EXCHANGED, Mutant
from driftlab.mistakes.orders import MOVES
from driftlab.mistakes.torch_call import Call
from driftlab.tracing.scopes import Entered

# Of those that are made alike in one call of a module each is exchanged with so many that follow.
NEXT = 3
_WAVES = {"sin": torch.cos, "cos": torch.sin}


@dataclass(frozen=True)
class _Value:
    """Where it stands among all that were made, the number and the line of the call."""

    at: int
    number: int
    line: tuple


@dataclass
class _Work:
    """One call of a module: what its code makes, by what it is and its shape, and who takes that."""

    made: defaultdict[tuple, list[_Value]] = field(default_factory=lambda: defaultdict(list))
    takers: defaultdict[int, list[int]] = field(default_factory=lambda: defaultdict(list))


class ExchangedValues:
    """What each call of a module makes with its own code, or with layers of torch's."""

    def __init__(self) -> None:
        self._works: defaultdict[tuple[str, Entered | None], _Work] = defaultdict(_Work)
        self._at: dict[int, int] = {}  # where each stands, by its ``id``; they are kept in ``earlier``
        self._waves: defaultdict[tuple[str, int], dict[str, tuple[int, Tensor]]] = defaultdict(dict)

    def see(
        self,
        number: int,
        by: str,
        entered: Sequence[Entered],
        line: tuple,
        call: Call,
        out: Any,
        earlier: Sequence[Tensor],
    ) -> None:
        """``by``: the module whose code makes the call."""
        work = self._works[by, next((one for one in reversed(entered) if one.scope == by), None)]
        for tensor in call.tensors:
            if id(tensor) in self._at:
                work.takers[self._at[id(tensor)]].append(number)
        new = isinstance(out, Tensor) and out.is_floating_point() and id(out) not in self._at
        if new and call.name not in MOVES and call.tensors:
            self._at[id(out)] = len(earlier)
            work.made[call.name, tuple(out.shape)].append(_Value(len(earlier), number, line))
        if call.name in _WAVES and call.tensors:
            self._waves[by, id(call.tensors[0])][call.name] = number, call.tensors[0]

    def mutants(self, lacked: Callable[[int], bool]) -> Iterator[Mutant]:
        """Each time a module makes them.

        Args:
            lacked: whether the other network lacks what a call makes, by its number.
        """
        pairs: defaultdict[tuple, dict[int, tuple[int, int]]] = defaultdict(dict)
        for (by, _), work in self._works.items():
            for (name, _), values in work.made.items():
                for place, one in enumerate(values):
                    for other in values[place + 1 : place + 1 + NEXT]:
                        takers = _later(work, one, other) if one.line != other.line else []
                        changed = dict.fromkeys(takers, (one.at, other.at))
                        pairs[by, name, one.line, other.line].update(changed)
        for (by, name, *_), taken in pairs.items():
            if any(map(lacked, taken)):
                words = f"two of `{name}`, each in the other's place"
                yield Mutant(by, words, EXCHANGED, frozenset(taken), partial(_exchanged, taken))
        both: defaultdict[str, set[int]] = defaultdict(set)
        for (by, _), waves in self._waves.items():
            both[by].update(number for number, _ in waves.values() if len(waves) == len(_WAVES))
        for by, calls in both.items():
            if calls:
                words = "`sin` and `cos`, each in the other's place"
                yield Mutant(by, words, EXCHANGED, frozenset(calls), _other_wave)


def _later(work: _Work, one: _Value, other: _Value) -> list[int]:
    """Who takes one of two, once both are made; nobody where one of them is not taken."""
    taken = [[n for n in work.takers[value.at] if n > other.number] for value in (one, other)]
    return [*taken[0], *taken[1]] if all(taken) else []


def _exchanged(
    taken: Mapping[int, tuple[int, int]],
    number: int,
    call: Call,
    earlier: Sequence[Tensor],
    times: float,
) -> Any:
    one, other = (earlier[at] for at in taken[number])

    def instead(_: int, tensor: Tensor) -> Tensor:
        return other if tensor is one else one if tensor is other else tensor

    return call.with_tensors(instead).run()


def _other_wave(number: int, call: Call, earlier: Sequence[Tensor], times: float) -> Tensor:
    return _WAVES[call.name](call.tensors[0])
