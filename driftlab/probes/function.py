"""Do both compute the same function, once rounding is taken away? And where not, in which module?"""

from __future__ import annotations

from dataclasses import replace

import torch

from driftlab.arithmetic.comparison import Comparison
from driftlab.arithmetic.constants import besides_constants, rounded_constants
from driftlab.arithmetic.difference import Difference, Nature
from driftlab.arithmetic.following import trains_alike
from driftlab.arithmetic.locating import first_wrong, slightly_wrong
from driftlab.arithmetic.passes import CannotRunError, run
from driftlab.arithmetic.tame import on_shorter_inputs, with_smaller_weights
from driftlab.probes.details import details
from driftlab.probes.determinism import wavers
from driftlab.probes.examination import Examination
from driftlab.probes.placing import owner, placed
from driftlab.probes.probe import Probe
from driftlab.probes.random_streams import after_a_call, draw_apart, drawn_otherwise
from driftlab.probes.whose_fault import told_apart
from driftlab.rounding import BEYOND, HALFWAY
from driftlab.words import FEWER_SAMPLES, FUNCTION, Finding, Place, Verdict

# A parameter without a gradient (a bias that the next norm takes away) is not missed.
NO_GRADIENT = 1e-6


def ask(found: Examination) -> list[Finding]:
    """On the batch, for the whole network and for every rewritten module."""
    network, wrong, untold = found.network, found.network.wrong(), found.network.untold()
    shown = {d.pass_ for d in wrong}
    located = first_wrong(found.local, shown) if wrong or untold else slightly_wrong(found.local)
    if wrong and (told := _told_of_draws(found, located)):
        return told
    if not wrong and located is None:
        return [_chaotic(found, untold[0]) if untold else _same(found, network)]
    differing = (wrong,) if wrong else ([located[1]], found.local, located[0])
    if (why := rounded_constants(found.pair, found.whole, *differing)) is not None:
        found.narrow_constants = True
        return [_same(found, network, why)]
    if located is None:
        wrong = besides_constants(found.pair, found.whole, wrong)
    module, difference = located or (owner(wrong, found.pair.fold), wrong[0])
    if (wavering := wavers(found, module)) is not None:
        return [wavering]
    place, difference, why = placed(found, module, wrong or [difference], located)
    arrives = bool(module) and located is None and place.module == module
    # found on some samples of the batch alone: this training may come to it later
    on_few = not wrong and not found.local.wrong(module)
    excess = min(_excess_of(difference, network), BEYOND) * HALFWAY
    says = _arrives(difference, found.local.right(module)) if arrives else _wrong(difference, network)
    says += _IN_EVALUATION if _same_in_evaluation(found) else told_apart(found, difference)
    accused = PROBE.finding(excess, Verdict.BUG, says, place)
    more = details(found, located[0] if located else "", difference, few=not wrong, known=why)
    more = "\n".join(filter(None, [more, place.told_by and place.told_by.says]))
    accused = replace(accused, evidence=replace(accused.evidence, details=more))
    if on_few:
        accused = replace(accused, evidence=replace(accused.evidence, probe=FEWER_SAMPLES), off_path=True)
    return [accused]


def _told_of_draws(found: Examination, located: tuple[str, Difference] | None) -> list[Finding]:
    """What is to be said where the two draw other random numbers; [] where they do not, or nothing is.

    In eval mode random layers draw nothing. It is looked at on the weights and averages that the two begin
    with, not on those that a training step leaves, since random numbers went into them.
    """
    drawn = drawn_otherwise(found, located)
    if drawn is None and not draw_apart(found):
        return []
    still = _in_eval_mode(found)
    if wrong := [f for f in still if f.evidence.supports is Verdict.BUG]:
        found.comparable = False
        why = "; compared in eval mode, since the two draw other random numbers in training mode"
        return [f.adding(why) for f in wrong]
    if drawn is None:
        return []
    same = any(f.evidence.supports in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL) for f in still)
    return [drawn.adding(same * "; in eval mode, as both begin, they are the same function")]


def _in_eval_mode(found: Examination) -> list[Finding]:
    """The same asked there; [] where it was asked there already, or cannot be."""
    if not any(module.training for module in found.pair.reference.modules()):
        return []
    try:
        return ask(Examination(after_a_call(found), found.batch, trains=found.trains))
    except CannotRunError:
        return []


