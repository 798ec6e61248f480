"""The pair of candidate and reference over the steps, beside its controls.

The controls' envelope, the largest distance that any of them has shown so far, is what rounding makes of a
difference of one ulp. A pair that leaves it by more than ``HALFWAY`` differs by something else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from driftlab.probes.probe import Probe
from driftlab.record.seed_record import SeedRecord
from driftlab.rounding import HALFWAY, NO_KINK_IN_REACH, UNIT_ROUND_OFF
from driftlab.verdict.evidence import PASSES, first_flip
from driftlab.words import Evidence, Excess, Place, Verdict, counted

PAIR = Probe(
    name="{dtype}_pair",
    question="Does {role}.{dtype} stay within what control.{dtype} shows?",
    threshold=HALFWAY,
    reason="halfway between rounding and a wrong function, in units of the controls' envelope",
    unit="times the controls' distance",
    sees="late faults, states carried over, weights written otherwise that are moved otherwise",
    misses="what sets in after the last update",
)
PAIRS = {dtype: replace(PAIR, name=f"{dtype}_pair") for dtype in ("float64", "float32")}
EVALUATION = Probe(
    name="evaluation",
    question="In eval mode and in its buffers, does {role}.float64 stay within what control.float64 shows?",
    threshold=HALFWAY,
    reason="as `float64_pair`",
    unit="times the controls' distance",
    sees="faults that training mode does not show",
)
# An update that does something else leaves the envelope at once; chaos does so by and by.
LEAP = HALFWAY / 100


def _own_rounding(record: SeedRecord, role: str) -> float:
    """What float32 lets expect of the float64 pair before any update: 2^-29 of its logit distance.

    A rewrite that cancels where the reference does not (a variance in one pass) rounds more than any control.
    Of the logits alone, since gradients leap where a float32 falls on the other side of a kink.
    """
    return record.series("logit_distance", f"{role}.float32").get(0, 0.0) * 2.0**-29


# The square of a distance overflows float64 beyond 1e154; a loss comes before its weights.
TOO_LARGE = 1e100


def _blown_up(record: SeedRecord, dtype: str, step: int) -> bool:
    """Whether the reference's own loss is beyond all measure, so that NaN says nothing about the other."""
    return not abs(record.series("loss", f"reference.{dtype}").get(step, math.nan)) < TOO_LARGE


def window_pair(records: Sequence[SeedRecord], role: str) -> tuple[Evidence, Excess | None]:
    """``pair_with_controls`` in float64, or in float32 where no float64 pair was run."""
    wide = pair_with_controls(records, role, "float64")
    if wide[0].measured is not None or role != "candidate":
        return wide
    narrow = pair_with_controls(records, role, "float32")
    return narrow if narrow[0].measured is not None else wide


def pair_with_controls(
    records: Sequence[SeedRecord], role: str, dtype: str
) -> tuple[Evidence, Excess | None]:
    """Does the pair stay with its controls, from before the first update on?

    The controls' envelope (their largest distance so far, at least one unit round-off) is the yardstick.
    In float64 an excess that starts from a distance so large that a kink may have made it is not counted; in
    float32 none that starts behind the first sign flip.
    """
    excesses, ratios = [], []
    for record in records if role == "candidate" else ():
        found, ratio = _first_excess(record, role, dtype)
        excesses += [found] if found else []
        ratios += [ratio] if ratio is not None else []
    probe, names = PAIRS[dtype], {"role": role, "dtype": dtype}
    if not ratios:
        return probe.not_applicable("there is no such pair with a control", **names).evidence, None
    if not excesses:
        n = counted(len(ratios), "seed")
        reading = f"at most {max(ratios):.2g} times the controls ({n}): rounding"
        return probe.evidence(max(ratios), Verdict.ROUND_OFF, reading, **names), None
    first = min(excesses, key=lambda e: (e.step, -e.measured / e.allowed))
    times = first.measured / first.allowed * HALFWAY
    what = f"{first.kind.replace('_', ' ')} {first.measured:.2g} at step {first.step} of seed {first.seed}"
    how_many = f"{times:.2g} times the controls, in {len(excesses)} of {len(ratios)} seeds"
    why = (
        "rounding would be gone in float64"
        if dtype == "float64"
        else "far more than rounding has made by then"
    )
    return probe.evidence(times, Verdict.BUG, f"{what}, {how_many}: {why}", **names), first


def _controls(record: SeedRecord, dtype: str) -> list[str]:
    return [a for a in record.arms if a.startswith("control") and a.endswith(f".{dtype}")]


def _beside(
    record: SeedRecord, kind: str, arm: str, least: float, table: str = "curves"
) -> Iterator[tuple[int, float, float]]:
    """Each step of an arm: how far it is apart there, and the most that any control has been by then."""
    controls = [record.series(kind, a, table=table) for a in _controls(record, arm.partition(".")[2])]
    most = least
    for step, apart in sorted(record.series(kind, arm, table=table).items()):
        most = max([most, *(control.get(step, 0.0) for control in controls)])  # a NaN is no more than it
        yield step, apart, most


