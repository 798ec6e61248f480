"""How the evidence becomes a verdict: ``docs/verdict.md`` says it at length.

In this order, the first that applies:

1. no record -> ``inconclusive``
2. a probe shows another function, update or state -> ``bug``, at its place. Networks that do not repeat
   themselves, or draw their random numbers in another order, are told from that first -> ``nondeterministic``
3. no difference in any bit -> ``bit_identical``; ``reduced_precision`` where the candidate takes bits from
   float32 in the whole process, which is not so while it is measured
4. the pair leaves its controls in float64 (float32, where the candidate has no float64), and a look on the
   spot does not find that to be rounding -> ``bug``; the same in 16 bits alone, where it was trained there
5. none of the arms or probes that could tell -> ``inconclusive``
6. the same function, in fewer bits -> ``reduced_precision``
7. the same function, and the reference or the control diverges in some seed -> ``unstable``; the candidate
   alone -> ``inconclusive``
8. the same function -> ``round_off``

A number above its threshold that nothing explains makes 3 and 8 ``inconclusive`` (``verdict.unexplained``).

Where a probe that decides failed in driftlab's own code, only rule 2 holds; all else is ``inconclusive``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from driftlab.record.seed_record import SeedRecord
from driftlab.verdict import envelope
from driftlab.verdict import evidence as curves
from driftlab.verdict.envelope import PAIRS
from driftlab.verdict.evidence import DRIFT, DTYPE_RATIO, FLOAT32_START, SAME_BITS
from driftlab.verdict.in_16_bits import FROM_FLOAT32, asked_in_16_bits, from_float32
from driftlab.verdict.missing import missing
from driftlab.verdict.outcomes import STABILITY, accuracy_evidence, stability
from driftlab.verdict.outcomes import outcomes as outcomes_over_seeds
from driftlab.verdict.unexplained import explained, is_above, unexplained
from driftlab.words import (
    AS_COMPILED,
    EXCESS,
    FUNCTION,
    PROCESS_SETTINGS,
    Evidence,
    Finding,
    Judgement,
    Place,
    Status,
    Verdict,
    counted,
    settled_by,
)


def judge(records: Sequence[SeedRecord], subject: str = "candidate") -> Judgement:
    """The verdict about one role from the probes and the curves of all seeds.

    Args:
        records: finished seeds of one experiment; their ``run["probes"]`` hold what the probes found.
        subject: "candidate", "control" (the nudge itself) or "reference" (float32 against float64).
    """
    if not records:
        return Judgement(Verdict.INCONCLUSIVE, "no seed has finished: run the same command again", [])
    probes = _probes(records) if subject == "candidate" else []
    honoured = [envelope.honoured(r) for r in records]
    settled = settled_by(probes)
    if settled is None:
        return _from_curves(honoured, subject, probes)
    verdict, finding = settled
    evidence, outcomes = [f.evidence for f in probes], {}
    if any(r.curves for r in records):
        shown = _from_curves(honoured, subject, probes)
        evidence, outcomes = shown.evidence, shown.outcomes
    finding = _since(finding, honoured)
    opening = "not the same function: " if verdict is Verdict.BUG else ""
    headline = f"{opening}{finding.evidence.reading} ({counted(len(records), 'seed')})"
    return Judgement(verdict, headline, evidence, finding.place, outcomes)


def _since(finding: Finding, records: Sequence[SeedRecord]) -> Finding:
    """The finding, from the step at which the curves show what a probe found beside the training's path."""
    place = finding.place
    if place is None or place.step or not finding.off_path:
        return finding
    _, excess = envelope.window_pair(records, "candidate")
    return finding.at_step(excess.since(place.pass_)) if excess else finding


def _probes(records: Sequence[SeedRecord]) -> list[Finding]:
    """One finding a probe: of the first seed in which it speaks against rounding, else of the first."""
    found: dict[str, Finding] = {}
    for finding in (f for record in records for f in record.found()):
        known = found.get(finding.evidence.probe)
        if known is None or (_speaks(finding) and not _speaks(known)):
            found[finding.evidence.probe] = finding
    return list(found.values())


