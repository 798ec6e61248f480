"""The reference with one value of the candidate's in the place of its own: does it then give its results?

An interchange intervention (Geiger et al., Causal Abstractions of Neural Networks, 2021; activation patching,
Vig et al., 2020). Put in where the mistake is, or behind it, the candidate's value makes the candidate's
results; before it, the reference's. So the first value of the candidate's that does so is what the mistake
made, whatever it is, and the place is where the reference has its own of it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from functools import partial

from driftlab.network.modules import common, lies_in
from driftlab.tracing.flow import reached
from driftlab.tracing.handing import fed_otherwise, given_otherwise, only_source
from driftlab.tracing.integers import integer_pairs
from driftlab.tracing.joining import Otherwise, joined_otherwise
from driftlab.tracing.kept import Kept
from driftlab.tracing.rearranging import rearranged
from driftlab.tracing.running import Again
from driftlab.tracing.searching import BEFORE, Exchanged, Search
from driftlab.tracing.shared_rows import BothRows
from driftlab.tracing.trial import Agrees, Trial

# Where what a right module is given lies in more modules than these, it tells less than who makes the value.
BEGINS = 3


def exchanged(
    mine: Again,
    theirs: Again,
    agrees: Agrees,
    rows: BothRows = (None, None),
) -> Exchanged | None:
    """The first value of the candidate's that makes its results of the reference's; None where none does.

    Nor where it is one of the results themselves, which several modules come by: any fault makes these. Where
    none does, or one far behind, and the candidate has its rows in another order throughout, in that of the
    reference's.

    Args:
        mine, theirs: run reference and candidate.
        agrees: asked by the reference's names.
        rows: of each those that the other has, where that leaves some out.
    """
    own, others = Kept(mine, rows[0]), Kept(theirs, rows[1])
    if own.full or others.full:
        return None
    own.compare(others)
    others.compare(own)
    trial = partial(Trial, mine, own, agrees)
    found = _exchanged(own, others, trial)
    if (found is None or len(found.scopes) > 1) and rearranged(own, others):
        again = _exchanged(own, others, trial)
        if found is None or (again is not None and len(again.scopes) < len(found.scopes)):
            return again
    return found


def _exchanged(own: Kept, others: Kept, trial: Callable[..., Trial]) -> Exchanged | None:
    """The same, of the values that each made."""
    search = Search(own, others, trial())
    while search.narrows():
        pass
    if search.found is None:
        search.turns(trial(BEFORE))
    if (index := _integers(own, others, trial(), search.spot)) is not None:
        return index
    found, spot = search.found, search.spot
    several = found is not None and len(found.scopes) > 1
    if found is None or several:
        both = joined_otherwise(own, others, trial(BEFORE))
        if both is not None and both.spots[0] < spot and (both.cut or len(_scopes(own, both.spots)) <= 1):
            fed = None if both.cut else fed_otherwise(own, others, trial(BEFORE), both.spots, both.number)
            return replace(_joined(own, others, both), fed=fed is not None)
    asked = found is None or several or own.joins(int(spot))
    if asked and (other := given_otherwise(own, others, trial(BEFORE))) is not None:
        return _handed(own, others, *other)
    if found is None or (several and own.is_a_result(int(spot))):
        return None
    return found if found.besides else _back_from(own, others, trial(BEFORE), found, int(spot), search.number)


def _back_from(
    own: Kept, others: Kept, trial: Trial, found: Exchanged, spot: int, other: int | None
) -> Exchanged:
    """The same; or who makes what right modules are given, where few may, back as long as they are right.

    Of a right module to which the reference gives what both have the same, but fed with something else.
    """
    several, begun = len(found.scopes) > 1, spot
    while (other := fed_otherwise(own, others, trial, [begun], other, shared=False)) is not None:
        source = only_source(own, begun)
        if own.shared[source]:
            return replace(found, fed=begun == spot and not several)
        if several and others.shared[other]:  # which is handed in its place
            break
        begun = source
    before = found if begun == spot else _made_before(own, found, begun)
    return before if len(before.scopes) <= BEGINS else found


def _made_before(own: Kept, found: Exchanged, source: int) -> Exchanged:
    """Of modules that do their own work right, and are given what the candidate has not: who makes that.

    As a norm of a stream whose last row alone is a result, which no mistake in the others comes to.
    """
    values = own.flow.values
    lacked = [values[n] for n in reached([source], own.lacked_whole)]
    scopes = frozenset(v.scope for v in lacked if v.made_by[0] and v.prints is not None)
    scope = values[own.written(source)].scope
    return replace(found, scope=scope, scopes=scopes, users=frozenset(), inside=False)


def _scopes(own: Kept, spots: Collection[int]) -> set[str]:
    """The modules that make these of what both have."""
    values = (own.flow.values[n] for n in reached(spots, own.lacked))
    return {value.scope for value in values if value.made_by[0] and value.prints and value.fed}


def _joined(own: Kept, others: Kept, both: Otherwise) -> Exchanged:
    """By who makes all of it; where a part of that is cut off, this is done besides, and there."""
    made = [own.written(own.original[spot]) for spot in both.spots]
    scope = common([own.flow.values[n].scope for n in made])
    users = () if both.cut else {own.flow.values[user].scope for n in made for user in own.users(n)}
    theirs = others.flow.values[both.number].scope
    return Exchanged(scope, frozenset({scope}), theirs, both.cut, frozenset(users))


def _handed(own: Kept, others: Kept, spot: int, number: int, module: str | None) -> Exchanged:
    """As something that is done besides, by who takes it; else by who makes it."""
    made = own.flow.values[own.written(spot)].scope
    maker = module if module is not None and lies_in(made, module) else made  # it makes what it hands on
    users = frozenset() if module is None else frozenset({module})
    return Exchanged(maker, frozenset({made, maker}), others.flow.values[number].scope, True, users)


def _integers(own: Kept, others: Kept, trial: Trial, end: float) -> Exchanged | None:
    """The same of an index, a position or a mask that the reference makes before it makes a value."""
    for one in (pair for pair in integer_pairs(own, others) if pair.made < end):
        if any(map(trial.gives_theirs, one.changes(own, others))):
            made = own.written(one.made)
            scope, theirs = own.flow.values[made].scope, others.flow.values[one.number].scope
            users = frozenset(own.flow.values[n].scope for n in own.users(one.spot))
            return Exchanged(scope, frozenset({scope}), theirs, False, users)
    return None
