"""Where a difference in the function arises: the module in both networks, and the pass."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.locating import SAME_BORDERS, first_wrong
from driftlab.fold import Fold
from driftlab.mistakes.mutant import TOGETHER, Mutant
from driftlab.network.modules import called, common_parent, lies_in
from driftlab.network.pair import Pair
from driftlab.probes.counterfactual import counterfactual, gradient_stop
from driftlab.probes.examination import Examination
from driftlab.probes.exchanged_place import is_joined, where_a_value_would, who_looks_up
from driftlab.probes.flows_part import parted_in
from driftlab.probes.lost_place import where_evaluation_loses
from driftlab.probes.stopped_place import at_one_change, where_a_gradient_stops
from driftlab.tracing.parting import Parted
from driftlab.tracing.running import FORWARD
from driftlab.tracing.searching import Exchanged
from driftlab.words import Place, ToldBy, Verdict

# What two networks give each other in float32 differs by less; so do the inputs of what lies before a fault.
ALREADY_WRONG = 1e-4
# What a norm moves by itself.
OWN_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def owner(wrong: list[Difference], fold: Fold) -> str:
    """The module whose gradients or buffers alone are wrong, though each of its calls is right.

    A tie undone, statistics that miss one of two calls, or that the candidate keeps in one for two modules.
    """
    pass_ = wrong[0].pass_
    names = [d.name for d in wrong if d.pass_ == pass_]
    if pass_ == "buffer":
        names = [n for n in names if _shares(fold, n)][:1] or names
    if pass_ == "weight gradient" and set(names) <= set(fold.repeated):  # no longer tied: who held them all
        return common_parent(names)
    owners = {n.rpartition(".")[0] for n in names}
    if pass_ == "buffer" and len(owners) > 1 and not any(n.endswith(OWN_STATISTICS) for n in names):
        return common_parent(names)  # weights that somebody moves, as an average of others
    if pass_ == "weight gradient" and not any(d.size for d in wrong if d.pass_ == pass_):
        # the reference's are frozen, the candidate's are not: the first stands for all
        return next(owner for name in fold.placed if (owner := name.rpartition(".")[0]) in owners)
    return owners.pop() if len(owners) == 1 and pass_ in ("weight gradient", "buffer") else ""


def _shares(fold: Fold, name: str) -> bool:
    """Whether the candidate holds another tensor of the reference's in the same one."""
    return any(other != name and fold.sources(other) & fold.sources(name) for other in fold.placed)


def placed(
    found: Examination, module: str, wrong: list[Difference], located: tuple[str, Difference] | None
) -> tuple[Place, Difference, str]:
    """Where the two differ, what differs there, and what would do that, where it is known.

    By pairs of modules, or by the values on the way: where the pairs end at a module with others inside, at
    one so far off that its borders may have moved, or at none. By what would do that where one thing would.
    """
    stop = gradient_stop(found, wrong) if not located or _holds_others(found.pair, module) else None
    by_the_flow = partial(_placed, found, module, wrong, located)
    if stop is None:
        return _or_where_a_call_would(found, *by_the_flow(), located)
    return *where_a_gradient_stops(found, stop, module, wrong, by_the_flow), stop.words


def _or_where_a_call_would(
    found: Examination, place: Place, difference: Difference, located: tuple[str, Difference] | None
) -> tuple[Place, Difference, str]:
    """The same; or the module of a call, or of a value, whose change makes the outputs what they are.

    Where a pair of modules is wrong, and it is in it, one further in alone, if that has others inside, or one
    in the pair that calls it in another order; but a layer that is joined to a norm is not it.
    """
    within = located is not None and lies_in(place.module, located[0]) and not is_joined(found.pair, place)
    if within and not _holds_others(found.pair, place.module) and _has_weights(found.pair, place.module):
        return place, difference, ""
    would = counterfactual(found, difference, place.module)
    if would is None or (within and located and not _says_more(would, place.module, located[0])):
        return where_evaluation_loses(found, place, difference), difference, ""
    if isinstance(would, Exchanged):
        right = partial(found.local.right, pass_=place.pass_)
        at = where_a_value_would(found.pair, place, would, right)
        stays = within and not _further_in(at.module, place.module)
        at = place if stays else replace(at, told_by=ToldBy.VALUE)
        # of another order the prints tell nothing
        return at if would.turned else where_evaluation_loses(found, at, difference), difference, ""
    where = f" in `{would.scope}`" if would.scope else ""
    at = at_one_change(found.pair, would.scope, place.pass_)
    if place.module in (would.scope, would.made_in):  # both names as they were told
        at = replace(at, candidate_module=place.candidate_module)
    return at, difference, f"{would.said}{where} would do that"


def _says_more(would: Mutant | Exchanged, module: str, pair: str) -> bool:
    """Of a module in a pair that is wrong: one further in, or who calls it, in the pair, in another order."""
    of_order = isinstance(would, Mutant) and would.kind is TOGETHER and lies_in(would.scope, pair)
    return _further_in(would.scope, module) or (of_order and _further_in(module, would.scope))


def _further_in(module: str, other: str) -> bool:
    return module != other and lies_in(module, other)


def _holds_others(pair: Pair, module: str) -> bool:
    return next(pair.reference.get_submodule(module).children(), None) is not None


def _has_weights(pair: Pair, module: str) -> bool:
    return next(pair.reference.get_submodule(module).parameters(), None) is not None


