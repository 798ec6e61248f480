"""Where a value is made, or gone on with, that makes the candidate's results of the reference's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from driftlab.network.modules import called, calls_in_turn, evaluates_otherwise, is_torchs, lies_in
from driftlab.network.pair import Pair
from driftlab.tracing.searching import Exchanged
from driftlab.words import Place


def where_a_value_would(pair: Pair, place: Place, value: Exchanged, right: Callable[[str], bool]) -> Place:
    """As of ``_where``; but what is looked up otherwise in a table is the affair of who gives the index."""
    at = _where(pair, place, value, right)
    return replace(at, module=who_looks_up(pair, at.module))


def _where(pair: Pair, place: Place, value: Exchanged, right: Callable[[str], bool]) -> Place:
    """The place, where that lies before the value that the candidate's is put in the place of.

    Or where it calls what lies before it, in several modules. Else the module that makes the value.

    Args:
        place: where the flow of values parts.
        right: whether a module is right by itself, by its name. Who calls it has given it something else.
    """
    if value.besides:
        return _where_more_is_done(pair, place, value)
    caller = _written(pair, _caller(value.scope))
    at_its_caller = replace(place, module=caller, candidate_module=value.candidate_scope)
    its_work_is_right = _is_table(pair, value.scope) or (value.fed and _torchs(pair, value.scope))
    if value.scopes == {value.scope} and its_work_is_right:
        return at_its_caller
    if value.in_part and value.scopes <= {value.scope, caller} and _works_by_rows(pair, value.scope):
        return at_its_caller  # which gives it other rows, or fewer
    several = len(value.scopes) > 1  # where one module makes it all, it is that module
    callers = set(map(_caller, value.scopes)) if several else set()
    if place.module and place.module in value.scopes | callers and not _joined_to(pair, place, value.scope):
        return replace(place, module=_inside(pair, place.module, value.scopes))
    if several and place.module == "" and "" in value.scopes and _torchs(pair, value.scope):
        return place  # the network's own code does something before torch's layer
    if several and _has_no_weights(pair, value.scope) and caller in value.scopes:
        return at_its_caller
    if value.scopes == {value.scope} and right(value.scope) and lies_in(value.scope, place.module):
        return place
    return replace(place, module=called(pair.reference, value.scope), candidate_module=value.candidate_scope)


def who_looks_up(pair: Pair, module: str) -> str:
    """The module itself; of a table who gives the index, and goes on with what stands there."""
    return _written(pair, _caller(module)) if _is_table(pair, module) else module


def is_joined(pair: Pair, place: Place) -> bool:
    """Whether in eval mode alone a layer is off that evaluates as it trains: joined to one that does not."""
    layer = place.pass_ == "eval" and _torchs(pair, place.module)
    return layer and not evaluates_otherwise(pair.reference.get_submodule(place.module))


def _joined_to(pair: Pair, place: Place, module: str) -> bool:
    """Whether that layer may be joined to one that evaluates otherwise, as to a norm."""
    return is_joined(pair, place) and evaluates_otherwise(pair.reference.get_submodule(module))


def _where_more_is_done(pair: Pair, place: Place, value: Exchanged) -> Place:
    """To a value that both have: by who goes on with it, if that is one module, else by who makes it.

    A norm that takes the mean away as well is one that is given a value without its mean. But a layer of
    torch's own does what it does: what is done before or behind it is the affair of who calls it, or made the
    value for it.
    """
    alone = value.users == {place.module}  # of several, to none of which is it given as it is, it is none
    if place.module and alone and not _torchs(pair, place.module):
        return place  # be it who calls the one that makes it
    around = {user for user in value.users if lies_in(value.scope, user)}
    users = value.users - around
    module = next(iter(users)) if len(users) == 1 else value.scope
    if users and around:  # who hands it on goes on with it as well
        module = max(around, key=len)
    if _torchs(pair, module) and not (value.inside and module == value.scope):
        module = value.scope if lies_in(module, value.scope) and module != value.scope else _caller(module)
    return replace(place, module=_written(pair, module), candidate_module=value.candidate_scope)


def _inside(pair: Pair, module: str, scopes: frozenset[str]) -> str:
    """Of a list of modules, which has no code that might be wrong, the one among these in which that is."""
    if not module or module in scopes or not _is_in_turn(pair, module):
        return module
    depth = module.count(".") + 2
    inner = {".".join(s.split(".")[:depth]) for s in scopes if lies_in(s, module)}
    return inner.pop() if len(inner) == 1 else module


def with_code(pair: Pair, module: str) -> str:
    """The module itself, or the one around it that has code of its own."""
    return _written(pair, _caller(module) if _torchs(pair, module) else module)


def _torchs(pair: Pair, module: str) -> bool:
    return is_torchs(pair.reference.get_submodule(module))


def _has_no_weights(pair: Pair, module: str) -> bool:
    """Of torch's own: it can hardly be written otherwise than right."""
    weights = pair.reference.get_submodule(module).parameters()
    return _torchs(pair, module) and next(weights, None) is None


def _works_by_rows(pair: Pair, module: str) -> bool:
    layer = pair.reference.get_submodule(module)
    activates = type(layer).__module__ == nn.modules.activation.__name__ and _has_no_weights(pair, module)
    return type(layer) in (nn.Linear, nn.LayerNorm, nn.RMSNorm) or activates


def _is_table(pair: Pair, module: str) -> bool:
    return type(pair.reference.get_submodule(module)) is nn.Embedding


def _caller(module: str) -> str:
    return module.rpartition(".")[0]


def _written(pair: Pair, module: str) -> str:
    """The module itself, or the one around it whose code is no list of modules to be called in turn."""
    while module and _is_in_turn(pair, module):
        module = _caller(called(pair.reference, module))
    return called(pair.reference, module)


def _is_in_turn(pair: Pair, module: str) -> bool:
    return calls_in_turn(pair.reference.get_submodule(called(pair.reference, module)))