def _speaks(finding: Finding) -> bool:
    if finding.evidence.status is Status.FAILED or (finding.decides and is_above(finding.evidence)):
        return True
    return finding.evidence.supports not in (None, Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def _is_narrow(finding: Finding) -> bool:
    """Whether the pair was measured in fewer bits: what it makes of the process was put back."""
    evidence = finding.evidence
    return evidence.supports is Verdict.REDUCED_PRECISION and evidence.probe != PROCESS_SETTINGS


def _from_curves(records: Sequence[SeedRecord], subject: str, probes: list[Finding]) -> Judgement:
    narrow = next((f for f in probes if _is_narrow(f)), None)
    unseen = next((f.evidence for f in probes if f.evidence.supports is Verdict.INCONCLUSIVE), None)
    pair, excess = envelope.window_pair(records, subject)
    fewer_bits = narrow or (unseen and unseen.probe == FUNCTION)
    if fewer_bits and pair.probe == PAIRS["float32"].name:  # which put it as far apart as a bug would
        pair, excess = replace(pair, supports=None), None
    evaluation, eval_place = envelope.evaluation(records, subject)
    if any(f.evidence.probe == EXCESS and f.evidence.supports is Verdict.ROUND_OFF for f in probes):
        (pair, evaluation), excess, eval_place = map(_carried_on, (pair, evaluation)), None, None
    outcomes = outcomes_over_seeds(records, subject)
    place = curves.place_of(excess) if excess else eval_place
    in_16_bits = list(asked_in_16_bits(records, subject))
    if narrow:  # which puts it as far apart there
        in_16_bits = [(replace(e, supports=None), None) for e, _ in in_16_bits]
    measured = [
        curves.same_bits(records, subject),
        pair,
        curves.dtype_ratio(records, subject),
        evaluation,
        curves.float32_start(records, subject, place is None),
        curves.drift(records, subject),
        *(e for e, _ in in_16_bits),
    ]
    evidence = explained(measured, {f.evidence.probe: f.evidence for f in probes})
    deciding = [*(f.evidence for f in probes if f.decides), *evidence[1:]]  # that they differ is no fault
    evidence += [stability(outcomes), *accuracy_evidence(records, subject), *from_float32(records)]
    found = {e.probe: e for e in evidence} | {f.evidence.probe: f.evidence for f in probes}
    failed = next((f.evidence for f in probes if f.decides and f.evidence.status is Status.FAILED), None)
    controlled = all("control.float64" in r.arms for r in records)
    beyond = next((e for e, where in in_16_bits if where), None) if place is None else None
    place = place or next((where for _, where in in_16_bits if where), None)
    verdict = Verdict.INCONCLUSIVE if failed else _verdict(found, subject, place, controlled)
    if unseen and verdict is not Verdict.BUG:
        verdict = Verdict.INCONCLUSIVE
    strange = unexplained(deciding) if verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL) else None
    verdict = Verdict.INCONCLUSIVE if strange else verdict
    if verdict is Verdict.REDUCED_PRECISION and narrow:
        place = narrow.place
    headline = (
        _failed(failed)
        if failed
        else _open(strange)
        if strange
        else f"not the same function in 16 bits: {beyond.reading}"
        if beyond and verdict is Verdict.BUG
        else _headline(verdict, found, subject, place, records, outcomes)
    )
    if unseen and not failed and verdict is Verdict.INCONCLUSIVE:
        headline = f"{unseen.reading} ({counted(len(records), 'seed')})"
    named = place if verdict in (Verdict.BUG, Verdict.REDUCED_PRECISION) else None
    return Judgement(verdict, headline, [f.evidence for f in probes] + evidence, named, outcomes)


def _carried_on(evidence: Evidence) -> Evidence:
    """Evidence of the curves, after a look on the spot that found both equal there."""
    if not is_above(evidence):
        return evidence
    reading = f"{evidence.reading}; looked at on the spot, both agree: rounding, carried on"
    return replace(evidence, supports=Verdict.ROUND_OFF, reading=reading)


# Which evidence says that both compute the same function. The control is its own yardstick, so the ratio
# of the dtypes decides; the reference in float32 is compared with itself in float64.
_SAME_FUNCTION = {
    "candidate": (PAIRS["float64"].name, FUNCTION),
    "control": (DTYPE_RATIO.name,),
    "reference": (FLOAT32_START.name,),
}


