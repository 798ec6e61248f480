"""What the curves of a lockstep run say, one question at a time, over all seeds together.

The yardstick is the control: an arm that differs from the reference by one ulp in one weight, hence by
rounding and nothing else. Thresholds sit halfway, in powers of two, between what the two hypotheses
predict, so that neither is favoured (``HALFWAY``, ``HALFWAY_BITS``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from driftlab.column_table import columns_of
from driftlab.records import SeedRecord
from driftlab.verdict import Evidence, Verdict

UNIT_ROUND_OFF = {"float32": 2.0**-24, "float64": 2.0**-53}

# Rounding shrinks by 2^-29 from float32 to float64, a wrong function by nothing. A float64 pair that
# stands 2^14.5 above its control is as far from the one prediction as from the other.
HALFWAY = 2.0**14.5
# float32 keeps 24 bits of a product's operands, TF32 and float16 11, bfloat16 8. The nearest of these
# errs 2^13 more than float32, so halfway is 2^6.5.
HALFWAY_BITS = 2.0**6.5
# Below this float64 distance a rounding error does not reach a kink by chance: fewer than 1e8
# pre-activations, at most about one unit of density each, make less than one flip in a hundred steps.
NO_KINK_IN_REACH = 1e-10

PASSES = (
    ("logit_distance", "forward"),
    ("gradient_distance", "weight gradient"),
    ("weight_distance", "update"),
)


def same_bits(records: Sequence[SeedRecord], role: str) -> Evidence:
    """Is there any difference at all, in any logged number?"""
    largest = _largest_distance(records, role)
    identical = largest == 0.0
    rows = sum(len(record.curves) for record in records)
    return Evidence(
        "same_bits",
        f"Does the {role} differ from its reference in any bit?",
        largest,
        0.0,
        Verdict.BIT_IDENTICAL if identical else None,
        f"no distance other than 0 in {rows} rows" if identical else "the two differ; the rest asks why",
    )


def _largest_distance(records: Sequence[SeedRecord], role: str) -> float | None:
    """NaN where the first one of all is NaN: nothing finite to compare; a later one does not count."""

    def asked(column: str) -> bool:
        return f"/{role}." in column and column.split("/")[0].endswith("_distance")

    tables = [table for record in records for table in (record.curves, record.evaluations)]
    columns = [values for rows in tables for column, values in columns_of(rows) if asked(column)]
    if not columns:
        return None
    first = next(v for rows in tables for row in rows for column, v in row.items() if asked(column))
    return first if math.isnan(first) else max(v for values in columns for v in values if not math.isnan(v))


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
    question = (
        "Before any update: is the float64 pair 2^-29 nearer than the float32 pair, as rounding predicts?"
    )
    if not ratios:
        return Evidence(
            "dtype_ratio", question, None, 1 / HALFWAY, None, "there are not two dtypes that differ"
        )
    worst = max(ratios)
    reading = f"float64 over float32 distance {_power(worst)}; rounding predicts 2^-29"
    verdict = Verdict.ROUND_OFF if worst <= 1 / HALFWAY else Verdict.BUG
    return Evidence("dtype_ratio", question, worst, 1 / HALFWAY, verdict, reading)


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
    question = f"Before any update, is {role}.float32 as near to its reference as float32 rounding?"
    if not ratios:
        return Evidence(
            "float32_start", question, None, HALFWAY_BITS, None, "there is no such pair with a control"
        )
    measured = median(ratios)
    if measured <= HALFWAY_BITS:
        reading = f"{measured:.2g} times what rounding shows in the control (median of {len(ratios)} seeds)"
        return Evidence("float32_start", question, measured, HALFWAY_BITS, Verdict.ROUND_OFF, reading)
    if not same_function:
        reading = (
            f"{measured:.2g} times what rounding shows in the control: the difference shows in float32 too"
        )
        return Evidence("float32_start", question, measured, HALFWAY_BITS, Verdict.BUG, reading)
    bits = 24 - math.log2(measured)
    reading = f"{measured:.2g} times what rounding shows in the control: about {bits:.0f} bits instead of 24"
    return Evidence("float32_start", question, measured, HALFWAY_BITS, Verdict.REDUCED_PRECISION, reading)


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
    question = f"Has {role}.float32 drifted further than a nudge of one ulp carries control.float32?"
    if not pairs or arm == control:
        return Evidence("drift", question, None, HALFWAY_BITS, None, "there is no control to compare with")
    mine, theirs = (median(p[i] for p in pairs) for i in (0, 1))
    within = mine / theirs <= HALFWAY_BITS
    flips = [first_flip(r, arm) for r in records]
    reading = (
        f"weights {mine:.2g} apart at the end, the control's {theirs:.2g} (medians of {len(pairs)} seeds)"
    )
    if any(f is not None for f in flips):
        reading += f"; first sign flip at step {min(f for f in flips if f is not None)}"
    return Evidence(
        "drift", question, mine / theirs, HALFWAY_BITS, Verdict.ROUND_OFF if within else None, reading
    )


def first_flip(record: SeedRecord, arm: str) -> int | None:
    """The first logged step at which a pre-activation of ``arm`` has another sign than its against's."""
    return next((s for s, flips in sorted(record.series("sign_flips", arm).items()) if flips > 0), None)


def _last_common(record: SeedRecord, arm: str, other: str) -> tuple[float, float] | None:
    """The weight distances of two arms at the last step that both reached, where the second's is not 0."""
    mine, theirs = (record.series("weight_distance", a) for a in (arm, other))
    step = max(mine.keys() & theirs.keys(), default=None)
    return (mine[step], theirs[step]) if step is not None and theirs[step] > 0 else None
