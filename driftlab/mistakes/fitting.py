"""The reference once more with a mistake in one of its calls: which mistake makes the candidate of it?

Mutation-based fault localization (Papadakis and Le Traon, Metallaxis-FL, 2015; Moon et al., MUSE, 2014) the
other way round. There a faulty program is changed until its tests pass, here a right one until it gives what
the faulty one does. Results that agree to the last digits are not brought about by another mistake, so where
the changed call stands is where the mistake is, in whatever form the candidate was written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from driftlab.arithmetic.anew import Anew
from driftlab.arithmetic.draws import Draws
from driftlab.arithmetic.shadow import held
from driftlab.mistakes.accused import Accused, are_theirs
from driftlab.mistakes.call_modes import Calls, Change, floating
from driftlab.mistakes.explanations import spelled
from driftlab.mistakes.frontier import Frontier
from driftlab.mistakes.mutant import NUMBER, Mutant
from driftlab.mistakes.mutants import RANKS, Mutants
from driftlab.mistakes.torch_call import Call
from driftlab.network.calling import copied
from driftlab.network.compiled import eager
from driftlab.tracing.flow import Flow
from driftlab.tracing.rows import Rows
from driftlab.tracing.running import ready, results_of
from driftlab.tracing.scopes import Scopes
from driftlab.tracing.searching import Exchanged

# Runs of the reference at most, fewer of one that computes many numbers; of which so many to find one number.
RUNS, ELEMENTS, STEPS = 400, 3e8, 10
# Where no sign speaks for a change, nearby and again further off: runs, and calls that all may make together.
UNSIGNED_RUNS, UNSIGNED_CALLS = 800, 60_000
SIGNED, UNSIGNED = "signed", "unsigned"
# Fewer numbers than these any factor may make up for.
MANY = 8

Results = dict[str, Tensor]


def fitting(
    cases: Sequence[Accused],
    candidate: Flow,
    near: str = "",
    value: Exchanged | None = None,
    rows: Rows | None = None,
) -> list[Mutant]:
    """The changes of the reference that make the candidate's results of it, of the first kind that has any.

    First of all kinds those that are ``near``, or near to who makes ``value``, then those further off.

    Args:
        cases: all quantities of the pass, a wrong one first.
        candidate: the flow of its values.
        near: the module whose calls are changed first.
        value: of the candidate's, which makes its results; calls are changed where that may lie, and near.
        rows: of the reference's values, those that the candidate has, where it leaves some out.
    """
    trials = _Trials(cases)
    mutants = trials.mutants(candidate, near, value, rows)
    if mutants is None:
        return []
    most = ELEMENTS / max(1, mutants.elements)
    signed, unsigned = min(RUNS, most), min(UNSIGNED_RUNS, most, UNSIGNED_CALLS / max(1, mutants.calls))
    sides = (mutants.found, SIGNED), (mutants.signs, SIGNED), (mutants.unsigned, UNSIGNED)
    made_up: list[Mutant] = []
    left = {SIGNED: signed}
    for rank in range(RANKS):  # those further off have as many again, or a quarter
        left[UNSIGNED], left[SIGNED] = unsigned, max(left[SIGNED], signed / 4)
        for some, budget in sides:
            trials.runs = left[budget]
            fit = trials.fitting([m for m in some if mutants.rank(m) == rank], mutants)
            left[budget] = trials.runs
            if any(map(_is_told, fit)):
                return fit
            made_up = made_up or fit
    return made_up if sum(case.theirs.numel() for case in cases if case.apart) >= MANY else []


def _is_told(mutant: Mutant) -> bool:
    """Not by a number that nobody writes down, as of which one term of a sum may do for another."""
    return mutant.kind is not NUMBER or mutant.spelled


class _Trials:
    """Attributes:
    runs: that are left.
    """

    def __init__(self, cases: Sequence[Accused]):
        self._cases, first = cases, cases[0]
        self._network = copied(first.reference)
        self._earlier: list[Tensor] = []
        self._scopes = Scopes(self._network, self._entered)
        self._about = first.call, first.arithmetic, first.difference.pass_, first.seed
        self._running = ready(self._network, *self._about)
        self._twin, self._draws = Anew(self._running), Draws()
        self.runs = 0.0

    def mutants(
        self, candidate: Flow, near: str, value: Exchanged | None, rows: Rows | None
    ) -> Mutants | None:
        """None of a network that does not repeat itself."""
        seen, before = candidate.seen(), _buffers(self._network)
        frontier = Frontier(seen, rows)
        as_it_is = self._results(frontier.watch)
        if not all(case.is_mine(as_it_is.get(case.name)) for case in self._cases):
            return None
        after = _buffers(self._running)
        left = {n: t for n, t in after.items() if n in before and not torch.equal(t, before[n])}
        names = {id(module): name for name, module in self._running.named_modules()}
        found = Mutants(self._network, names, self._scopes, seen, frontier, near, value)
        self._results(found.look)
        found.finish(self._running, left)
        return found

    def fitting(self, mutants: Sequence[Mutant], among: Mutants) -> list[Mutant]:
        """Those that fit; of the first kind that has any.

        Of several numbers those that people write down, if any is one: where the results are off by one
        number, each of the reference's may make up for it. Others only where nothing else fits.
        """
        found: list[Mutant] = []
        for one in chain(*_each_line_first(mutants, among)):
            told = next(filter(_is_told, found), None)
            if self.runs <= 0 or (told and one.kind is not told.kind):
                break
            found += filter(None, [self._fit(one)])
        return [m for m in found if _is_told(m)] or found

    def _entered(self, tensors: object, scope: str) -> None:
        if not self._scopes.inside:
            self._earlier += floating(pytree.tree_leaves(tensors))

    def _fit(self, mutant: Mutant) -> Mutant | None:
        """The mutant, if it fits; with its number, which is found by the secant method."""
        if mutant.kind is not NUMBER:
            return mutant if self._agrees(self._changed(mutant, 1.0)) else None
        if self._agrees(self._changed(mutant, 0.0)):
            return replace(mutant, words=f"0 times {mutant.words}", spelled=True)
        tried, times = [(1.0, -1.0)], 1.01
        for _ in range(STEPS):
            results = self._changed(mutant, times)
            if (way := self._way(results)) is None:
                return None
            tried.append((times, way))
            better = _secant(*tried[-2:])
            if self._agrees(results):
                times = better or times
                said = spelled(times)
                words = f"{said or f'{times:.6g}'} times {mutant.words}"
                return replace(mutant, words=words, spelled=said is not None)
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
        return are_theirs(self._cases, results)

    def _changed(self, mutant: Mutant, times: float) -> Results:
        def change(number: int, call: Call, earlier: Sequence[Tensor]) -> Any:
            return mutant.change(number, call, earlier, times) if number in mutant.calls else call.run()

        self.runs -= 1
        try:
            return self._results(change, mutant)
        except Exception:  # it does not run so, wherever that shows
            return {}

    def _results(self, change: Change, mutant: Mutant | None = None) -> Results:
        twin = self._twin.begun()
        self._scopes.begin()
        self._earlier.clear()
        if mutant is not None:
            mutant.weights(twin)
        with eager(), Calls(self._scopes, self._earlier, change):
            return results_of(twin, *self._about, self._draws)


def _each_line_first(mutants: Sequence[Mutant], among: Mutants) -> tuple[Collection[Mutant], list[Mutant]]:
    """With all calls that a module makes on a line, in a loop, and all modules there; then one call alone."""
    together: dict[Hashable, Mutant] = {}
    alone: list[Mutant] = []
    for mutant in mutants:
        by_module = among.lines.get(mutant.line, {})
        own = by_module.get(mutant.at, set()) | mutant.calls
        everywhere = own.union(*by_module.values())
        groups = [own, everywhere] if own < everywhere and min(everywhere) in own else [own]
        for calls in groups:
            many = calls > mutant.calls and (mutant.line, mutant.words, mutant.which, frozenset(calls))
            same = among.of_all(mutant, calls) if calls > own else replace(mutant, calls=frozenset(calls))
            together.setdefault(many or id(mutant), same)
        if own > mutant.calls:
            alone.append(mutant)
    return together.values(), alone


def _buffers(network: nn.Module) -> dict[str, Tensor]:
    """In float64."""
    tensors = {name: held(buffer).detach() for name, buffer in network.named_buffers()}
    return {name: t.to(torch.float64, copy=True) for name, t in tensors.items() if t.is_floating_point()}


def _secant(*tried: tuple[float, float]) -> float | None:
    (one, at_one), (two, at_two) = tried
    if at_one == at_two:
        return None
    new = two - at_two * (two - one) / (at_two - at_one)
    return new if abs(new) < 1e4 and new != two else None
