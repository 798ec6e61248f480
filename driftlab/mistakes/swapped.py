"""Calls in the other order: a norm before an activation, not behind it; or behind a residual's sum.

And a mean, or what else makes fewer numbers of many, before some calls that it follows, or behind others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from driftlab.mistakes.call_modes import parts
from driftlab.mistakes.mutant import TOGETHER, Mutant
from driftlab.mistakes.orders import COPIES
from driftlab.mistakes.torch_call import Call
from driftlab.network.modules import common, lies_in

# So many calls at most are made before a mean, or behind it.
CALLS = 3
_SELECT = ("getitem", "select", "narrow", "split", "chunk", "index_select")


@dataclass(frozen=True)
class _Step:
    """A call that makes of its first operand another value; ``out`` keeps that one's id.

    Attributes:
        before: what made that operand.
        keeps_shape: whether it has its shape; reduces: whether it makes fewer numbers of all it is given.
    """

    number: int
    at: str
    caller: str
    name: str
    out: Tensor
    before: _Step | None
    keeps_shape: bool
    reduces: bool

    def chain(self) -> list[_Step]:
        """What lies before it, the last one first."""
        steps, step = list[_Step](), self.before
        while step is not None and len(steps) < CALLS:
            steps.append(step)
            step = step.before
        return steps


class Swapped:
    """The calls of which one goes on with what the other made."""

    def __init__(self) -> None:
        self._steps: dict[int, _Step] = {}  # by the id of what it made
        self._pairs: list[tuple[_Step, _Step]] = []  # of one shape
        self._delayed: list[list[_Step]] = []  # the first is to be made last
        self._hurried: list[list[_Step]] = []  # the last is to be made first
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
        if x is None or call.writes or not isinstance(out, Tensor) or out is x:
            return
        if call.name in COPIES:  # of what is written into later, the other order is another value
            return
        reduces = out.numel() < x.numel() and len(call.tensors) == 1 and call.name not in _SELECT
        before, same = self._steps.get(id(x)), out.shape == x.shape
        step = self._steps[id(out)] = _Step(number, at, caller, call.name, out, before, same, reduces)
        for operand in call.tensors if call.name == "add" else (x,):
            one = self._steps.get(id(operand))
            if one is not None and one.keeps_shape and same and one.name != call.name:
                self._pairs.append((one, step))
        self._see_chain(step)

    def _see_chain(self, step: _Step) -> None:
        chain = step.chain()
        for length, first in enumerate(chain, 1):
            steps = [*reversed(chain[:length]), step]
            of_one_shape = length > 1 and all(one.keeps_shape for one in steps)
            if first.reduces or of_one_shape:
                self._delayed.append(steps)
            if step.reduces or of_one_shape:
                self._hurried.append(steps)

    def mutants(self) -> Iterator[Mutant]:
        """Each time a module does so, and once."""
        alike: defaultdict[tuple, list[tuple[_Step, _Step]]] = defaultdict(list)
        for first, then in self._pairs:
            alike[first.at, then.at, first.name, then.name].append((first, then))
        for pairs in alike.values():
            yield from (_both_ways(some) for some in (pairs, *([pair] for pair in pairs if len(pairs) > 1)))
        for first, *rest in self._delayed:
            yield _moved([first], rest[-1], f"`{first.name}` behind {_said(rest)}, not before")
        for *rest, last in self._hurried:
            yield _moved(rest, last, f"`{last.name}` before {_said(rest)}, not behind")
        for number, scope, place, module in self._summed:
            words, kept = f"`{module.rpartition('.')[2]}` behind `add`, not before it", dict[str, Any]()
            change, watched = partial(_of_the_sum, kept, place), partial(_kept, kept, module)
            yield Mutant(scope, words, TOGETHER, frozenset({number}), change, weights=watched, made_in=module)


def _both_ways(pairs: list[tuple[_Step, _Step]]) -> Mutant:
    first, then = pairs[0]
    words = f"`{first.name}` behind `{then.name}`, not before it"
    before = {last.number: [one.number] for one, last in pairs}
    scope, calls = common([first.caller, then.caller]), frozenset({*before, *(n for (n,) in before.values())})
    return Mutant(scope, words, TOGETHER, calls, partial(_swapped, before, {}), made_in=first.at)


def _moved(steps: list[_Step], last: _Step, words: str) -> Mutant:
    """Steps that are made behind another."""
    numbers = [step.number for step in steps]
    scope, calls = common([step.caller for step in (*steps, last)]), frozenset({*numbers, last.number})
    change = partial(_swapped, {last.number: numbers}, {})
    return Mutant(scope, words, TOGETHER, calls, change, made_in=steps[0].at)


def _said(steps: list[_Step]) -> str:
    return ", ".join(f"`{step.name}`" for step in steps)


def _swapped(
    before: Mapping[int, Sequence[int]], kept: dict[int, Call], number: int, call: Call, *others: Any
) -> Any:
    """``before``: by the number of the last call those of the ones that are made behind it."""
    if number not in before:
        kept[number] = call
        return call.tensors[call.goes_on_with or 0]
    out = call.run()
    for one in map(kept.__getitem__, before[number]):
        out = one.with_tensor(one.goes_on_with or 0, out).run()
    return out


def _kept(kept: dict[str, Any], name: str, network: nn.Module) -> None:
    """The module, and what it is given last."""
    kept["module"] = network.get_submodule(name)
    kept["module"].register_forward_pre_hook(lambda _, given: kept.update(given=given[0]))


def _of_the_sum(kept: dict[str, Any], place: int, number: int, call: Call, *others: Any) -> Any:
    return kept["module"](call.with_tensor(place, kept["given"]).run())
