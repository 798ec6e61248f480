"""Do both compute the same function, once rounding is taken away? And where not, in which module?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from driftlab.arithmetic.comparison import Comparison
from driftlab.arithmetic.constants import rounded_constants
from driftlab.arithmetic.difference import Difference
from driftlab.arithmetic.locating import SAME_BORDERS, first_wrong, slightly_wrong
from driftlab.arithmetic.passes import run
from driftlab.arithmetic.tame import on_shorter_inputs, with_smaller_weights
from driftlab.arithmetic.tracing import parting
from driftlab.blame import not_ours
from driftlab.probes.determinism import wavers
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.probes.random_streams import drawn_otherwise
from driftlab.rounding import HALFWAY
from driftlab.words import FEWER_SAMPLES, FUNCTION, Finding, Place, Verdict

# A parameter without a gradient (a bias that the next norm takes away) is not missed.
NO_GRADIENT = 1e-6


def ask(found: Examination) -> Iterator[Finding]:
    """On the batch, for the whole network and for every rewritten module."""
    network, wrong, untold = found.network, found.network.wrong(), found.network.untold()
    located = first_wrong(found.local) if wrong or untold else slightly_wrong(found.local)
    if wrong and (drawn := drawn_otherwise(found, located)):
        yield drawn
        return
    if not wrong and located is None:
        yield _chaotic(found, untold[0]) if untold else _same(found, network)
        return
    module, difference = located or (_owner(wrong), wrong[0])
    if (why := rounded_constants(found.pair, found.whole, wrong or [difference])) is not None:
        found.narrow_constants = True
        yield _same(found, network, why)
        return
    if (wavering := wavers(found, module)) is not None:
        yield wavering
        return
    place = _other_weights(found, difference) or Place(*_placed(found, module, difference), 0)
    # found on some samples of the batch alone: this training may come to it later
    on_few = not wrong and not found.local.wrong(module)
    excess = min(_excess_of(difference, network), 1e300) * HALFWAY
    accused = PROBE.finding(excess, Verdict.BUG, _wrong(difference, network), place)
    if on_few:
        accused = replace(accused, evidence=replace(accused.evidence, probe=FEWER_SAMPLES), off_path=True)
    yield accused


def _excess_of(difference: Difference, network: Comparison) -> float:
    return difference.excess("shadow" if "shadow" in network.ran else "float64")


def _same(found: Examination, network: Comparison, why: str = "") -> Finding:
    missed = _untrained(found) if found.trains else []
    if missed:
        return _not_trained(missed)
    worst = max((_excess_of(d, network) for d in network.differences), default=0.0) * HALFWAY
    how = "their float32 path computed in float64" if "shadow" in network.ran else "float64"
    says = (
        "they do, bit for bit"
        if network.same_bits
        else f"they do: in {how}, {worst:.2g} times what rounding makes"
    )
    if control := max((d.control / d.size for d in network.differences if d.size), default=0.0):
        says += f"; one unit in the last place makes {control:.2g} (relative) of the reference itself"
    if len(network.ran) == 1 and not network.same_bits:
        says = "neither float64 nor their float32 path computed in float64 tells: float32 alone runs"
    if why:
        says = f"they do, but for {why}"
    if "float64" in network.failed:
        says += f"; the candidate cannot run in float64 itself ({network.failed['float64']})"
    elif network.float64_not_honoured:
        says += (
            "; given float64, it computes in fewer bits all the same, which is no difference in the function"
        )
    return PROBE.finding(worst, Verdict.BIT_IDENTICAL if network.same_bits else Verdict.ROUND_OFF, says)


def _chaotic(found: Examination, d: Difference) -> Finding:
    """Nothing can be told on these inputs: on shorter ones, and with smaller weights."""
    shorter, smaller = (look(found.pair, found.whole) for look in (on_shorter_inputs, with_smaller_weights))
    own = (
        f"one unit in the last place of float64 makes {d.control / d.size:.2g} (relative) of the reference's"
    )
    says = f"{own} {d.pass_}: chaotic, so that these inputs tell nothing"
    for told in (t for t in (shorter, smaller) if t):
        if wrong := told.comparison.wrong():
            excess = min(_excess_of(wrong[0], told.comparison), 1e300) * HALFWAY
            off = f"{says}; {told.of} they are {wrong[0].relative:.2g} (relative) off"
            if told is shorter:
                return PROBE.finding(excess, Verdict.BUG, f"{{place}}: {off}", Place("", wrong[0].pass_, 0))
            return PROBE.finding(excess, None, f"{off}: a fault further on, or weights that must not shrink")
    if shorter is None or smaller is None:
        excess = min(_excess_of(replace(d, control=0.0), found.network), 1e300) * HALFWAY
        return PROBE.finding(excess, None, f"{says}, nor do shorter ones or smaller weights")
    worst = max(_excess_of(e, t.comparison) for t in (shorter, smaller) for e in t.comparison.differences)
    return PROBE.finding(
        worst * HALFWAY, Verdict.ROUND_OFF, f"{says}; they do {shorter.of}, and {smaller.of}"
    )


def _wrong(difference: Difference, network: Comparison) -> str:
    if difference.reshaped:
        return "{place}: the candidate's has another shape"
    if difference.overflows:
        return "{place}: the candidate's float32 is not finite where the reference's is"
    named = f" ({difference.name})" if difference.pass_ == "weight gradient" else ""
    how = "with the rounding taken away" if "shadow" in network.ran else "in float64"
    off = f"{difference.relative:.2g} (relative) off"
    return (
        f"{{place}}{named}: fed the reference's exact inputs it is {off} {how}, where rounding would be gone"
    )


def _untrained(found: Examination) -> list[str]:
    """Reference parameters that get a gradient and have nothing in the candidate that could hold them."""
    pair = found.pair
    spare = {n for n, p in pair.candidate.named_parameters() if p.requires_grad} & set(pair.fold.unused)
    trained = {n for n, p in pair.reference.named_parameters() if p.requires_grad}
    missing = [n for n in pair.fold.unplaced if n in trained] if not spare else []
    if not missing:
        return []
    gradients = run(pair.reference, found.whole, "float32", pair.seed).tensors["weight gradient"]
    size = max(float(torch.linalg.vector_norm(g)) for g in gradients.values())
    return [n for n in missing if float(torch.linalg.vector_norm(gradients[n])) > NO_GRADIENT * size]


def _not_trained(missed: list[str]) -> Finding:
    names = ", ".join(missed[:4])
    says = f"{names}: trained in the reference, and among the candidate's parameters there is none for it"
    place = Place(missed[0].rpartition(".")[0], "update", 0)
    return PROBE.finding(float(len(missed)), Verdict.BUG, says, place, threshold=0.0)


def _other_weights(found: Examination, difference: Difference) -> Place | None:
    """Where a parameter starts from another value, which is what makes the function another."""
    grave = [s.place for s in found.start if s.supports is Verdict.BUG and s.measured]
    return next((p for p in grave if p.pass_ == difference.pass_ == "forward"), None)


def _owner(wrong: list[Difference]) -> str:
    """The module whose gradients or buffers alone are wrong, though each of its calls is right.

    A tie undone, statistics that miss one of two calls.
    """
    pass_ = wrong[0].pass_
    owners = {d.name.rpartition(".")[0] for d in wrong if d.pass_ == pass_}
    return owners.pop() if len(owners) == 1 and pass_ in ("weight gradient", "buffer") else ""


def _placed(found: Examination, module: str, difference: Difference) -> tuple[str, str]:
    """The place by pairs of modules, or a more exact one by the values on the way.

    Values are asked where the pairs end at a module with others inside, or at one so far off that its borders
    may have moved. A module that they accuse, and that is right by itself, was used wrongly: the fault is
    around it.
    """
    pair, local, pass_ = found.pair, found.local, difference.pass_
    whole = not module or next(pair.reference.get_submodule(module).children(), None) is not None
    moved = pass_ == "forward" and not difference.relative < SAME_BORDERS
    complete = all(n in local.counterparts for n in local.calls)
    moved = moved and not complete and not (module and local.permuted(module))
    asked = pass_ in ("forward", "input gradient", "weight gradient") and found.float64
    parted = _parted(found) if asked and (whole or moved) else None
    if parted is None or (parted[1] == "forward") != (pass_ == "forward"):
        return module, pass_
    name, where = parted
    paired = name in local.counterparts and bool(local.calls.get(name))
    if paired and local.comparisons(name) and local.wrong(name) is None:
        name = name.rpartition(".")[0]
    inside = f"{module}." if module else ""
    return (name, where) if moved or name.startswith(inside) else (module, pass_)


def _parted(found: Examination) -> tuple[str, str] | None:
    try:
        return parting(found.pair.reference, found.pair.candidate, found.whole, found.pair.seed)
    except Exception as error:  # a module that takes no hooks, or a kernel that cannot be watched
        not_ours(error)
        return None


PROBE = Probe(
    name=FUNCTION,
    question="Fed the same inputs, do both compute the same function, once rounding is taken away?",
    threshold=HALFWAY,
    reason="halfway between rounding, 2^-29 of float32's error in float64, and a wrong function, all of it",
    sees="any difference in the function on this batch (forward, all gradients, buffers, eval mode), for the "
    "whole network and every rewritten module, down to about 1e-11 of a module's result",
    misses="what these inputs do not reach",
    order=20,
    ask=ask,
    asserted=True,
)
