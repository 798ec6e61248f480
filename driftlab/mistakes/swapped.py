"""Two calls in the other order: a norm before an activation, not behind it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from driftlab.mistakes.mutant import TOGETHER, Mutant
from driftlab.mistakes.orders import COPIES
from driftlab.mistakes.torch_call import Call
from driftlab.network.modules import common


@dataclass(frozen=True)
class _Step:
    """A call that makes of its first operand something of the same shape; ``out`` keeps that one's id."""

    number: int
    at: str
    caller: str
    name: str
    out: Tensor


class Swapped:
    """The calls of which one goes on with what the other made, and nothing changes its shape."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}  # by the id of what it made
        self._pairs: list[tuple[_Step, _Step]] = []

    def see(self, number: int, at: str, caller: str, call: Call, out: Any) -> None:
        """``caller``: who calls what is called there."""
        x = call.tensors[0] if call.tensors else None
        if x is None or call.writes or not isinstance(out, Tensor) or out is x or out.shape != x.shape:
            return
        if call.name in COPIES:  # of what is written into later, the other order is another value
            return
        step = self._steps[id(out)] = _Step(number, at, caller, call.name, out)
        if (before := self._steps.get(id(x))) is not None and before.name != call.name:
            self._pairs.append((before, step))

    def mutants(self) -> Iterator[Mutant]:
        for first, then in self._pairs:
            words = f"`{first.name}` behind `{then.name}`, not before it"
            change = partial(_swapped, first.number, {})
            scope, calls = common([first.caller, then.caller]), frozenset({first.number, then.number})
            yield Mutant(scope, words, TOGETHER, calls, change, made_in=first.at)


def _swapped(first: int, kept: dict[str, Call], number: int, call: Call, *others: Any) -> Any:
    if number == first:
        kept["first"] = call
        return call.tensors[0]
    return kept["first"].with_tensor(0, call.run()).run()
