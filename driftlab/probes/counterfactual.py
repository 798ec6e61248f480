"""What one change of the reference would make the candidate of it, and so where the two differ."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.locating import BACKWARD
from driftlab.arithmetic.naming import LOSS
from driftlab.blame import unless_ours
from driftlab.mistakes.accused import Accused, are_theirs
from driftlab.mistakes.fitting import fitting
from driftlab.mistakes.mutant import Mutant
from driftlab.mistakes.stopped import Stop, stopped
from driftlab.network.modules import lies_in
from driftlab.network.pair import Pair
from driftlab.probes.examination import Examination
from driftlab.tracing.exchange import exchanged
from driftlab.tracing.prints import prints
from driftlab.tracing.running import FORWARD, Again, flow_of
from driftlab.tracing.searching import Exchanged
from driftlab.tracing.slopes import Parting, parting_of_slopes

# A forward pass that is off by so little beside the gradients does not make these wrong.
BESIDE = 1e-6


def gradient_stop(found: Examination, wrong: list[Difference]) -> Stop | None:
    """Where a gradient is stopped, if all that is wrong comes of it."""
    arithmetic, pair, whole = faster(found, wrong), found.pair, found.whole
    most = max(d.relative for d in wrong)
    grave = {d.pass_ for d in wrong if d.relative >= BESIDE * most}
    if arithmetic is None or whole.loss is None or not grave <= {*BACKWARD, "update"}:
        return None
    buffers = {name for name, _ in pair.reference.named_buffers()}
    if any(d.name in buffers and d.pass_ in BACKWARD for d in wrong):  # it is sent to what is no weight here
        return None
    if any(_untied(pair, d.name) for d in wrong):  # what is lacked is sent to another weight
        return None
    with unless_ours():  # a module may take no hooks, a function may not be watched
        mine, theirs = (
            {n: t.cpu() for pass_ in BACKWARD for n, t in read[pass_].items()}
            for read in found.read(arithmetic, evaluate=False)
        )
        lacks = {n: mine[n] - theirs[n] for n in mine.keys() & theirs.keys() - buffers}
        return stopped(pair.reference, whole, arithmetic, pair.seed, lacks)
    return None


def slopes_part(found: Examination, wrong: list[Difference]) -> Parting | None:
    """Where values that both have are sent another gradient; None where nothing is seen to part."""
    arithmetic, pair, whole = faster(found, wrong), found.pair, found.whole
    if arithmetic is None or whole.loss is None:
        return None
    with unless_ours():  # a module may take no hooks, a function may not be watched
        return parting_of_slopes(pair.reference, pair.candidate, whole, arithmetic, pair.seed)
    return None


def counterfactual(found: Examination, difference: Difference, place: str) -> Mutant | Exchanged | None:
    """What would make the outputs what they are: a mistake in a call, at ``place`` or else the first one.

    Where no mistake does, a value of the candidate's in the place of the reference's.
    """
    cases: list[Accused] = []
    with unless_ours():
        cases = _cases(found, difference)
    if not cases:
        return None
    pair = found.pair
    about = (found.whole, cases[0].arithmetic, difference.pass_, pair.seed)
    value: Exchanged | None = None
    with unless_ours():
        mine, theirs = (Again(network, *about) for network in (pair.reference, pair.candidate))
        agrees = partial(are_theirs, cases)
        value = exchanged(mine, theirs, agrees, found.rows)
        if any(found.rows) and (value is None or len(value.scopes) > 1):
            everywhere = exchanged(mine, theirs, agrees)  # it may lie in rows that one of the two leaves out
            if everywhere and (value is None or len(everywhere.scopes) < len(value.scopes)):
                value = everywhere
    with unless_ours():  # a mistake that has words says more, and where it is looked for the value tells
        theirs_made = flow_of(pair.candidate, *about, look=partial(prints, rows=found.rows[1]))
        if fit := fitting(cases, theirs_made, place, value, found.rows[0]):
            agreed = (place, value.scope) if value else (place,)
            agreed = agreed[::-1] if value and value.turned else agreed  # where it got its order
            there = next((m for module in agreed for m in fit if m.scope == module), None)
            if there or value is None or len({m.scope for m in fit}) == 1:
                # else a choice is another, which a change of any one of them would do
                return _no_further_out(there or fit[0], place, value)
    return value


def _no_further_out(mutant: Mutant, place: str, value: Exchanged | None) -> Mutant:
    """By who has both: of a value that is handed through nothing tells who mistook another for it."""
    inside = value is not None and lies_in(value.scope, place) and lies_in(place, mutant.scope)
    has_both = mutant.has_both is not None and lies_in(mutant.has_both, place)
    return replace(mutant, scope=place) if inside and has_both else mutant


def _cases(found: Examination, difference: Difference) -> list[Accused]:
    """The quantities of its pass, itself first; none where nobody can tell."""
    arithmetic, pair, pass_ = faster(found, [difference]), found.pair, difference.pass_
    if arithmetic is None or pass_ not in FORWARD:
        return []
    mine, theirs = (read[pass_] for read in found.read(arithmetic, evaluate=pass_ == "eval"))
    wrong = {d.name: d for d in found.network.differences if d.pass_ == pass_ and d.name in mine}
    order = sorted(wrong, key=lambda name: (name == LOSS, name != difference.name))
    return [
        Accused(mine[n].cpu(), theirs[n].cpu(), wrong[n], arithmetic, pair.reference, found.whole, pair.seed)
        for n in order
        if n in theirs
    ]


def faster(found: Examination, wrong: list[Difference]) -> str | None:
    """Plain float64 where that shows what is wrong as well; else the exact arithmetic, if there is one."""
    shown = found.float64 and all(d.excess("float64") > 1 for d in wrong)
    return "float64" if found.exact_arithmetic and shown else found.exact_arithmetic


def _untied(pair: Pair, name: str) -> bool:
    """Whether the candidate trains a weight besides, which begins with the same values."""
    own, fold = dict(pair.candidate.named_parameters()), pair.fold
    taken = {source for other in fold.placed for source in fold.sources(other)}
    spare = [p for n, p in own.items() if n not in taken and p.requires_grad]
    held = [own[s] for s in fold.sources(name) if s in own]
    return any(p.shape == h.shape and torch.equal(p, h) for h in held for p in spare)
