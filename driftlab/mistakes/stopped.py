"""Where a gradient is stopped on its way back, let through or scaled, though the forward pass is right.

Gradients are sums over ways back. A candidate that detaches one operand of one call lacks just what the
reference sends back there, carried on to the weights; one that detaches two of them lacks the sum. Only where
the gradient is stopped is what an operand is sent (``ways_back``) what the candidate lacks along several
directions (Freivalds, Probabilistic machines can use less running time, 1977). Where an operand is detached
at each turn of a loop, ways lead through several of them, so the reference is run so. A ``detach`` that the
candidate has not is found by running the reference without it, a norm through whose statistics nothing comes
back by running it so.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from driftlab.arithmetic.passes import Recorded
from driftlab.mistakes.accused import LEFT
from driftlab.mistakes.call_modes import InPlaces, Key, Place, Undetached, WithoutGraph
from driftlab.mistakes.held_statistics import HeldDeviation, HeldStatistics
from driftlab.mistakes.other_slopes import OtherSlopes, slopes
from driftlab.mistakes.ways_back import Gradients, Operand, Told, WaysBack
from driftlab.network.modules import common, lies_in

# How near a number must be to what is lacked (the central difference is exact to 1e-6).
NEAR = 1e-4
# Lines of modules, and calls in loops, that are run one by one at most.
RUNS = 64
# Operands of a module of which two may be stopped together, at most.
TOGETHER = 2000


@dataclass(frozen=True)
class Stop:
    """What makes the reference's gradients the candidate's.

    Attributes:
        scope: the module of the reference in which it lies.
        between: the modules in which it may lie as well; nothing here tells in which.
        taker: the innermost module that is handed it as it is; "" of none, or of several.
        of_weight: whether what is stopped is the gradient of a weight itself.
        words: what would do that.
    """

    scope: str
    between: frozenset[str]
    of_weight: bool
    words: str
    taker: str = ""


def stopped(
    network: nn.Module, whole: Recorded, arithmetic: str, seed: int, lacks: Mapping[str, Tensor]
) -> Stop | None:
    """Where one change of what is sent back makes the reference's gradients the candidate's; else None.

    Args:
        network: the reference.
        lacks: its gradients less the candidate's, by the name of the weight or the number of the input.
    """
    ways = WaysBack(network, whole, arithmetic, seed)
    words = "a gradient that goes on where the reference detaches would do that"
    if through := _in_places(ways, Undetached, lacks, words):
        return through
    words = "a gradient of `autograd.grad` that is a constant would do that"
    if constant := _in_places(ways, WithoutGraph, lacks, words):
        of_inputs = {name: lack for name, lack in lacks.items() if name.isdigit()}
        return replace(constant, of_weight=_norm(of_inputs) <= LEFT * _norm(lacks))
    operands = ways.sent()
    told = ways.told(operands, lacks) if operands else []
    fixed = "held fixed on the way back, would do that"
    return (
        _of_operands(ways, operands, told)
        or _in_places(ways, HeldStatistics, lacks, f"a norm's statistics, {fixed}")
        or _in_places(ways, HeldDeviation, lacks, f"what a norm divides by, {fixed}")
        or _at_each_turn(ways, operands, told, lacks)
        or _of_another_slope(ways, lacks)
    )


def _of_another_slope(ways: WaysBack, lacks: Mapping[str, Tensor]) -> Stop | None:
    found = (
        _in_places(ways, partial(OtherSlopes, slope), lacks, f"{words} on the way back would do that")
        for words, slope in slopes()
    )
    return next(filter(None, found), None)


def _of_operands(ways: WaysBack, operands: Mapping[Key, Operand], told: Sequence[Told]) -> Stop | None:
    """Of one, or of two of one module together."""
    alone = [key for key in operands if _agree([by / c[key] if c.get(key) else 0.0 for by, c in told])]
    if found := alone or _two_of_one_scope(operands, told):
        own = [operands[key] for key in found]
        wanted, by = told[0]
        share = wanted / by[found[0]] if alone else 1.0
        # who hands on what a layer is given may stop its gradient, but has no slope that might be another
        sloped = [] if _is_all(share) else [o for o in own if not ways.hands_on(o)]
        words = _words(own[:1] if alone else own[:2], share)
        return _stop(ways, sloped or own, words, _called_again(operands, found))
    return None


# The modules that are sent a gradient by the same code in other calls, so that they stop none: those that
# take the value as it is, and those that make it.
_Again = tuple[frozenset[str], frozenset[str]]


def _called_again(operands: Mapping[Key, Operand], found: Sequence[Key]) -> _Again:
    others = [(o, key[1]) for key, o in operands.items() if key not in found]
    given = {(o.function, place) for o, place in others}
    made = {(o.scope, o.function, o.line[:1], place) for o, place in others}
    own = [(operands[key], key[1]) for key in found]
    functions = frozenset(o.function for o, place in own if (o.function, place) in given)
    return functions, frozenset(
        o.scope for o, place in own if (o.scope, o.function, o.line[:1], place) in made
    )


def _stop(ways: WaysBack, own: Sequence[Operand], words: str, again: _Again) -> Stop:
    scopes = {ways.with_code(o.scope.rpartition(".")[0] if ways.takes(o) else o.scope) for o in own}
    handed = {o.function for o in own if ways.is_own(o.function)}
    # what a module hands on as it is given it is its own caller's
    between = {m for m in scopes | handed if not any(m != h and lies_in(m, h) for h in handed)}
    without_code = frozenset(m for m in between if ways.with_code(m) != m)
    for elsewhere in (*again, without_code):
        between = (between - elsewhere) or between
    innermost = [m for m in handed if not any(h != m and lies_in(h, m) for h in handed)]
    taker = innermost[0] if len(innermost) == 1 else ""
    return Stop(common(scopes), frozenset(between), any(o.is_weight for o in own), words, taker)


def _in_places(
    ways: WaysBack,
    mode: Callable[..., InPlaces],
    lacks: Mapping[str, Tensor],
    words: str,
) -> Stop | None:
    """In one line of a module, in one module, or in all that have it."""
    seen = mode(ways.scopes)
    before = ways.run(seen)
    for places in _together(seen.places):
        with suppress(RuntimeError):  # it does not run so: what it writes into it goes back through now
            if _explain(before, ways.run(mode(ways.scopes, places)), lacks):
                scopes = frozenset(scope for scope, _ in places)
                return Stop(common(scopes), scopes, all(map(seen.places.get, places)), words)
    return None


def _together(places: Collection[Place]) -> list[frozenset[Place]]:
    modules = dict.fromkeys(scope for scope, _ in places)
    of_modules = [frozenset(p for p in places if p[0] == module) for module in modules]
    one_by_one = dict.fromkeys([*(frozenset({p}) for p in places), *of_modules])
    return [*one_by_one][:RUNS] + [frozenset(places)] * bool(places)


def _at_each_turn(
    ways: WaysBack, operands: Mapping[Key, Operand], told: Sequence[Told], lacks: Mapping[str, Tensor]
) -> Stop | None:
    """Of all calls that one line of a module makes, those first whose sum is nearest to what is lacked.

    With them what is sent the same at each turn: who makes a value, and who goes on with it.
    """
    lines: defaultdict[tuple, list[Key]] = defaultdict(list)
    for key, operand in operands.items():
        for line in dict.fromkeys((operand.line, operand.line[:1])):  # its module is called at several
            lines[operand.scope, operand.function, line, key[1]].append(key)
    turns = list({tuple(keys): keys for keys in lines.values() if len(keys) > 1}.values())
    if not turns:
        return None

    def shares(keys: list[Key]) -> list[float]:
        return [sum(by.get(key, 0.0) for key in keys) / (wanted or 1.0) for wanted, by in told]

    def same(keys: list[Key], others: list[Key]) -> bool:
        both = zip(shares(keys), shares(others), strict=True)
        return all(abs(one - other) <= NEAR * abs(one) for one, other in both)

    def stop(keys: list[Key], share: float) -> Stop:
        found = [key for others in turns if same(keys, others) for key in others]
        words = _words([operands[keys[0]]], share, f" at each of {len(keys)} calls")
        return _stop(ways, [operands[key] for key in found], words, _called_again(operands, found))

    for keys in turns:
        if _agree(sent := shares(keys)):  # none of these ways leads through another
            return stop(keys, 1 / sent[0])
    before = ways.detached(())
    for keys in sorted(turns, key=lambda keys: max(abs(share - 1) for share in shares(keys)))[:RUNS]:
        if _explain(before, ways.detached(keys), lacks):
            return stop(keys, 1.0)
    return None


def _explain(before: Gradients, after: Gradients, lacks: Mapping[str, Tensor]) -> bool:
    apart = {name: before[name] - after[name] - lack for name, lack in lacks.items()}
    return _norm(apart) <= LEFT * _norm(lacks)


def _agree(shares: list[float]) -> bool:
    first, *others = shares
    return bool(first) and all(abs(other - first) <= NEAR * abs(first) for other in others)


def _norm(tensors: Mapping[str, Tensor]) -> float:
    return sum(float(t.square().sum()) for t in tensors.values()) ** 0.5


def _two_of_one_scope(operands: Mapping[Key, Operand], told: Sequence[Told]) -> list[Key]:
    """Keys and values, a state of two tensors: of two that together are sent what is lacked, in all pairs."""
    scopes: defaultdict[str, list[Key]] = defaultdict(list)
    for key, operand in operands.items():
        if all(by.get(key) for _, by in told):
            scopes[operand.scope].append(key)
    found: list[Key] = []
    for keys in (keys for keys in scopes.values() if len(keys) <= TOGETHER):
        both = torch.ones(len(keys), len(keys), dtype=torch.bool).triu(1)
        for wanted, by in told:
            sent = torch.tensor([by[key] for key in keys], dtype=torch.float64)
            both &= (sent[:, None] + sent - wanted).abs() <= NEAR * abs(wanted)
        found += [keys[at] for pair in both.nonzero().tolist() for at in pair]
    return list(dict.fromkeys(found))


def _is_all(share: float) -> bool:
    return abs(share - 1) <= NEAR


def _words(operands: Sequence[Operand], share: float, when: str = "") -> str:
    """Of one, or of two that are stopped together."""
    given = " and ".join(
        f"what `{o.function}`{f' in `{o.scope}`' if o.scope else ''} is given" for o in operands
    )
    if _is_all(share):
        return f"{given}, detached there{when}, would do that"
    return f"{1 - share:.4g} times the gradient of {given}{when} would do that"