def _excess_of(difference: Difference, network: Comparison) -> float:
    if network.in_float32_alone:
        return difference.lost / difference.precision.narrower
    return difference.excess("shadow" if "shadow" in network.ran else "float64")


def _same(found: Examination, network: Comparison, why: str = "") -> Finding:
    missed = _without_a_place(found) if found.trains else []
    if missed and not trains_alike(found.pair, found.whole):
        return _not_trained(missed)
    if network.in_float32_alone and not network.same_bits:
        return _in_float32_alone(network)
    worst = max((_excess_of(d, network) for d in network.differences), default=0.0) * HALFWAY
    how = (
        f"their {found.pair.precision.name} path computed in float64"
        if "shadow" in network.ran
        else "float64"
    )
    says = (
        "they do, bit for bit"
        if network.same_bits
        else f"they do: in {how}, {worst:.2g} times what rounding makes"
    )
    if control := max((d.control / d.size for d in network.differences if d.size), default=0.0):
        says += f"; one unit in the last place makes {control:.2g} (relative) of the reference itself"
    if why:
        says = f"they do, but for {why}"
    if missed:
        says += (
            f"; {_listed(missed)}: found nowhere in the candidate, and one step of gradient descent takes "
        )
        says += "both to the same outputs"
    if "float64" in network.failed:
        says += f"; the candidate cannot run in float64 itself ({network.failed['float64']})"
    elif apart := network.in_float64_alone():
        off = apart[0].relative_in("shadow64")
        says += f"; in float64 alone they do not, {off:.2g} (relative) apart in the {apart[0].pass_}: "
        says += f"their code asks for its dtype, and they are judged in {network.judged}"
    elif network.float64_not_honoured:
        says += (
            "; given float64, it computes in fewer bits all the same, which is no difference in the function"
        )
    return PROBE.finding(worst, Verdict.BIT_IDENTICAL if network.same_bits else Verdict.ROUND_OFF, says)


def _in_float32_alone(network: Comparison) -> Finding:
    """A fault smaller than rounding is not seen; a larger one may be fewer bits, which the curves tell.

    Not where the reference itself is known in float32 alone: nothing then says which of the two it is.
    """
    worst = max(network.differences, key=lambda d: d.lost)
    beside = "the reference's own error" if network.exact else "what one unit in the last place makes of it"
    why, own = next(iter(network.failed.values())), worst.precision
    says = f"{own.name} alone runs ({why}); there the {worst.pass_} is "
    says += f"{worst.lost:.2g} times {beside} from the reference's"
    threshold = own.narrower
    if worst.lost <= threshold:
        says += ": a smaller fault is not seen"
        return PROBE.finding(worst.lost, Verdict.ROUND_OFF, says, threshold=threshold)
    if all(d.nature is Nature.FEWER_BITS for d in network.narrow()):
        says += ", with the grain of a rounding: fewer bits"
        return PROBE.finding(worst.lost, Verdict.ROUND_OFF, says, threshold=threshold)
    if network.exact:
        return PROBE.finding(worst.lost, None, says, threshold=threshold)
    says += ": fewer bits, or another function; a reference that runs in float64 as well would tell"
    return PROBE.finding(worst.lost, Verdict.INCONCLUSIVE, says, threshold=threshold)


def _chaotic(found: Examination, d: Difference) -> Finding:
    """Nothing can be told on these inputs: on shorter ones, and with smaller weights."""
    shorter, smaller = (look(found.pair, found.whole) for look in (on_shorter_inputs, with_smaller_weights))
    own = (
        f"one unit in the last place of float64 makes {d.control / d.size:.2g} (relative) of the reference's"
    )
    says = f"{own} {d.pass_}: chaotic, so that these inputs tell nothing"
    for told in (t for t in (shorter, smaller) if t):
        if wrong := told.comparison.wrong():
            excess = min(_excess_of(wrong[0], told.comparison), BEYOND) * HALFWAY
            off = f"{says}; {told.of} they are {wrong[0].relative:.2g} (relative) off"
            if told is shorter:
                return PROBE.finding(excess, Verdict.BUG, f"{{place}}: {off}", Place("", wrong[0].pass_, 0))
            return PROBE.finding(excess, None, f"{off}: a fault further on, or weights that must not shrink")
    if shorter is None or smaller is None:
        excess = min(_excess_of(replace(d, control=0.0), found.network), BEYOND) * HALFWAY
        return PROBE.finding(excess, None, f"{says}, nor do shorter ones or smaller weights")
    worst = max(_excess_of(e, t.comparison) for t in (shorter, smaller) for e in t.comparison.differences)
    return PROBE.finding(
        worst * HALFWAY, Verdict.ROUND_OFF, f"{says}; they do {shorter.of}, and {smaller.of}"
    )


