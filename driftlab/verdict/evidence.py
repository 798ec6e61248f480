"""What the curves of a lockstep run say, one question at a time, over all seeds together.

The yardstick is the control: an arm that differs from the reference by one ulp in one weight, hence by
rounding and nothing else. The thresholds are those of ``driftlab.rounding``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from driftlab.probes.probe import Probe
from driftlab.record.column_table import columns_of
from driftlab.record.seed_record import SeedRecord
from driftlab.rounding import HALFWAY, HALFWAY_BITS, UNIT_ROUND_OFF
from driftlab.words import Evidence, Excess, Place, Verdict

SAME_BITS = Probe(
    name="same_bits",
    question="Does the {role} differ from its reference in any bit?",
    threshold=0.0,
    reason="equal bits",
    unit="largest relative distance",
    sees="any difference in any logged number",
)
DTYPE_RATIO = Probe(
    name="dtype_ratio",
    question="Before any update: is the float64 pair 2^-29 nearer than the float32 pair, as rounding "
    "predicts?",
    threshold=1 / HALFWAY,
    reason="halfway between rounding, 2^-29, and a wrong function, 1",
    unit="float64 distance over float32 distance",
    sees="a wrong function, which is as wrong in either dtype",
)
FLOAT32_START = Probe(
    name="float32_start",
    question="Before any update, is {role}.float32 as near to its reference as float32 rounding?",
    threshold=HALFWAY_BITS,
    reason="halfway between float32 and the next narrower format in use",
    unit="times the control's distance",
    sees="fewer bits, where float64 says that the function is the same",
)
DRIFT = Probe(
    name="drift",
    question="Has {role}.float32 drifted further than a nudge of one ulp carries control.float32?",
    threshold=HALFWAY_BITS,
    reason="as `float32_start`; what two runs that saturate differ by is far below",
    unit="times the control's distance",
    sees="where training has carried rounding",
    misses="decides nothing where the float32 path was probed",
)

PASSES = (
    ("logit_distance", "forward"),
    ("gradient_distance", "weight gradient"),
    ("weight_distance", "update"),
)


def place_of(excess: Excess) -> Place:
    """The pass of an excess, and the step at fault; which module, a look on the spot would have said."""
    pass_ = dict(PASSES)[excess.kind]
    return Place(None, pass_, excess.since(pass_))


def same_bits(records: Sequence[SeedRecord], role: str) -> Evidence:
    """Is there any difference at all, in any logged number?"""
    largest = _largest_distance(records, role)
    if not any(record.curves for record in records):
        return SAME_BITS.not_applicable("nothing was trained", role=role).evidence
    identical = largest == 0.0
    rows = sum(len(record.curves) for record in records)
    if identical:
        says = f"no distance other than 0 in {rows} rows"
        return SAME_BITS.evidence(largest, Verdict.BIT_IDENTICAL, says, role=role)
    return SAME_BITS.evidence(largest, None, "the two differ; the rest asks why", role=role)


def _largest_distance(records: Sequence[SeedRecord], role: str) -> float | None:
    """NaN where the first outputs are none or NaN's: nothing finite to compare; later ones do not count."""

    def asked(column: str) -> bool:
        return f"/{role}." in column and column.split("/")[0].endswith("_distance")

    tables = [table for record in records for table in (record.curves, record.evaluations)]
    columns = [values for rows in tables for column, values in columns_of(rows) if asked(column)]
    if not columns:
        return None
    first = next(row for rows in tables for row in rows if any(map(asked, row)))
    if any(math.isnan(v) for column, v in first.items() if asked(column) and "logit" in column):
        return math.nan
    return max((v for values in columns for v in values if not math.isnan(v)), default=math.nan)


def dtype_ratio(records: Sequence[SeedRecord], role: str) -> Evidence:
    """Before any update: is the float64 pair 2^-29 nearer than the float32 pair, as rounding predicts?

    A wrong function is as wrong in either dtype. Where float64 shows no more than ``HALFWAY`` units of
    round-off the ratio says nothing against rounding, however exact the float32 pair may be.
    """
    ratios, floor = [], HALFWAY * UNIT_ROUND_OFF["float64"]
    for record in records:
        for kind, _ in PASSES[:2]:
            starts = (record.series(kind, f"{role}.{d}").get(0) for d in ("float64", "float32"))
            wide, narrow = map(_finite, starts)
            if wide is not None and narrow is not None and (narrow or wide > floor):
                ratios.append(wide / max(narrow, UNIT_ROUND_OFF["float32"]))
    if not ratios:
        return DTYPE_RATIO.not_applicable("there are not two dtypes that differ").evidence
    worst = max(ratios)
    reading = f"float64 over float32 distance {_power(worst)}; rounding predicts 2^-29"
    verdict = Verdict.ROUND_OFF if worst <= 1 / HALFWAY else Verdict.BUG
    return DTYPE_RATIO.evidence(worst, verdict, reading)


