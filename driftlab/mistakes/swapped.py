"""Two calls in the other order: a norm before an activation, not behind it; or behind a residual's sum."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from driftlab.mistakes.call_modes import parts
from driftlab.mistakes.mutant import TOGETHER, Mutant
from driftlab.mistakes.orders import COPIES
from driftlab.mistakes.torch_call import Call
from driftlab.network.modules import common, lies_in


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
        self._made_in: dict[int, str] = {}  # by the id of what was made there
        self._summed: list[tuple[int, str, int, str]] = []

    def see(self, number: int, at: str, caller: str, call: Call, out: Any) -> None:
        """``caller``: who calls what is called there."""
        if call.name == "add":
            made_in = [self._made_in.get(id(term), at) for term in call.tensors]
            inner = [(i, m) for i, m in enumerate(made_in) if m != at and lies_in(m, at)]
            self._summed += ((number, at, place, module) for place, module in inner)
        self._made_in |= {id(t): at for t in parts(out)}
        x = None if call.goes_on_with is None else call.tensors[call.goes_on_with]
        if x is None or call.writes or not isinstance(out, Tensor) or out is x or out.shape != x.shape:
            return
        if call.name in COPIES:  # of what is written into later, the other order is another value
            return
        step = self._steps[id(out)] = _Step(number, at, caller, call.name, out)
        for operand in call.tensors if call.name == "add" else (x,):
            if (before := self._steps.get(id(operand))) is not None and before.name != call.name:
                self._pairs.append((before, step))

    def mutants(self) -> Iterator[Mutant]:
        """Each time a module does so, and once."""
        alike: defaultdict[tuple, list[tuple[_Step, _Step]]] = defaultdict(list)
        for first, then in self._pairs:
            alike[first.at, then.at, first.name, then.name].append((first, then))
        for pairs in alike.values():
            yield from (_both_ways(some) for some in (pairs, *([pair] for pair in pairs if len(pairs) > 1)))
        for number, scope, place, module in self._summed:
            words, kept = f"`{module.rpartition('.')[2]}` behind `add`, not before it", dict[str, Any]()
            change, watched = partial(_of_the_sum, kept, place), partial(_kept, kept, module)
            yield Mutant(scope, words, TOGETHER, frozenset({number}), change, weights=watched, made_in=module)


def _both_ways(pairs: list[tuple[_Step, _Step]]) -> Mutant:
    first, then = pairs[0]
    words = f"`{first.name}` behind `{then.name}`, not before it"
    before = {last.number: one.number for one, last in pairs}
    scope, calls = common([first.caller, then.caller]), frozenset({*before, *before.values()})
    return Mutant(scope, words, TOGETHER, calls, partial(_swapped, before, {}), made_in=first.at)


def _swapped(before: Mapping[int, int], kept: dict[int, Call], number: int, call: Call, *others: Any) -> Any:
    """``before``: by the number of the second call that of the first."""
    if number not in before:
        kept[number] = call
        return call.tensors[call.goes_on_with or 0]
    first = kept[before[number]]
    return first.with_tensor(first.goes_on_with or 0, call.run()).run()


def _kept(kept: dict[str, Any], name: str, network: nn.Module) -> None:
    """The module, and what it is given last."""
    kept["module"] = network.get_submodule(name)
    kept["module"].register_forward_pre_hook(lambda _, given: kept.update(given=given[0]))


def _of_the_sum(kept: dict[str, Any], place: int, number: int, call: Call, *others: Any) -> Any:
    return kept["module"](call.with_tensor(place, kept["given"]).run())
