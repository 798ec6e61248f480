"""All probes that need no training, in their order, and what each found."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from driftlab.evidence import HALFWAY, HALFWAY_BITS
from driftlab.probes.arithmetic import CannotRun
from driftlab.probes.comparison import Comparison, Difference, compare
from driftlab.probes.determinism import Wobble, repeats
from driftlab.probes.locating import Local, first_wrong, slightly_wrong
from driftlab.probes.randomness import is_random, same_distribution
from driftlab.probes.rewritten import Rewritten, examine
from driftlab.probes.same_start import Start, start_differences
from driftlab.probes.updates import THRESHOLD, Update, wrong_update
from driftlab.subject import Subject
from driftlab.verdict import Evidence, Place, Verdict

Finding = tuple[Evidence, Place | None]


@dataclass
class Examination:
    """What the probes found.

    Attributes:
        findings: in the order in which they were asked; each with its place, where it has one.
        float64: whether the candidate's float64 is float64: it runs, and keeps the bits.
        comparable: whether runs of the two can be compared step by step (they draw the same random numbers).
    """

    findings: list[Finding] = field(default_factory=list)
    float64: bool = True
    comparable: bool = True

    def add(self, evidence: Evidence, place: Place | None = None) -> None:
        self.findings.append((evidence, place))

    def supports(self, verdict: Verdict) -> bool:
        return any(evidence.supports is verdict for evidence, _ in self.findings)


def examined(subject: Subject, batch: tuple[object, object], steps: int) -> Examination:
    """Every probe on one batch; ``steps`` is the number of updates that the optimizers are compared over.

    Raises:
        CannotRun: one of the two does not run on the batch at all.
    """
    found = Examination()
    if _determinism(subject, batch, found):
        return found
    start = start_differences(subject.reference, subject.candidate, subject.fold)
    _same_start(start, found)
    whole = subject.on(batch)
    network = compare(subject.reference, subject.candidate, whole, subject.fold, seed=subject.seed)
    found.float64 = "float64" not in network.failed and not network.float64_not_honoured
    local = subject.local(batch)
    _function(network, local, whole, found)
    if found.comparable:
        _rewritten_modules(local, found)
        _precision(network, local, found)
    _updates(subject, steps, found)
    return found


def _determinism(subject: Subject, batch: tuple[object, object], found: Examination) -> bool:
    whole = subject.on(batch)
    question = "Does each network repeat itself, bit for bit, from the same state, batch and random seed?"
    for role in ("reference", "candidate"):
        wobble = repeats(getattr(subject, role), whole, subject.seed)
        if wobble:
            found.add(*_wobble(role, wobble, question))
            return True
    found.add(Evidence("determinism", question, 0.0, 0.0, None, "both do"))
    return False


def _wobble(role: str, wobble: Wobble, question: str) -> Finding:
    place = Place(wobble.module, wobble.pass_, 0)
    reading = f"the {role} does not: {place} moves by {wobble.floor:.2g} from run to run; no difference below means anything"
    return Evidence("determinism", question, wobble.floor, 0.0, Verdict.NONDETERMINISTIC, reading), place


def _same_start(start: list[Start], found: Examination) -> None:
    question = "Do both start from the same weights, buffers, modes and trained parameters?"
    said = "; ".join(s.what for s in start) or "they do"
    gravest = next((s for s in start if s.supports is Verdict.BUG), None) or next(
        (s for s in start if s.supports), None
    )
    measured = gravest.measured if gravest else 0.0
    supports, place = (gravest.supports, gravest.place) if gravest else (None, None)
    found.add(Evidence("same_start", question, measured, 0.0, supports, said), place)


FUNCTION = "Fed the same inputs, do both compute the same function, once rounding is taken away?"


def _function(network: Comparison, local: Local, whole, found: Examination) -> None:
    wrong = network.wrong()
    place = first_wrong(local) if wrong else slightly_wrong(local)
    if wrong and _drawn_otherwise(local, whole, place, found):
        return
    if place is None and not wrong:
        worst = max((_excess(d, network) for d in network.differences), default=0.0)
        found.add(Evidence("function", FUNCTION, worst * HALFWAY, HALFWAY, Verdict.ROUND_OFF, _clean(network, worst)))
        return
    module, difference = place or ("", wrong[0])
    where = Place(module, difference.pass_, 0)
    reading = _wrong_reading(difference, where, network)
    excess = min(_excess(difference, network), 1e300)
    found.add(Evidence("function", FUNCTION, excess * HALFWAY, HALFWAY, Verdict.BUG, reading), where)


def _excess(difference: Difference, network: Comparison) -> float:
    return difference.excess("shadow" if "shadow" in network.ran else "float64")


def _clean(network: Comparison, worst: float) -> str:
    if network.same_bits:
        return "they do, bit for bit"
    how = "their float32 path computed in float64" if "shadow" in network.ran else "float64"
    reading = f"they do: in {how} they differ by at most {worst * HALFWAY:.2g} times what rounding makes"
    if "float64" in network.failed:
        reading += f"; the candidate cannot run in float64 itself ({network.failed['float64']})"
    elif network.float64_not_honoured:
        reading += "; given float64 the candidate computes in fewer bits all the same, which is no difference in the function"
    return reading


def _wrong_reading(difference: Difference, where: Place, network: Comparison) -> str:
    if difference.overflows:
        return f"{where}: the candidate's float32 is not finite where the reference's is"
    named = f" ({difference.name})" if difference.pass_ == "weight gradient" else ""
    how = "with the rounding taken away" if "shadow" in network.ran else "in float64"
    return (
        f"{where}{named}, fed the reference's exact inputs, is {difference.relative:.2g} (relative) apart {how}; "
        "rounding would be gone"
    )


def _drawn_otherwise(local: Local, whole, place, found: Examination) -> bool:
    """Whether what differs is only in which order random numbers are drawn; then it is said, and settled."""
    if not (is_random(local.reference, whole) or is_random(local.candidate, whole)):
        return False
    drawn = _innermost_random(local)
    question = "Do random layers draw from the same distribution in both, though not the same numbers?"
    others = [n for n in local.calls if n in local.pairs and not _related(n, drawn) and local.wrong(n)]
    if drawn is None or (others and place and place[0] != drawn):
        return False
    mine, theirs = local.pair(drawn) if drawn else (local.reference, local.candidate)
    call = local.calls[drawn][0] if drawn else whole
    draws = same_distribution(mine, theirs, call)
    where = Place(drawn, "forward", 0)
    if not draws.same:
        return False
    reading = (
        f"the random layers of {drawn or 'the network'} draw their numbers in another order, from the same distribution "
        f"(means and spreads within {draws.sigmas:.1f} standard errors): runs cannot be compared step by step"
    )
    found.comparable = False
    found.add(Evidence("random_streams", question, draws.sigmas, 6.0, Verdict.NONDETERMINISTIC, reading), where)
    return True


def _related(name: str, other: str | None) -> bool:
    """Whether one of the two modules is, or lies in, the other."""
    if other is None:
        return False
    return name == other or name.startswith(f"{other}.") or other.startswith(f"{name}.") or not other


def _innermost_random(local: Local) -> str | None:
    """The smallest pair of modules that differs and whose outputs depend on the random state; "" the network."""
    names = [n for n in local.calls if n in local.pairs and local.wrong(n)]
    drawn = [
        n
        for n in names
        if is_random(local.pair(n)[0], local.calls[n][0]) or is_random(local.pair(n)[1], local.calls[n][0])
    ]
    inner = [n for n in drawn if not any(o != n and o.startswith(f"{n}.") for o in drawn)]
    return inner[0] if inner else ""


def _rewritten_modules(local: Local, found: Examination) -> None:
    question = "Do the rewritten modules agree on small integers, bit for bit, and at other sizes and values?"
    agreeing = [n for n in local.rewritten() if local.comparisons(n) and local.wrong(n) is None]
    if not agreeing:
        found.add(Evidence("rewritten_modules", question, None, 0.0, None, "no rewritten module stands alone"))
        return
    seen = examine(local, agreeing)
    place = None
    if seen.faults:
        fault = seen.faults[0]
        place = Place(fault.module, fault.pass_, 0)
        reading = f"{place}: {fault.relative:.2g} (relative) apart on {fault.inputs}, in {len(seen.faults)} of {len(agreeing)} modules"
        found.add(Evidence("rewritten_modules", question, fault.relative, 0.0, Verdict.BUG, reading), place)
        return
    found.add(Evidence("rewritten_modules", question, 0.0, 0.0, None, _agreed(seen, len(agreeing))))


def _agreed(seen: Rewritten, modules: int) -> str:
    parts = [f"{modules} module{'s' * (modules != 1)}: {seen.exact} integer checks bit for bit"]
    if seen.inexact:
        parts.append(f"{seen.inexact} not exact, within rounding (constants that are no binary fractions, or fewer bits)")
    if seen.inapplicable:
        parts.append(f"{len(seen.inapplicable)} not exact in integers in the reference either")
    parts.append(f"{seen.other} comparisons at other sizes and values within rounding")
    parts += [f"{name} keeps {bits} bits of its operands" for name, bits in seen.bits.items()]
    parts += [f"refused: {r}" for r in seen.refused[:3]]
    return "; ".join(parts)


def _precision(network: Comparison, local: Local, found: Examination) -> None:
    """Is the candidate as precise as float32 promises, module by module, against the truth?"""
    question = "Against the float64 reference, is the candidate's float32 as near as the reference's?"
    if "shadow" not in network.ran and "float64" not in network.ran:
        found.add(Evidence("precision", question, None, HALFWAY_BITS, None, "there is no float64 to hold it against"))
        return
    narrow = _first_narrow(network, local)
    if narrow is None:
        worst = max((d.lost for d in network.differences), default=0.0)
        reading = f"its error is at most {worst:.2g} times the reference's"
        found.add(Evidence("precision", question, worst, HALFWAY_BITS, None, reading))
        return
    module, difference = narrow
    bits = 24 - float(torch.log2(torch.tensor(difference.lost)))
    place = Place(module, difference.pass_, 0)
    reading = f"{place}: an error {difference.lost:.2g} times the reference's, about {max(bits, 1):.0f} bits instead of 24"
    found.add(Evidence("precision", question, difference.lost, HALFWAY_BITS, Verdict.REDUCED_PRECISION, reading), place)


def _first_narrow(network: Comparison, local: Local) -> tuple[str, Difference] | None:
    """The innermost module, first in execution order, that loses bits by itself; "" where only the whole does."""
    names = [n for n in local.rewritten() if any(c.narrow() for c in local.comparisons(n))]
    for name in names:
        differences = [d for c in local.comparisons(name) for d in c.narrow()]
        if local.wrong(name) is None:
            return name, differences[0]
    return ("", network.narrow()[0]) if network.narrow() else None


def _updates(subject: Subject, steps: int, found: Examination) -> None:
    question = "Given the same gradients, do the two optimizers move folded weights alike?"
    try:
        update = wrong_update(
            subject.reference, subject.candidate, subject.fold, subject.optimizer, subject.candidate_optimizer, steps
        )
    except Exception as error:  # an optimizer that needs a closure, or a state that the probe does not give it
        message = " ".join(str(error).split())[:120]
        found.add(Evidence("update", question, None, THRESHOLD, None, f"not asked: {type(error).__name__}: {message}"))
        return
    if update is None:
        found.add(Evidence("update", question, 0.0, THRESHOLD, None, f"they do, over {steps} updates"))
        return
    found.add(*_update(update, question))


def _update(update: Update, question: str) -> Finding:
    why = f": {update.why}" if update.why else ""
    reading = f"{update.tensor} goes another way in update {update.place.step}, {update.measured:.2g} (relative){why}"
    return Evidence("update", question, update.measured, THRESHOLD, Verdict.BUG, reading), update.place


def untrained(subject: Subject, network: Comparison) -> list[str]:
    """Reference parameters that get a gradient and have nothing in the candidate that could hold them."""
    spare = {n for n, p in subject.candidate.named_parameters() if p.requires_grad} & set(subject.fold.unused)
    trained = {n for n, p in subject.reference.named_parameters() if p.requires_grad}
    return [n for n in subject.fold.unplaced if n in trained] if not spare else []


__all__ = ["Examination", "examined", "nn", "untrained"]