def _wrong(difference: Difference, network: Comparison) -> str:
    if difference.pass_ == "side effect":
        mode, off = difference.name.split()[0], difference.relative
        return f"{{place}}: in {mode} mode its inputs are {off:.2g} (relative) off after the call"
    named = f" ({difference.name})" if difference.pass_ != "input gradient" and difference.name else ""
    if difference.reshaped:
        return f"{{place}}{named}: the candidate's has another shape"
    if difference.immeasurable and difference.less_finite:
        return f"{{place}}{named}: the candidate's is not finite where the reference's is"
    if difference.immeasurable:
        return f"{{place}}{named}: where one of the two holds NaN or inf, the other holds something else"
    own = difference.precision.name
    if difference.overflows:
        return f"{{place}}{named}: the candidate's {own} is not finite where the reference's is"
    if network.in_float32_alone:
        off = f"fed the reference's exact inputs it is {difference.relative:.2g} (relative) off in {own}"
        return f"{{place}}{named}: {off}, in which alone it runs, and as far off nearby: another function"
    how = "with the rounding taken away" if "shadow" in network.ran else "in float64"
    off = f"{difference.relative:.2g} (relative) off"
    if "shadow64" in network.ran and difference.excess("shadow") <= 1:
        how = f"with the rounding taken away in float64, and not in {own}"
        off = f"{difference.relative_in('shadow64'):.2g} (relative) off"
    return (
        f"{{place}}{named}: fed the reference's exact inputs it is {off} {how}, where rounding would be gone"
    )


_IN_EVALUATION = "; in eval mode they are the same function, which trains=False asks for alone"


def _same_in_evaluation(found: Examination) -> bool:
    """Whether only training tells the two apart: norms folded into weights, adapters merged."""
    passes = {d.pass_ for d in found.network.wrong()}
    if not found.trains or "forward" not in passes:
        return False
    alone = Examination(found.pair.evaluating(), found.batch, trains=False)
    try:
        wrong = alone.network.wrong()
    except CannotRunError:
        return False
    return not wrong or rounded_constants(alone.pair, alone.whole, wrong) is not None


def _arrives(difference: Difference, right: bool) -> str:
    """Of a module that a wrong gradient or buffer belongs to, and that is not wrong by itself."""
    says = f"{{place}}: {difference.name} is {difference.relative:.2g} (relative) off"
    return says + right * "; each of its calls is right by itself, so that what arrives there is wrong"


def _without_a_place(found: Examination) -> list[str]:
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
    says = f"{_listed(missed)}: trained in the reference, and among the candidate's parameters there is none "
    says += "for it"
    place = Place(missed[0].rpartition(".")[0], "update", 0)
    return PROBE.finding(float(len(missed)), Verdict.BUG, says, place, threshold=0.0, unit="weights")


def _listed(names: list[str]) -> str:
    return ", ".join(names[:4]) + (len(names) > 4) * f" and {len(names) - 4} more"


PROBE = Probe(
    name=FUNCTION,
    question="Fed the same inputs, do both compute the same function, once rounding is taken away?",
    threshold=HALFWAY,
    reason="halfway between rounding, 2^-29 of float32's error in float64, and a wrong function, all of it",
    unit="times what rounding makes of it",
    sees="any difference in the function on this batch (forward, all gradients, buffers, eval mode), for the "
    "whole network and every rewritten module, down to about 1e-11 of a module's result",
    misses="what these inputs do not reach",
    order=20,
    ask=ask,
    asserted=True,
)