def _first_excess(record: SeedRecord, role: str, dtype: str) -> tuple[Excess | None, float | None]:
    """The first row that cannot be rounding, and the largest ratio to the controls' envelope before it."""
    found, largest = [], None
    flipped = first_flip(record, f"{role}.{dtype}") if dtype == "float32" else None
    own = _own_rounding(record, role) if dtype == "float64" else 0.0
    least = max(UNIT_ROUND_OFF[dtype], own)
    for kind, _ in PASSES if _controls(record, dtype) else ():
        before, previous = 0.0, 0.0
        for step, apart, envelope in _beside(record, kind, f"{role}.{dtype}", least):
            if flipped is not None and step > flipped:
                break
            if math.isnan(apart) and _blown_up(record, dtype, step):
                break
            if not apart <= HALFWAY * envelope:
                if dtype == "float32" or before < NO_KINK_IN_REACH:
                    moved = kind == "weight_distance" and previous <= envelope * LEAP
                    found.append(Excess(record.seed, step, kind, apart, HALFWAY * envelope, moved))
                break
            previous = apart
            largest, before = max(largest or 0.0, apart / envelope), max(before, apart)
    order = [kind for kind, _ in PASSES]
    first = min(found, key=lambda e: (e.step, order.index(e.kind)), default=None)
    if first and any(e.moved and e.step == first.step for e in found):
        first = replace(first, moved=True)
    return first, largest if largest is not None or first is None else 0.0


def evaluation(records: Sequence[SeedRecord], role: str) -> tuple[Evidence, Place | None]:
    """In eval mode and in its buffers, does the float64 pair stay with its controls?"""
    seen = [
        found
        for record in (records if role == "candidate" else ())
        if _controls(record, "float64")
        for kind, pass_ in (("buffer_distance", "buffer"), ("eval_logit_distance", "eval"))
        if (found := _worst_evaluation(record, role, kind, pass_))
    ]
    if not seen:
        return EVALUATION.not_applicable("there is no such pair with a control", role=role).evidence, None
    bad = [s for s in seen if not s[0] <= HALFWAY]
    ratio, place = min(bad, key=lambda s: s[1].step) if bad else max(seen, key=lambda s: s[0])
    reading = f"at most {ratio:.2g} times the controls"
    if bad:
        reading = f"{ratio:.2g} times the controls, in {place.pass_} at step {place.step}"
    verdict = Verdict.BUG if bad else Verdict.ROUND_OFF
    return EVALUATION.evidence(ratio, verdict, reading, role=role), place if bad else None


def _worst_evaluation(record: SeedRecord, role: str, kind: str, pass_: str) -> tuple[float, Place] | None:
    """The first ratio to the envelope that is too large, else the largest."""
    narrow = record.series(kind, f"{role}.float32", table="evaluations")
    own = narrow[min(narrow)] * 2.0**-29 if narrow else 0.0
    least, worst = max(UNIT_ROUND_OFF["float64"], own, _own_rounding(record, role)), None
    for step, apart, envelope in _beside(record, kind, f"{role}.float64", least, "evaluations"):
        if math.isnan(apart) and _blown_up(record, "float64", step):
            break
        ratio = apart / envelope
        if worst is None or not ratio <= worst[0]:
            worst = ratio, Place(None, pass_, step)
        if not ratio <= HALFWAY:
            break
    return worst


def first_excess(records: Sequence[SeedRecord], narrow: bool) -> Excess | None:
    """The first excess of the candidate's pair, in training, else in eval mode or in its buffers.

    Args:
        narrow: whether the candidate computes in fewer bits: its float32 pair then looks like a bug's.
    """
    pair, excess = window_pair(records, "candidate")
    if excess and not (narrow and pair.probe == PAIRS["float32"].name):
        return excess
    evidence, place = evaluation(records, "candidate")
    if place is None or evidence.measured is None:
        return None
    kind = "buffer_distance" if place.pass_ == "buffer" else "eval_logit_distance"
    carried = any(  # whether the weights were further apart by then than those of any control
        step <= place.step and not apart <= most
        for record in records
        for step, apart, most in _beside(
            record, "weight_distance", "candidate.float64", UNIT_ROUND_OFF["float64"]
        )
    )
    return Excess(records[0].seed, place.step, kind, evidence.measured, HALFWAY, carried=carried)


def honoured(record: SeedRecord) -> SeedRecord:
    """The record less a float64 pair that is none: the candidate computes in fewer bits all the same."""
    if record.run.get("float64", True):
        return record
    arm = "candidate.float64"
    curves, evaluations = (
        [{c: v for c, v in row.items() if not c.endswith(f"/{arm}")} for row in table]
        for table in (record.curves, record.evaluations)
    )
    run = record.run | {"arms": {a: v for a, v in record.run["arms"].items() if a != arm}}
    return SeedRecord(record.seed, curves, evaluations, run)
