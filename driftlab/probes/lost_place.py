"""Where evaluation alone is wrong: what the candidate comes by in training says where."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch import nn

from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.locating import BACKWARD
from driftlab.blame import unless_ours
from driftlab.network.modules import common, is_torchs
from driftlab.probes.counterfactual import faster
from driftlab.probes.examination import Examination
from driftlab.probes.exchanged_place import with_code
from driftlab.tracing.evaluation import Lost, lost
from driftlab.tracing.running import Again
from driftlab.words import Place, ToldBy


def where_evaluation_loses(found: Examination, place: Place, difference: Difference) -> Place:
    """The module that makes first what the candidate has in training alone, where no change says more.

    Of several the one that holds the others. A linear layer is given other rows by who calls it.
    """
    if place.pass_ != "eval" or place.told_by in (ToldBy.CHANGE, ToldBy.CALLS):
        return place
    trains = not any(d.pass_ in ("forward", *BACKWARD) for d in found.network.wrong())
    arithmetic, pair = faster(found, [difference]), found.pair
    if not trains or arithmetic is None:
        return place
    mine, theirs = (
        partial(_passes, found, network, arithmetic) for network in (pair.reference, pair.candidate)
    )
    parts = Lost()
    with unless_ours():  # a module may take no hooks, a kernel may not be watched
        parts = lost(mine, theirs)
    module = common(parts.modules)
    if module not in parts.modules:
        return place
    layer, agreed = pair.reference.get_submodule(module), place.module == module
    if not is_torchs(layer):
        other = pair.counterparts.get(module, place.candidate_module)
        return place if agreed else replace(place, module=module, candidate_module=other, told_by=ToldBy.FLOW)
    given_other_rows = agreed and type(layer) is nn.Linear and parts.in_part
    return replace(place, module=with_code(pair, module)) if given_other_rows else place


def _passes(found: Examination, network: nn.Module, arithmetic: str, pass_: str) -> Again:
    return Again(network, found.whole, arithmetic, pass_, found.pair.seed)