def _verdict(found: dict[str, Evidence], subject: str, place: Place | None, controlled: bool) -> Verdict:
    supports = {probe: e.supports for probe, e in found.items()}
    # the window runs compiled code as it was written, so that the first step has a say as well
    asked = [
        e for p in (FUNCTION, AS_COMPILED) if (e := found.get(p)) and e.status is not Status.NOT_APPLICABLE
    ]
    if supports[SAME_BITS.name] and all(e.supports is Verdict.BIT_IDENTICAL for e in asked):
        return supports.get(PROCESS_SETTINGS) or Verdict.BIT_IDENTICAL
    if place is not None:
        return Verdict.BUG
    same_function = next((supports[p] for p in _SAME_FUNCTION[subject] if supports.get(p)), None)
    if same_function is Verdict.BUG:
        return Verdict.BUG
    if same_function is None and supports[SAME_BITS.name] is None:
        return Verdict.INCONCLUSIVE
    if same_function is Verdict.BIT_IDENTICAL and found[SAME_BITS.name].measured is None:
        return same_function  # evaluation alone: there are no curves
    probed = FUNCTION in supports
    narrow = [p for p in supports if supports[p] is Verdict.REDUCED_PRECISION]
    if narrow and (narrow != [FLOAT32_START.name] or not probed):
        return Verdict.REDUCED_PRECISION
    if found[STABILITY.name].measured:
        return supports[STABILITY.name] or Verdict.INCONCLUSIVE
    # without a float32 pair there is no drift to ask about: float64 beside its control decides; and where the
    # float32 path itself was probed, how far its rounding carries it decides nothing
    in_float64_alone = controlled and found[FLOAT32_START.name].measured is None
    drifts_alike = supports[DRIFT.name] or subject == "control" or in_float64_alone or probed
    return Verdict.ROUND_OFF if drifts_alike else Verdict.INCONCLUSIVE


def _all_fell(outcomes: dict) -> bool:
    """Whether rounding decided nothing: no arm of float32 came through."""
    return all(fell for seeds in outcomes["fell_over"].values() for fell in seeds.values())


_SENTENCES = {
    Verdict.BIT_IDENTICAL: "the {subject} does not differ from its reference in any bit",
    Verdict.ROUND_OFF: "the same function: what differs is rounding, and it grows as it does in the control",
    Verdict.REDUCED_PRECISION: "the same function, computed in fewer bits than {promise}",
    Verdict.UNSTABLE: "the same function, but the training is unstable: rounding decides which runs diverge",
    Verdict.BUG: "not the same function: {place}, by more than rounding makes",
}


def _failed(evidence: Evidence) -> str:
    return f"no verdict, for a mistake of driftlab's own: the probe {evidence.probe} {evidence.reading}"


def _open(evidence: Evidence) -> str:
    above = f"{evidence.probe} measures {evidence.measured:.3g}, above {evidence.threshold:.3g}"
    return f"{above}, and nothing explains it: {evidence.reading}"


def _headline(
    verdict: Verdict,
    found: dict[str, Evidence],
    subject: str,
    place: Place | None,
    records: Sequence[SeedRecord],
    outcomes: dict,
) -> str:
    n, seeds = len(records), counted(len(records), "seed")
    narrow = [p for p, e in found.items() if e.supports is Verdict.REDUCED_PRECISION]
    if verdict is Verdict.REDUCED_PRECISION and narrow == [PROCESS_SETTINGS]:
        return f"the same function, in a process of fewer bits: {found[PROCESS_SETTINGS].reading} ({seeds})"
    if verdict is Verdict.ROUND_OFF and found[SAME_BITS.name].measured is None:
        return (
            f"the same function in eval mode, which alone was asked about: what differs is rounding ({seeds})"
        )
    if verdict is Verdict.UNSTABLE and _all_fell(outcomes):
        says = "the same function, but the training diverges, the reference's as well, in every run"
        return f"{says} ({seeds}): choose a smaller learning rate"
    if verdict is not Verdict.INCONCLUSIVE:
        in_16_bits = any(probe.endswith(FROM_FLOAT32.name) for probe in found)
        promise = "the reference keeps" if in_16_bits else "float32 promises"
        named = {"subject": subject, "place": place or subject, "promise": promise}
        return _SENTENCES[verdict].format(**named) + f" ({seeds})"
    first = found[SAME_BITS.name].measured
    if first is not None and math.isnan(first):
        return f"nothing finite to compare from the first step on ({seeds}): check data, loss, learning rate"
    if all(p not in found or found[p].measured is None for p in _SAME_FUNCTION[subject]):
        return f"{missing(records, subject)} ({seeds})"
    if found[STABILITY.name].measured:
        return f"the {subject} alone diverged in {seeds}: run more seeds, seed=0..{max(2 * n, 10) - 1}"
    return (
        f"there is no control to compare with in {seeds}: run again with roles=[reference,candidate,control]"
    )
