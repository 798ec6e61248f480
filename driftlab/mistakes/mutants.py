"""Each mistake that may turn a network into another: a call of torch changed, or a weight.

Mutation operators are in ``mutations``, ``orders`` and ``weight_mutations``; here it is said where each is
worth trying, given what the other network comes by.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, zip_longest
from typing import Any

from torch import Tensor, nn

from driftlab.blame import caller, module_at_work
from driftlab.mistakes.call_modes import parts
from driftlab.mistakes.choices import Choices
from driftlab.mistakes.exchanged_values import ExchangedValues
from driftlab.mistakes.frontier import Frontier, comes_by, same_numbers
from driftlab.mistakes.gates import other_gates
from driftlab.mistakes.in_turn import in_turn
from driftlab.mistakes.mutant import FREQUENCY, GATE, MODE, NUMBER, TOGETHER, WEIGHTS, Indices, Mutant
from driftlab.mistakes.mutated import Mutated, with_another_number
from driftlab.mistakes.mutations import JOINED, SETTINGS, normed_together
from driftlab.mistakes.operands import MOVED, NEUTRAL, OPERANDS
from driftlab.mistakes.orders import MASKS, ORDERS
from driftlab.mistakes.swapped import Swapped
from driftlab.mistakes.torch_call import Call
from driftlab.mistakes.weight_mutations import (
    other_frequencies,
    other_modes,
    turned_weights,
    weight_mutations,
)
from driftlab.mistakes.whose import Whose
from driftlab.network.modules import common, only_holds
from driftlab.tracing.prints import Seen
from driftlab.tracing.scopes import Entered, Scopes
from driftlab.tracing.searching import Exchanged

FEW = (FREQUENCY, MODE)
RANKS = 3


class Mutants:
    """All that is worth trying.

    Args:
        network: the reference.
        names: of the modules that run, by their ``id``.
        scopes: which module is at work, where that is not seen, and who called it.
        seen: what the candidate comes by.
        frontier: where it stops to come by what the reference computes.
        near: the module whose calls are to be changed first.
        value: of the candidate's, which makes its results: calls are changed in the modules in which that may
            lie, and near, and in those that they call or are called by; None anywhere.

    Attributes:
        found: mutants that are tried wherever they can be.
        signs: others, of which the candidate comes by the changed result.
        unsigned: others, which are tried last.
        lines: the calls that stand on one line, by the module.
        calls, elements: that were seen, and of all their results.
    """

    def __init__(
        self,
        network: nn.Module,
        names: Mapping[int, str],
        scopes: Scopes,
        seen: Seen,
        frontier: Frontier,
        near: str,
        value: Exchanged | None = None,
    ):
        self._names, self._scopes, self._near = names, scopes, near
        self._depths = _depths(network)
        self._within = None if value is None else {near or value.scope, value.scope, *value.scopes}
        self._between = frozenset() if value is None else value.scopes
        self._nearest = (near,) if value is None else (near, value.scope)
        self._turned = value.scope if value is not None and value.turned else None
        self._seen, self._had, self._frontier = seen, frontier.had, frontier.calls()
        self._rows, self._beyond = frontier.rows, frontier.beyond()
        self.found: list[Mutant] = []
        self.signs: list[Mutant] = []
        self.unsigned: list[Mutant] = []
        self.lines: defaultdict[tuple, dict[str, set[int]]] = defaultdict(dict)
        self.calls = self.elements = 0
        self._mutated = Mutated()
        self._indices, self._swapped, self._choices = Indices(), Swapped(), Choices()
        self._exchanged = ExchangedValues()
        self._whose = Whose(network, scopes)
        self._norms: defaultdict[tuple, dict[int, Call]] = defaultdict(dict)  # by the module and the weight
        self._callers: defaultdict[str, list[Entered]] = defaultdict(list)  # of each call of a norm

    def look(self, number: int, call: Call, earlier: Sequence[Tensor]) -> Any:
        out = call.run()
        self.calls += 1
        self.elements += sum(t.numel() for t in parts(out))
        line = (*caller(), call.name)
        scope = module_at_work(self._names) or self._scopes.now
        self.lines[line].setdefault(scope, set()).add(number)
        self._indices.see(number, scope, call)
        self._whose.see(number, scope, line[:-1], call, out, earlier)
        by = self._whose.hands_on(scope)
        self._swapped.see(number, scope, by, call, out)
        self._choices.see(number, scope, call, out)
        self._exchanged.see(number, by, self._scopes.entered, line, call, out, earlier)
        kept = number in self._frontier
        if not kept and self._had.get(number) and scope != self._turned:  # the candidate's call is right
            return out
        here = Mutant(scope, "", NUMBER, frozenset({number}), line=line)
        if kept:  # who hands on another value may stand far from who takes it
            for mutant, make, made in self._mutated.of(here, MOVED, call, earlier, out):
                if comes_by(self._seen, made, self._rows):
                    self.signs.append(self._whose.of_operand(mutant, make, scope))
        concerns = self._concerns(here)
        if kept and self._frontier[number]:
            operators = (*ORDERS, *MASKS)
            self.unsigned += (m for m, *_ in self._mutated.of(here, operators, call, earlier, out))
        if not concerns:
            return out
        if call.name in JOINED:
            self._norms[scope, call.name, id((call.given() or {}).get("weight"))][number] = call
            self._callers[scope].extend(self._scopes.entered[-2:-1])
        self.found += with_another_number(here, call)
        self.found += (m for m, *_ in self._mutated.of(here, SETTINGS, call, earlier, out))
        here = replace(here, scope=self._whose.hands_on(scope), made_in=scope)
        for mutant, make, made in self._mutated.of(here, OPERANDS, call, earlier, out):
            mutant = self._whose.of_operand(mutant, make, scope)
            if kept and same_numbers(out, made):
                self.unsigned.append(mutant)
            elif comes_by(self._seen, made, self._rows):
                self.signs.append(mutant)
            elif self._steps(mutant, self._near) <= 1 or (
                number in self._beyond and mutant.at in self._between
            ):
                self.unsigned.append(mutant)
        self.unsigned += (m for m, *_ in self._mutated.of(here, NEUTRAL, call, earlier, out))
        return out

    def finish(self, twin: nn.Module, left: Mapping[str, Tensor]) -> None:
        """When all calls were seen.

        Args:
            twin: the network that runs.
            left: its buffers that a call changes, as it leaves them.
        """
        together = self._together(), self._swapped.mutants(), self._choices.mutants(), in_turn(twin)
        exchanged = self._exchanged.mutants(lambda number: self._had.get(number) is False)
        self.unsigned += chain(*together, exchanged, self._indices.mutants(), self._whose.handed())
        turned = turned_weights(twin) if self._within else ()
        for kind, changes in (
            (WEIGHTS, chain(weight_mutations(twin, left), turned)),
            (FREQUENCY, other_frequencies(twin)),
            (MODE, other_modes(twin)),
            (GATE, other_gates(twin)),
        ):
            self.unsigned += (Mutant(owner, words, kind, weights=change) for owner, words, change in changes)
        self.signs, self.unsigned = (
            [*map(self._whose.as_taken, some)] for some in (self.signs, self.unsigned)
        )
        all_calls = self._whose.all_of_a_layer(self.found, self.lines)
        self.found = [*all_calls, *map(self._whose.of_a_caller, self.found)]
        for mutants in (self.found, self.signs, self.unsigned):
            mutants.sort(key=lambda m: (self._away(m), self._is_further_on(m)))
        self.found.sort(key=lambda m: -1 if m.kind is NUMBER else SETTINGS.index(m.kind))
        self.unsigned = _in_turns([m for m in self.unsigned if self._concerns(m)])
        told = FEW if self._turned is None else (*FEW, *ORDERS)
        self.unsigned.sort(key=lambda m: m.kind not in told)

    def of_all(self, mutant: Mutant, calls: Collection[int]) -> Mutant:
        """The same of calls of several modules."""
        return self._whose.of_all(mutant, calls)

    def rank(self, mutant: Mutant) -> int:
        """0 near the module that is thought of, or who makes the value, and of a kind that has few.

        1 where the candidate stops to come by what the reference makes, 2 elsewhere.
        """
        if mutant.kind in FEW or self._away(mutant) <= 1:
            return 0
        return 1 if self._is_where_it_stops(mutant) else 2

    def _away(self, mutant: Mutant) -> int:
        return min(self._steps(mutant, module) for module in self._nearest)

    def _steps(self, mutant: Mutant, module: str) -> int:
        """How many lie between the two."""
        shared = common([mutant.at, module])
        return self._depths[mutant.at] + self._depths[module] - 2 * self._depths[shared]

    def _is_where_it_stops(self, mutant: Mutant) -> bool:
        return not mutant.calls.isdisjoint(self._frontier)

    def _concerns(self, mutant: Mutant) -> bool:
        near = self._within is None or any(self._steps(mutant, scope) <= 1 for scope in self._within)
        return near or self._is_where_it_stops(mutant)

    def _is_further_on(self, mutant: Mutant) -> bool:
        """Whether what lies between it and what the candidate comes by may be wrong as well."""
        return bool(mutant.calls) and self._beyond.isdisjoint(mutant.calls)

    def _together(self) -> Iterator[Mutant]:
        """Norms by the statistics of all calls."""
        for (scope, *_), calls in self._norms.items():
            if (made := normed_together(calls)) is not None:
                words, change = "statistics of all calls together", partial(_instead, made)
                in_one_call = len(set(self._callers[scope])) == 1
                # who parts what it is given, or nobody
                by = self._whose.hands_on(scope) if in_one_call else scope
                yield Mutant(by, words, TOGETHER, frozenset(made), change, made_in=scope)


def _depths(network: nn.Module) -> dict[str, int]:
    """In how many modules each lies; lists of modules, which have no code, are none."""
    found = {"": 0}
    for name, module in network.named_modules(remove_duplicate=False):
        if name:
            found[name] = found[name.rpartition(".")[0]] + (not only_holds(module))
    return found


def _instead(made: Mapping[int, Tensor], number: int, *others: Any) -> Tensor:
    return made[number].clone()


def _in_turns(mutants: Sequence[Mutant]) -> list[Mutant]:
    """One of each kind in turn, as long as there are any. Operands exchanged are a kind: they are few."""
    kinds: dict[Hashable, list[Mutant]] = {}
    for mutant in mutants:
        operators = next((some for some in (ORDERS, OPERANDS[1:]) if mutant.kind in some), mutant.kind)
        kinds.setdefault(operators, []).append(mutant)
    return [m for m in chain.from_iterable(zip_longest(*kinds.values())) if m is not None]
