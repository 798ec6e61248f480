"""Is what runs compiled what is written? Everything else that is asked, is asked of the code as written."""

from __future__ import annotations

import math

from driftlab.arithmetic.as_compiled import Compiled
from driftlab.arithmetic.difference import Difference, Nature
from driftlab.arithmetic.passes import CannotRunError
from driftlab.arithmetic.recording import record
from driftlab.network.compiled import compiled_parts, eager
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.rounding import BEYOND, HALFWAY, HALFWAY_BITS
from driftlab.words import AS_COMPILED, Finding, Place, Status, Verdict


def ask(found: Examination) -> list[Finding]:
    """Of each network in which something is compiled."""
    if not found.compiled:
        return [PROBE.not_applicable("nothing is compiled", role="each network")]
    if found.supports(Verdict.BUG):
        return [PROBE.not_applicable("asked of the same function alone", role="each network")]
    answers = [_answer(found, role) for role in found.compiled]
    return [max(answers, key=lambda f: _GRAVITY.index(f.evidence.supports))]


_GRAVITY = (Verdict.BIT_IDENTICAL, Verdict.ROUND_OFF, Verdict.REDUCED_PRECISION, None, Verdict.BUG)


def _answer(found: Examination, role: str) -> Finding:
    network, pair = getattr(found.pair, role), found.pair
    optimizer = pair.optimizer if role == "reference" else pair.candidate_optimizer
    compiled = Compiled(network, found.whole, pair.seed, optimizer if found.trains else None)
    if not compiled.known:
        return _unknown(compiled, role)
    wrong, narrow = compiled.comparison.wrong(), compiled.narrow()
    if any(d.overflows or d.immeasurable for d in wrong):
        return _accused(found, role, compiled, wrong[0], Nature.ANOTHER_FUNCTION, "float32")
    if wrong and _shows(wrong[0], narrow):
        return _accused(found, role, compiled, wrong[0], compiled.nature(wrong[0], "float64"), "float64")
    if narrow:
        return _accused(found, role, compiled, narrow[0], compiled.nature(narrow[0], "float32"), "float32")
    return _same(compiled, role, wrong)


def _shows(d: Difference, narrow: list[Difference]) -> bool:
    """Whether float32, in which the networks are handed over, shows what float64 does, or could not."""
    return bool(narrow) or not d.shown_otherwise("float64")


def _same(compiled: Compiled, role: str, wrong: list[Difference]) -> Finding:
    comparison = compiled.comparison
    worst = max((d.lost for d in comparison.differences if math.isfinite(d.lost)), default=0.0)
    if comparison.same_bits:
        says, supports = f"it does, bit for bit, in {' and in '.join(comparison.ran)}", Verdict.BIT_IDENTICAL
    else:
        says, supports = f"it does: its error is at most {worst:.2g} times that as written", Verdict.ROUND_OFF
    if wrong:
        says += (
            f"; in float64 alone it is {wrong[0].relative:.2g} (relative) off, which {compiled.own} never "
        )
        says += "shows"
    elif "float64" in comparison.failed:
        says += f"; in {compiled.own} alone, since in float64 it raises {comparison.failed['float64']}"
    return PROBE.finding(worst, supports, says, role=f"the {role}")


def _unknown(compiled: Compiled, role: str) -> Finding:
    """There is no exact result, so that float32 as written is all that there is to hold it against."""
    worst = max(compiled.comparison.differences, key=lambda d: d.float32_units, default=None)
    units = worst.float32_units if worst else 0.0
    if units <= compiled.whole.precision.narrower:
        supports = Verdict.BIT_IDENTICAL if compiled.comparison.same_bits else Verdict.ROUND_OFF
        says = f"it does, to {units:.2g} units of {compiled.own}"
        return PROBE.finding(units, supports, says, role=f"the {role}")
    says = f"{units:.2g} units of {compiled.own} off; without an exact result nobody can say which is right"
    return PROBE.finding(units, None, says, status=Status.REFUSED, role=f"the {role}")


def _accused(
    found: Examination, role: str, compiled: Compiled, d: Difference, nature: Nature, arithmetic: str
) -> Finding:
    lost = min(d.lost, BEYOND)
    if nature is Nature.PASSING:
        says = f"its error is {lost:.2g} times that as written, on these inputs and not on ones nearby"
        return PROBE.finding(lost, Verdict.ROUND_OFF, f"{says}: rounding at a kink", role=f"the {role}")
    place = Place(_module(found, role, compiled), d.pass_, 0)
    off = f"{{place}}: the {role} as compiled is {_off(d, arithmetic):.2g} (relative) off what is written"
    if nature is Nature.UNTOLD:
        says = f"{off}; a small move of the inputs changes so much that fewer bits and a fault look alike"
        return PROBE.finding(lost, None, says, place, role=f"the {role}")
    if nature is Nature.FEWER_BITS:
        bits = max(1.0, d.precision.bits - math.log2(max(lost, 1.0)))
        says = f"{off}, with the grain of a rounding: about {bits:.0f} bits instead of {d.precision.bits}"
        return PROBE.finding(lost, Verdict.REDUCED_PRECISION, says, place, role=f"the {role}")
    shown = d.precision.name if arithmetic == "float32" else arithmetic
    says = f"{off}, in {shown}, and as far off nearby: another function"
    if arithmetic == "float64":
        excess = min(d.excess("float64"), BEYOND) * HALFWAY
        return PROBE.finding(excess, Verdict.BUG, says, place, threshold=HALFWAY, role=f"the {role}")
    return PROBE.finding(lost, Verdict.BUG, says, place, role=f"the {role}")


def _off(d: Difference, arithmetic: str) -> float:
    apart = d.apart["float64"] if arithmetic == "float64" else d.errors["candidate"]
    return apart / d.size if d.size else math.inf


def _module(found: Examination, role: str, compiled: Compiled) -> str:
    """The compiled module that is off by itself, by the reference's name; "" where none is."""
    parts = compiled_parts(compiled.network)
    if not parts:
        return ""
    name = parts[0] if len(parts) == 1 else _first_wrong(compiled, parts)
    known = found.pair.reference_name(name) if role == "candidate" else name
    return known or ""


def _first_wrong(compiled: Compiled, parts: list[str]) -> str:
    with eager():
        calls = record(compiled.network, compiled.whole, compiled.seed)
    for name in sorted((n for n in parts if n in calls), key=list(calls).index):
        part = Compiled(compiled.network.get_submodule(name), calls[name][0], compiled.seed, None)
        try:
            if part.comparison.wrong() or part.narrow():
                return name
        except CannotRunError:
            continue
    return ""


PROBE = Probe(
    name=AS_COMPILED,
    question="As compiled, does {role} compute what is written, as precisely?",
    threshold=HALFWAY_BITS,
    reason="as `precision` in float32 and as `function` in float64; what is too far off is fewer bits where "
    "its error is another one after a move by 2^-7 (bfloat16's grain) of weights and inputs, and another "
    "function where it stays",
    unit="times the rounding error of what is written",
    sees="what `torch.compile` makes of a network, or of functions that it calls: outputs, gradients, "
    "buffers, eval mode and the outputs after an update, in float32 and, where it compiles, in float64",
    misses="other sizes and later steps; scripted and exported code and kernels run as they are in every "
    "probe",
    order=75,
    ask=ask,
    asserted=True,
    as_compiled=True,
)
