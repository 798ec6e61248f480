"""Where two networks part by their flows: of values, and of what these are sent back."""

from __future__ import annotations

from dataclasses import replace

from driftlab.arithmetic.constants import own_constants
from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.locating import BACKWARD
from driftlab.blame import unless_ours
from driftlab.network.modules import called, is_torchs, lies_in
from driftlab.probes.counterfactual import slopes_part
from driftlab.probes.examination import Examination
from driftlab.tracing.parting import Parted, Traced, parting
from driftlab.tracing.running import FORWARD
from driftlab.tracing.slopes import Parting
from driftlab.words import Place


def parted_in(found: Examination, pass_: str, wrong: list[Difference]) -> Parted | None:
    """By what leads to the quantities of that pass that are wrong; None where nothing is seen to part."""
    arithmetic = found.exact_arithmetic
    if arithmetic is None or pass_ == "buffer":
        return None
    pair, local = found.pair, found.local
    asked = BACKWARD if pass_ in BACKWARD else (pass_,)
    ends = [d.name for d in wrong if d.pass_ in asked]
    theirs = [s for n in ends for s in pair.fold.sources(n) or (n,)]
    own = {other: name for name, other in pair.counterparts.items()}
    reference = Traced(pair.reference, ends, local.right, own_constants(pair, "reference"))
    constants = own_constants(pair, "candidate")
    candidate = Traced(pair.candidate, theirs, lambda n: n in own and local.right(own[n]), constants)
    parted = _followed(found, reference, candidate, arithmetic, pass_)
    found.rows = parted.rows if parted else found.rows
    inner = parted_inside(found, parted.module, wrong) if parted and pass_ in BACKWARD else None
    if inner:
        return replace(parted, module=inner.module, candidate_module=inner.candidate_module)
    return parted


def parted_inside(found: Examination, module: str, wrong: list[Difference]) -> Parting | None:
    """Where in ``module`` values that both have are sent another gradient.

    By who calls a layer of torch's, unless it has no weights and another slope of its own. It knows of what
    both have alone, so that it says nothing wider.
    """
    slopes, network = slopes_part(found, wrong), found.pair.reference
    if slopes is None:
        return None
    inner = slopes.module
    layer = network.get_submodule(inner)
    its_own = slopes.own_slope and not any(True for _ in layer.parameters())
    inner = inner.rpartition(".")[0] if is_torchs(layer) and not its_own else inner
    return replace(slopes, module=inner) if lies_in(inner, module) and inner != module else None


def _followed(
    found: Examination, reference: Traced, candidate: Traced, arithmetic: str, pass_: str
) -> Parted | None:
    with unless_ours():  # a module may take no hooks, a kernel may not be watched
        return parting(reference, candidate, found.whole, arithmetic, pass_, found.pair.seed, found.pair.fold)
    return None


def bits_lost(found: Examination, narrow: list[Difference]) -> Place:
    """Where a network loses bits that no pair of modules loses by itself; "" where nothing parts."""
    pair, local, first = found.pair, found.local, narrow[0]
    place = Place("", first.pass_, 0)
    if first.pass_ not in FORWARD or "shadow" not in found.network.ran:
        return place
    ends = [d.name for d in narrow if d.pass_ == first.pass_]
    own = {other: name for name, other in pair.counterparts.items()}

    def keeps(name: str | None) -> bool:
        """Whether a module of the reference's keeps its bits by itself."""
        told = local.comparisons(name) if name in pair.counterparts else []
        return bool(told) and not any(c.narrow() for c in told)

    both = Traced(pair.reference, ends, keeps), Traced(pair.candidate, ends, lambda n: keeps(own.get(n)))
    parted = _followed(found, *both, "float32", first.pass_)
    if parted is None:
        return place
    return Place(called(pair.reference, parted.module), first.pass_, 0, parted.candidate_module)