def _placed(
    found: Examination, module: str, wrong: list[Difference], located: tuple[str, Difference] | None
) -> tuple[Place, Difference]:
    difference = located[1] if located else _earliest(found, wrong)
    if (started := _other_weights(found, difference)) is not None:
        return started, difference
    pair, pass_ = found.pair, difference.pass_
    if module and not located and difference.name in pair.fold.repeated:
        return _of(pair, module, difference)
    whole = not module or _holds_others(pair, module)
    moved = _may_be_moved(found, module, difference)
    damped = bool(located) and bool(module) and pass_ == "forward" and _damped(found, difference.relative)
    parted = parted_in(found, pass_, wrong) if whole or moved or damped or not located else None
    told_by = ToldBy.CALLS if located else None
    if parted is None:
        shown = {d.pass_ for d in found.network.wrong()}
        if not module and (deeper := first_wrong(found.local, shown, deeper=True)):
            (module, difference), told_by = deeper, ToldBy.CALLS
        return _of(pair, module, difference, told_by, whole=not located and bool(module))
    at = called(pair.reference, parted.module)
    at = who_looks_up(pair, at) if pass_ in FORWARD else at
    place = Place(at, _pass_of(pass_, at, wrong), 0, parted.candidate_module, ToldBy.FLOW)
    if damped and lies_in(module, place.module):  # the border moved: what is seen of it is the parent's
        return place, (place.module and found.local.wrong(place.module)) or wrong[0]
    # of a gradient that no call explains its owner says more than the whole network does
    exacter = lies_in(place.module, module) or (not located and place.module)
    exacter = exacter and not (located and _stands_for_both(found, module, place.module))
    exacter = exacter or (moved and _is_where_it_moved_to(found, module, place))
    if exacter or (pass_ == "forward" and _hands_on_what_is_there(found, parted, module)):
        return place, difference
    return _of(pair, module, difference, told_by)


def _hands_on_what_is_there(found: Examination, parted: Parted, module: str) -> bool:
    """Whether that module is no place, as the candidate has all that it hands on; their order is not seen."""
    return bool(module) and parted.gives_what_is_there(module) and not found.local.permuted(module)


def _stands_for_both(found: Examination, module: str, inner: str) -> bool:
    """Whether one module of the candidate's does the work of both, and is not given what the inner one is."""
    own, local = found.pair.counterparts, found.local
    if inner == module or inner not in own or inner not in local.calls or own[inner] != own.get(module):
        return False
    return not local.aligned(inner, ALREADY_WRONG)


def _is_where_it_moved_to(found: Examination, module: str, place: Place) -> bool:
    """Whether a fault may lie at ``place`` rather than in a module that is wrong where its borders may be.

    Not where the candidate parts within what stands for the module; nor behind it, where what the candidate
    is given is wrong already.
    """
    pair = found.pair
    if lies_in(module, place.module):
        return not lies_in(place.candidate_module or "", pair.counterparts[module])
    return place.module not in pair.counterparts or found.local.aligned(place.module, ALREADY_WRONG)


def _earliest(found: Examination, wrong: list[Difference]) -> Difference:
    """The first of the first pass; of buffers that of the module that is called first."""
    calls = {name: number for number, name in enumerate(found.local.calls)}
    buffers = [d for d in wrong if d.pass_ == wrong[0].pass_ == "buffer"]
    return min(buffers, key=lambda d: calls.get(d.name.rpartition(".")[0], len(calls)), default=wrong[0])


def _of(
    pair: Pair, module: str, difference: Difference, told_by: ToldBy | None = None, whole: bool = False
) -> tuple[Place, Difference]:
    """``whole``: whether it is who owns all that is wrong, and not a module around that."""
    buffer = difference.pass_ == "buffer" and not whole
    if buffer and lies_in(difference.name, module):  # nobody else writes into it
        module = difference.name.rpartition(".")[0]
    own, other = called(pair.reference, module), pair.counterparts.get(module)
    return Place(own, difference.pass_, 0, other, told_by), difference


def _may_be_moved(found: Examination, module: str, difference: Difference) -> bool:
    local = found.local
    if difference.pass_ != "forward" or difference.relative < SAME_BORDERS:
        return False
    complete = all(n in local.counterparts for n in local.calls)
    return not complete and not (module and local.permuted(module))


def _damped(found: Examination, off: float | None) -> bool:
    """Whether a module, or a weight, is off by far more than the whole network: a border may have moved.

    A network that returns its loss alone damps whatever is wrong in it; its gradients do not.
    """
    wrong = found.network.wrong()
    outputs = [d.relative for d in wrong if d.pass_ == "forward"]
    gradients = [d.relative for d in wrong if d.pass_ == "weight gradient"]
    shown = max([*outputs, median(gradients)] if gradients else outputs, default=0.0)
    return bool(outputs) and shown < SAME_BORDERS * min(off or 0.0, 1.0)


def _pass_of(pass_: str, module: str, wrong: list[Difference]) -> str:
    """Weights before a module get wrong gradients from its input gradient, its own perhaps not."""
    if pass_ != "weight gradient":
        return pass_
    names = [d.name for d in wrong if d.pass_ == pass_]
    holder = module.rpartition(".")[0] if ".parametrizations." in module else module  # of what it is given
    own = all(lies_in(n, holder) if module else "." not in n for n in names)
    return pass_ if own else "input gradient"


def _other_weights(found: Examination, difference: Difference) -> Place | None:
    """Where a parameter starts from another value, which is what makes the function another.

    One that is far more off than the whole network belongs to a module whose border moved (a norm folded in).
    """
    grave = [s for s in found.start if s.supports is Verdict.BUG and s.measured]
    places = [s.place for s in grave if s.place and not _damped(found, s.measured)]
    return next((p for p in places if p.pass_ == difference.pass_ == "forward"), None)
