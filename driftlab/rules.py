"""How the evidence of a lockstep run becomes a verdict.

In this order, the first that applies:

1. no record, or none of the arms that could tell -> ``inconclusive``
2. no difference in any bit -> ``bit_identical``
3. the float64 pair leaves its control, in training, in eval mode or in its buffers -> ``bug``: rounding
   is 2^-29 smaller in float64, a wrong function is not
4. the same function in float64, but the float32 pair starts further apart than float32 rounding ->
   ``reduced_precision``
5. the same function, and the reference or the control falls over in some seed -> ``unstable``
6. the same function, but the candidate alone falls over -> ``inconclusive``
7. the same function in float64 -> ``round_off``
"""

from __future__ import annotations

from collections.abc import Sequence

from driftlab import evidence as ask
from driftlab.outcomes import outcomes as outcomes_over_seeds
from driftlab.outcomes import stability
from driftlab.records import SeedRecord
from driftlab.verdict import Evidence, Judgement, Place, Verdict


def judge(records: Sequence[SeedRecord], subject: str = "candidate") -> Judgement:
    """The verdict about one role from the curves of all seeds.

    Args:
        records: finished seeds of one experiment.
        subject: "candidate", "control" (the nudge itself) or "reference" (float32 against float64).
    """
    if not records:
        return Judgement(Verdict.INCONCLUSIVE, "no seed has finished: run the same command again", [])
    pair, excess = ask.float64_pair(records, subject)
    evaluation, eval_place = ask.evaluation(records, subject)
    outcomes = outcomes_over_seeds(records, subject)
    place = _place(records, excess, eval_place)
    evidence = [
        ask.same_bits(records, subject),
        pair,
        ask.dtype_ratio(records, subject),
        evaluation,
        ask.float32_start(records, subject, place is None),
        ask.drift(records, subject),
        stability(outcomes),
    ]
    found = {e.probe: e for e in evidence}
    controlled = all("control.float64" in record.arms for record in records)
    verdict = _verdict(found, subject, place, controlled)
    headline = _headline(verdict, found, subject, place, len(records))
    return Judgement(verdict, headline, evidence, place if verdict is Verdict.BUG else None, outcomes)


# Which evidence says that both compute the same function. The control is its own yardstick, so the ratio
# of the dtypes decides; the reference in float32 is compared with itself in float64.
_SAME_FUNCTION = {"candidate": "float64_pair", "control": "dtype_ratio", "reference": "float32_start"}


def _verdict(found: dict[str, Evidence], subject: str, place: Place | None, controlled: bool) -> Verdict:
    supports = {probe: e.supports for probe, e in found.items()}
    if supports["same_bits"]:
        return Verdict.BIT_IDENTICAL
    if place is not None or supports["float64_pair"] is Verdict.BUG:
        return Verdict.BUG
    same_function = supports[_SAME_FUNCTION[subject]]
    if same_function is Verdict.BUG:
        return Verdict.BUG
    if same_function is None:
        return Verdict.INCONCLUSIVE
    if supports["float32_start"] is Verdict.REDUCED_PRECISION:
        return Verdict.REDUCED_PRECISION
    if found["stability"].measured:
        return supports["stability"] or Verdict.INCONCLUSIVE
    # without a float32 pair there is no drift to ask about: float64 beside its control decides
    in_float64_alone = controlled and found["float32_start"].measured is None
    drifts_alike = supports["drift"] or subject == "control" or in_float64_alone
    return Verdict.ROUND_OFF if drifts_alike else Verdict.INCONCLUSIVE


def _place(
    records: Sequence[SeedRecord], excess: ask.Excess | None, eval_place: Place | None
) -> Place | None:
    """Where the difference arises: by the local probe if that found it, else by the pass of the first excess.

    Weights that differ at a row were moved apart by the update before it.
    """
    if excess is None and eval_place is None:
        return None
    for record in records:
        if local := record.run.get("local"):
            return Place(local["module"], local["pass"], 0)
    if excess is None:
        return eval_place
    pass_ = dict(ask.PASSES)[excess.kind]
    return Place(None, pass_, excess.step - 1 if pass_ == "update" and excess.step else excess.step)


_SENTENCES = {
    Verdict.BIT_IDENTICAL: "the {subject} does not differ from its reference in any bit",
    Verdict.ROUND_OFF: "the same function: what differs is rounding, and it grows as it does in the control",
    Verdict.REDUCED_PRECISION: "the same function in float64, computed in fewer bits than float32 promises",
    Verdict.UNSTABLE: "the same function, but the training sits on an edge: round-off decides who falls over",
    Verdict.BUG: "not the same function: {place}, in float64 too",
}


def _headline(verdict: Verdict, found: dict[str, Evidence], subject: str, place: Place | None, n: int) -> str:
    seeds = f"{n} seed{'s' if n > 1 else ''}"
    if verdict is not Verdict.INCONCLUSIVE:
        return _SENTENCES[verdict].format(subject=subject, place=place or subject) + f" ({seeds})"
    if found[_SAME_FUNCTION[subject]].measured is None:
        return "float32 alone cannot tell rounding from a bug: run again with dtypes=[float32,float64]"
    if found["stability"].measured:
        return f"the {subject} alone fell over in {seeds}: run more seeds, seed=0..{max(2 * n, 10) - 1}"
    return (
        f"there is no control to compare with in {seeds}: run again with roles=[reference,candidate,control]"
    )
