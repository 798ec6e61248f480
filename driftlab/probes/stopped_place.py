"""Where a gradient is stopped: by what would stop it, and by how the gradients flow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.locating import BACKWARD
from driftlab.mistakes.stopped import Stop
from driftlab.network.modules import called, lies_in
from driftlab.network.pair import Pair
from driftlab.probes.examination import Examination
from driftlab.probes.exchanged_place import with_code
from driftlab.probes.flows_part import parted_inside
from driftlab.words import Place, ToldBy


def where_a_gradient_stops(
    found: Examination,
    stop: Stop,
    module: str,
    wrong: list[Difference],
    by_the_flow: Callable[[], tuple[Place, Difference]],
) -> tuple[Place, Difference]:
    """The place, and what differs most there.

    Where it may lie in several modules the flow may know in which, and what stands for it; else who owns what
    alone lacks a gradient.

    Args:
        stop: what would do it.
        module: the owner of what is wrong.
        by_the_flow: tells the place without that.
    """
    owned = bool(module) and module == stop.scope  # what it sends on is right
    pair, pass_ = found.pair, "weight gradient" if stop.of_weight or owned else "input gradient"
    at, largest = at_one_change(pair, stop.scope, pass_), _largest(wrong)
    if (stop.of_weight and owned) or (len(stop.between) < 2 and at.candidate_module is not None):
        return at, largest
    place, difference = by_the_flow()
    known = (module, place.module) if stop.of_weight else (place.module, module)
    told = [m for m in known if m in stop.between and m != stop.scope]
    if told and told[0] == place.module:
        return replace(place, told_by=ToldBy.CHANGE), difference
    if told:
        return at_one_change(pair, module, pass_), largest
    if taken := _taken_by(pair, stop, place.module):
        at = at_one_change(pair, taken, pass_)
        return replace(at, candidate_module=place.candidate_module), largest
    inner = parted_inside(found, at.module, wrong) if len(stop.between) > 1 else None
    if inner and any(lies_in(inner.module, m) for m in stop.between - {stop.scope}):
        return at_one_change(pair, inner.module, pass_), largest
    if place.module == at.module and at.candidate_module is None:
        at = replace(at, candidate_module=place.candidate_module)
    return at, largest


def at_one_change(pair: Pair, module: str, pass_: str) -> Place:
    """The place of a module in which one change would do it."""
    return Place(called(pair.reference, module), pass_, 0, pair.counterparts.get(module), ToldBy.CHANGE)


def _taken_by(pair: Pair, stop: Stop, module: str) -> str | None:
    """Who takes it, or makes it, of what may lie in one module besides.

    The network hands on all there is, and a loop the same to each of its layers: their names say less. In the
    layer of a loop the flow may know in which module; else it is the one that goes on with it.
    """
    others = stop.between - {stop.scope}
    if len(others) != 1:
        return None
    other = next(iter(others))
    in_turn = isinstance(pair.reference.get_submodule(other.rpartition(".")[0]), nn.ModuleList)
    if stop.scope and not in_turn:
        return None
    if lies_in(module, other):
        return with_code(pair, module)
    return stop.taker if in_turn and lies_in(stop.taker, other) else other


def _largest(wrong: list[Difference]) -> Difference:
    """Of the gradients."""
    return max((d for d in wrong if d.pass_ in BACKWARD), key=lambda d: d.relative, default=wrong[0])