def _finite(value: float | None) -> float | None:
    """A distance between networks that gave NaN or inf says nothing; that they did is said elsewhere."""
    return value if value is not None and math.isfinite(value) else None


def _power(ratio: float) -> str:
    return f"at most 2^{math.log2(ratio):.1f}" if ratio else "0"


def float32_start(records: Sequence[SeedRecord], role: str, same_function: bool = True) -> Evidence:
    """Before any update, is the float32 pair as near as float32 can be?

    Asked of the logits (continuous across kinks), and of the gradients where no pre-activation flipped.
    Too far apart speaks for fewer bits where float64 says that the function is the same.
    """
    asked = records if role != "control" else ()  # its own yardstick
    ratios = [r for r in (_start_ratio(record, role) for record in asked) if r is not None]
    if not ratios:
        return FLOAT32_START.not_applicable("there is no such pair with a control", role=role).evidence
    measured = median(ratios)
    if measured <= HALFWAY_BITS:
        reading = f"{measured:.2g} times what rounding shows in the control (median of {len(ratios)} seeds)"
        return FLOAT32_START.evidence(measured, Verdict.ROUND_OFF, reading, role=role)
    if not same_function:
        reading = (
            f"{measured:.2g} times what rounding shows in the control: the difference shows in float32 too"
        )
        return FLOAT32_START.evidence(measured, Verdict.BUG, reading, role=role)
    bits = 24 - math.log2(measured)
    reading = f"{measured:.2g} times what rounding shows in the control: about {bits:.0f} bits instead of 24"
    return FLOAT32_START.evidence(measured, Verdict.REDUCED_PRECISION, reading, role=role)


def _start_ratio(record: SeedRecord, role: str) -> float | None:
    def at_start(kind: str, name: str) -> float | None:
        jumps = kind == "gradient_distance" and record.series("sign_flips", name).get(0, 0)
        return None if jumps else _finite(record.series(kind, name).get(0))

    arm, ratios = f"{role}.float32", []
    for kind, _ in PASSES[:2]:
        value = at_start(kind, arm)
        others = (at_start(kind, a) for a in ("control.float32", "reference.float32") if a != arm)
        yardsticks = [other for other in others if other is not None]
        # unit round-off alone is no yardstick: how far a network amplifies it is what the control shows
        if value is not None and yardsticks:
            ratios.append(value / max([UNIT_ROUND_OFF["float32"], *yardsticks]))
    return max(ratios, default=None)


def drift(records: Sequence[SeedRecord], role: str) -> Evidence:
    """At the end of training, has the float32 pair drifted further than the control?"""
    arm, control = f"{role}.float32", "control.float32"
    pairs = [p for r in records if (p := _last_common(r, arm, control))]
    if not pairs or arm == control:
        return DRIFT.not_applicable("there is no control to compare with", role=role).evidence
    mine, theirs = (median(p[i] for p in pairs) for i in (0, 1))
    within = mine / theirs <= HALFWAY_BITS
    flips = [first_flip(r, arm) for r in records]
    reading = (
        f"weights {mine:.2g} apart at the end, the control's {theirs:.2g} (medians of {len(pairs)} seeds)"
    )
    if any(f is not None for f in flips):
        reading += f"; first sign flip at step {min(f for f in flips if f is not None)}"
    return DRIFT.evidence(mine / theirs, Verdict.ROUND_OFF if within else None, reading, role=role)


def first_flip(record: SeedRecord, arm: str) -> int | None:
    """The first logged step at which a pre-activation of ``arm`` has another sign than its against's."""
    return next((s for s, flips in sorted(record.series("sign_flips", arm).items()) if flips > 0), None)


def _last_common(record: SeedRecord, arm: str, other: str) -> tuple[float, float] | None:
    """The weight distances of two arms at the last step that both reached, where the second's is not 0."""
    mine, theirs = (record.series("weight_distance", a) for a in (arm, other))
    step = max(mine.keys() & theirs.keys(), default=None)
    return (mine[step], theirs[step]) if step is not None and theirs[step] > 0 else None
