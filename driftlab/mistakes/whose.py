"""Whose affair a changed call is: the module's that makes it, its caller's, or who owns the weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from driftlab.mistakes.call_modes import floating, parts
from driftlab.mistakes.frontier import TAKES
from driftlab.mistakes.handed import Handed
from driftlab.mistakes.mutant import HANDED, Mutant
from driftlab.mistakes.mutations import INDICES
from driftlab.mistakes.operands import ACTIVATED, TURNED, Another, Given
from driftlab.mistakes.orders import ORDERS
from driftlab.mistakes.torch_call import Call
from driftlab.network.modules import calls_in_turn, common, is_torchs, lies_in
from driftlab.tracing.scopes import Scopes


class Whose:
    """
    Args:
        network: the reference.
        scopes: who is at work, and who called it.
    """

    def __init__(self, network: nn.Module, scopes: Scopes):
        self._network, self._scopes, self._handed = network, scopes, Handed()
        self._lines_of: defaultdict[str, set[tuple]] = defaultdict(set)  # by the module
        self._another: dict[Mutant, Another] = {}  # of an operand
        self._taken: dict[int, set[int]] = {}  # by the number of a call, the ids of what it takes
        self._made_by: dict[int, str] = {}  # by the id of a value, the module
        # a recurrent layer, by the number of a call that takes one direction of it, and by the id of that
        self._directions: dict[int, str] = {}

    def see(
        self, number: int, scope: str, line: tuple, call: Call, out: Any, earlier: Sequence[Tensor]
    ) -> None:
        self._lines_of[scope].add(line)
        self._taken[number] = set(map(id, floating(call.tensors)))  # alive in ``earlier``
        maker = self._made_by.get(id(call.tensors[0])) if call.name in TAKES and call.tensors else None
        if maker and isinstance(self._network.get_submodule(maker), nn.RNNBase):
            self._directions |= dict.fromkeys((number, *map(id, floating(parts(out)))), maker)
        self._made_by |= dict.fromkeys(map(id, floating(parts(out))), scope)
        self._handed.see(number, call, out, self._scopes.entered, earlier)

    def hands_on(self, scope: str) -> str:
        """The module whose code hands on what is taken there; of parts called in turn nobody's, so itself."""
        caller = scope.rpartition(".")[0]
        in_turn = calls_in_turn(self._network.get_submodule(caller))
        return caller if is_torchs(self._network.get_submodule(scope)) and not in_turn else scope

    def of_operand(self, mutant: Mutant, make: Callable[[], Any], scope: str) -> Mutant:
        """The mutant of a call at work now, by who is to blame for what it is given.

        Args:
            make: makes its result.
            scope: the module that makes the call.
        """
        if not isinstance(make, Given):
            return mutant
        if isinstance(make.own, nn.Parameter):
            return replace(mutant, scope=scope, made_in=None)
        if mutant.kind is TURNED and (layer := self._directions.get(id(make.own))):
            return replace(mutant, scope=layer)
        if isinstance(make, Another):
            by, has_both = self._handed.by(make, self._scopes.entered)
            mutant = replace(mutant, scope=mutant.scope if by is None else by, has_both=has_both)
            self._another[mutant] = make
        elif mutant.kind is ACTIVATED:
            mutant = replace(mutant, scope=self._caller_that_gives(make.own) or mutant.scope)
        return mutant

    def _caller_that_gives(self, value: Tensor) -> str | None:
        """To the module at work, or who made it of those called in turn; None of what that has made."""
        *_, caller, own = [None, None, *self._scopes.entered]
        if caller is None or own is None or not any(value is t for t in own.given):
            return None
        in_turn = calls_in_turn(self._network.get_submodule(caller.scope))
        return (in_turn and self._part_that_made(value, caller.scope)) or caller.scope

    def _part_that_made(self, value: Tensor, module: str) -> str | None:
        """The part of a module that gave it."""
        maker, inside = self._made_by.get(id(value), ""), f"{module}." if module else ""
        if maker == module or not lies_in(maker, module):
            return None
        return inside + maker.removeprefix(inside).partition(".")[0]

    def of_all(self, mutant: Mutant, calls: Collection[int]) -> Mutant:
        """The same of calls of several modules: who made what they all take, if that is one value."""
        taken = set.intersection(*map(self._taken.__getitem__, calls))
        makers = {self._made_by[one] for one in taken if one in self._made_by}
        one = replace(mutant, calls=frozenset(calls))
        return replace(one, scope=makers.pop(), made_in=mutant.at) if len(makers) == 1 else one

    def handed(self) -> Iterator[Mutant]:
        """Modules that are handed another value."""
        return self._handed.mutants()

    def as_taken(self, mutant: Mutant) -> Mutant:
        """The same; of one operand of several that take a value its module's, and not of who hands it on.

        Nor of a loop's that hands both to each of its layers, nor of one that gets but the one to hand on.
        One direction of a recurrent layer that is turned is that layer's, which turns it back itself.
        """
        if mutant.kind in ORDERS and (layers := {self._directions.get(n) for n in mutant.calls} - {None}):
            return replace(mutant, scope=layers.pop(), made_in=mutant.at)
        if mutant.kind == HANDED and mutant.has_both and self._is_in_a_list(mutant.at):
            return replace(mutant, scope=mutant.at)
        if (make := self._another.get(mutant)) is None:
            return mutant
        taker = self._handed.goes_on_with(min(mutant.calls), make.place, mutant.scope)
        whose = self._made_both(mutant.scope, make) if taker is None else taker
        return mutant if whose is None else replace(mutant, scope=whose)

    def _made_both(self, by: str, another: Another) -> str | None:
        """The module further in that gave the one value to who hands it on, and kept the other."""
        if self._handed.is_at_hand(by, another.value):
            return None
        within = common(self._made_by.get(id(value), "") for value in (another.own, another.value))
        return within if lies_in(within, by) and within != by else None

    def _is_in_a_list(self, scope: str) -> bool:
        return isinstance(self._network.get_submodule(scope.rpartition(".")[0]), nn.ModuleList)

    def all_of_a_layer(
        self, mutants: Sequence[Mutant], lines: Mapping[tuple, Mapping[str, set[int]]]
    ) -> Iterator[Mutant]:
        """Of torch's, which is called from several lines: all of its calls."""
        known = set()
        for mutant in mutants:
            key = mutant.scope, mutant.words, mutant.which
            several = len(self._lines_of[mutant.scope]) > 1 and mutant.made_in is None
            if several and key not in known and is_torchs(self._network.get_submodule(mutant.scope)):
                known.add(key)
                alike = (m for line, m in lines.items() if line[-1:] == mutant.line[-1:])
                calls = frozenset[int]().union(*(modules.get(mutant.scope, ()) for modules in alike))
                yield replace(mutant, calls=calls, line=())

    def of_a_caller(self, mutant: Mutant) -> Mutant:
        """The same; its caller's, if torch's layer is given an index, or is called from several lines."""
        called_once = len(self._lines_of[mutant.scope]) < 2
        if mutant.made_in is not None or (called_once and mutant.kind is not INDICES):
            return mutant
        return replace(mutant, scope=self.hands_on(mutant.scope), made_in=mutant.scope)
