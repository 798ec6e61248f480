"""The reference once more with a mistake in one of its calls: which mistake makes the candidate of it?

Mutation-based fault localization (Papadakis and Le Traon, Metallaxis-FL, 2015; Moon et al., MUSE, 2014) the
other way round. There a faulty program is changed until its tests pass, here a right one until it gives what
the faulty one does. Results that agree to the last digits are not brought about by another mistake, so where
the changed call stands is where the mistake is, in whatever form the candidate was written.

Of most changes a mutant is run only where the candidate comes by the changed result and not by the right one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from driftlab.arithmetic.accused import Accused
from driftlab.arithmetic.anew import Anew
from driftlab.arithmetic.call_modes import Calls, Change, floating, parts
from driftlab.arithmetic.difference import distance, finite_norm
from driftlab.arithmetic.explanations import spelled
from driftlab.arithmetic.flow import Flow, Scopes
from driftlab.arithmetic.mutations import OPERANDS, SETTINGS, Operator, mutations, numbered
from driftlab.arithmetic.passes import in_arithmetic
from driftlab.arithmetic.prints import AGREE, Seen, prints
from driftlab.arithmetic.torch_call import Call
from driftlab.arithmetic.tracing import results_of
from driftlab.blame import caller, module_at_work
from driftlab.network.calling import copied
from driftlab.network.compiled import eager
from driftlab.network.modules import is_torchs
from driftlab.rounding import HALFWAY_BITS

# Runs of the reference at most, fewer of one that computes many numbers; of which so many to find one number.
RUNS, ELEMENTS, STEPS = 400, 1e8, 10
# Changed calls that are looked for among the candidate's values.
LOOKED_AT = 10_000

Results = dict[str, Tensor]


@dataclass(frozen=True)
class Mutant:
    """Calls changed in one way.

    Attributes:
        scope: the module in which the first stands.
        words: what was changed.
        calls: their numbers.
        operator: of which the change is one; None for another number, which is to be found.
        which: the number of the change among its.
        line: of code, and the place in it, where they stand.
    """

    scope: str
    words: str
    calls: frozenset[int]
    operator: Operator | None
    which: int
    line: tuple = ()

    def change(self, call: Call, earlier: Sequence[Tensor], times: float) -> Any:
        if self.operator is None:
            return numbered(call)(times)
        made = (make for _, make in mutations(call, earlier, self.operator))
        return next((make for i, make in enumerate(made) if i == self.which), call.run)()


def fitting(cases: Sequence[Accused], candidate: Flow) -> list[Mutant]:
    """The changes of the reference that make the candidate's results of it, of the first kind that has any.

    Args:
        cases: all quantities of the pass, a wrong one first.
        candidate: the flow of its values.
    """
    mutants = _Mutants(cases, candidate)
    return mutants.fitting(mutants.found) or mutants.fitting(mutants.signs)


class _Mutants:
    """Attributes:
    found: those that are tried wherever they can be.
    signs: others, of which the candidate comes by the changed result.
    """

    def __init__(self, cases: Sequence[Accused], candidate: Flow):
        self._cases, first = cases, cases[0]
        self._network = copied(first.reference)
        self._earlier: list[Tensor] = []
        self._scopes = Scopes(self._network, self._entered)
        twin = in_arithmetic(self._network, first.arithmetic)
        self._names = {id(module): name for name, module in twin.named_modules()}
        self._twin = Anew(twin)
        self.found: list[Mutant] = []
        self.signs: list[Mutant] = []
        self._lines: dict[tuple, set[int]] = {}
        self._elements = self._looked_at = 0
        as_it_is = self._results(lambda number, call, earlier: call.run())
        if all(_same(case, case.mine, as_it_is) for case in cases):  # else it does not repeat itself
            self._results(self._looking(candidate.seen()))
        self.found.sort(key=lambda m: SETTINGS.index(m.operator) if m.operator else -1)
        self._runs = min(RUNS, ELEMENTS / max(1, self._elements))

    def fitting(self, mutants: Sequence[Mutant]) -> list[Mutant]:
        """Those that fit, alone or at every call on their line; of the first operator that has any."""
        found: list[Mutant] = []
        for one in (one for mutant in mutants for one in self._alike(mutant)):
            if self._runs <= 0 or (found and one.operator is not found[0].operator):
                break
            found += filter(None, [self._fit(one)])
        return found

    def _alike(self, mutant: Mutant) -> Iterator[Mutant]:
        yield mutant
        calls = self._lines[mutant.line]
        if len(calls) > 1 and min(calls) in mutant.calls:
            yield replace(mutant, words=f"{mutant.words}, each time", calls=frozenset(calls))

    def _entered(self, tensors: object, scope: str) -> None:
        if not self._scopes.inside:
            self._earlier += floating(pytree.tree_leaves(tensors))

    def _looking(self, seen: Seen) -> Change:
        """Finds the mutants."""

        def look(number: int, call: Call, earlier: Sequence[Tensor]) -> Any:
            out = call.run()
            self._elements += sum(t.numel() for t in parts(out))
            line = (*caller(), call.name)
            self._lines.setdefault(line, set()).add(number)
            if _has(seen, out):  # the candidate's call is right
                return out
            scope = module_at_work(self._names) or self._scopes.now
            here = Mutant(scope, "", frozenset({number}), None, 0, line)
            if numbered(call):
                self.found.append(replace(here, words=f"the number in `{call.name}`"))
            self.found += (m for m, _ in self._made(here, SETTINGS, call, earlier, out))
            here = replace(here, scope=self._handed_by(scope))
            signs = self._made(here, OPERANDS, call, earlier, out)
            self.signs += (m for m, made in signs if _has(seen, made))
            return out

        return look

    def _handed_by(self, scope: str) -> str:
        """The module whose code hands on what is taken there."""
        return scope.rpartition(".")[0] if is_torchs(self._network.get_submodule(scope)) else scope

    def _made(
        self, here: Mutant, operators: Sequence[Operator], call: Call, earlier: Sequence[Tensor], out: Any
    ) -> Iterator[tuple[Mutant, Any]]:
        """With their results, which have the right one's shape."""
        shapes = [t.shape for t in parts(out)]
        with torch.no_grad():
            for operator in operators:
                for which, (words, make) in enumerate(mutations(call, earlier, operator)):
                    self._looked_at += 1
                    if self._looked_at > LOOKED_AT:
                        return
                    try:
                        made = make()
                    except Exception:  # it takes no such argument
                        continue
                    if [t.shape for t in parts(made)] == shapes:
                        yield replace(here, words=words, operator=operator, which=which), made

    def _fit(self, mutant: Mutant) -> Mutant | None:
        """The mutant, if it fits; with its number, which is found by the secant method."""
        if mutant.operator is not None:
            return mutant if self._agrees(self._changed(mutant, 1.0)) else None
        if self._agrees(self._changed(mutant, 0.0)):
            return replace(mutant, words=f"0 times {mutant.words}")
        tried, times = [(1.0, -1.0)], 1.01
        for _ in range(STEPS):
            results = self._changed(mutant, times)
            if (way := self._way(results)) is None:
                return None
            tried.append((times, way))
            better = _secant(*tried[-2:])
            if self._agrees(results):
                times = better or times
                return replace(mutant, words=f"{spelled(times) or f'{times:.6g}'} times {mutant.words}")
            if better is None:
                return None
            times = better
        return None

    def _way(self, results: Results) -> float | None:
        """How far from the reference's result, -1, to the candidate's, 0."""
        case = self._cases[0]
        found, apart = results.get(case.difference.name), case.theirs - case.mine
        if found is None or found.shape != apart.shape:
            return None
        way = float(((found - case.mine) * apart).sum() / (apart * apart).sum()) - 1
        return way if math.isfinite(way) else None

    def _agrees(self, results: Results) -> bool:
        """In every quantity, but for rounding, which leaves next to nothing of the difference."""
        if not all(_same(case, case.theirs, results) for case in self._cases):
            return False
        first = self._cases[0]
        return distance(first.theirs, results[first.difference.name]) * HALFWAY_BITS <= first.apart

    def _changed(self, mutant: Mutant, times: float) -> Results:
        def change(number: int, call: Call, earlier: Sequence[Tensor]) -> Any:
            return mutant.change(call, earlier, times) if number in mutant.calls else call.run()

        self._runs -= 1
        try:
            return self._results(change)
        except Exception:  # it does not run so, wherever that shows
            return {}

    def _results(self, change: Change) -> Results:
        first, twin = self._cases[0], self._twin.begun()
        pass_ = first.difference.pass_
        self._scopes.begin()
        with eager():
            if pass_ == "eval":  # what is evaluated has been trained on the batch
                results_of(twin, first.call, first.arithmetic, "forward", first.seed)
            self._earlier.clear()
            with Calls(self._scopes, self._earlier, change):
                return results_of(twin, first.call, first.arithmetic, pass_, first.seed)


def _same(case: Accused, wanted: Tensor, results: Results) -> bool:
    found = results.get(case.difference.name)
    if found is None or found.shape != wanted.shape:
        return False
    return distance(wanted, found) <= max(case.rounding, AGREE * finite_norm(wanted))


def _secant(*tried: tuple[float, float]) -> float | None:
    (one, at_one), (two, at_two) = tried
    if at_one == at_two:
        return None
    new = two - at_two * (two - one) / (at_two - at_one)
    return new if abs(new) < 1e4 and new != two else None


def _has(seen: Seen, values: Any) -> bool | None:
    """Whether all of them were come by; None of what holds no floating numbers."""
    found = [p for t in parts(values) if (p := prints(t)) is not None]
    return all(seen.find(p.whole) for p in found) if found else None
