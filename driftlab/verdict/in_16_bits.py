"""The pair in 16 bits, mixed or true, beside its control there.

The control computes with every weight one unit of its 16 bits away (``driftlab.lockstep.control``): about as
much as one more rounding of every product. No wider dtype stands beside the pair that would make rounding
vanish, so a wrong function shows only where it is larger than the rounding of 16 bits, which the probes under
autocast look below.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import median

from driftlab.probes.probe import Probe
from driftlab.record.seed_record import SeedRecord
from driftlab.rounding import BESIDE_16_BITS, BEYOND, UNIT_IN_16_BITS, UNIT_ROUND_OFF
from driftlab.verdict.evidence import place_of
from driftlab.words import Evidence, Excess, Place, Verdict, counted

# Not the weights: what moves them is the same for both, and Adam's first update of a weight whose gradient is
# about 0 has the sign of its rounding.
COMPARED = ("logit_distance", "gradient_distance")
# Leaps of gradients at so many kinks are about as large together as at so many others.
MANY = 10
PAIR = Probe(
    name="16_bits_pair",
    question="Does {role}.{dtype} stay within what control.{dtype} shows?",
    threshold=BESIDE_16_BITS,
    reason="halfway between one rounding of bfloat16, 2^-8, and a wrong function; right rewrites reached 5.8",
    sees="what 16 bits alone show and is larger than their rounding, in outputs and gradients",
    misses="what is smaller than the rounding of 16 bits; the probes under autocast look there",
    unit="times the control's distance",
)
# Where the largest gradient of float16 ends near that dtype's largest number, rounding decides one update.
ONE_UPDATE = 1.0
SKIPPED = Probe(
    name="16_bits_skipped",
    question="Does the loss scaler skip as many updates of {role}.{dtype} as of its reference and control?",
    threshold=ONE_UPDATE,
    reason="rounding decides one update, where a gradient ends near the largest float16",
    sees="an overflow of float16 that the reference does not have",
    unit="updates",
)


# Two curves of losses that are further apart are two to the eye.
PARTED = 0.01
FROM_FLOAT32 = Probe(
    name="from_float32",
    question="How far is reference.{dtype} from reference.float32, and when do their losses part?",
    reason="no threshold: float32 is another precision, not another function",
    sees="describes what the precision alone does to the training; decides nothing",
    unit="distance, relative",
)


def precisions_in_16_bits(record: SeedRecord, role: str) -> list[str]:
    """Those that arms of this role were trained in."""
    arms = [arm.partition(".") for arm in record.arms]
    return [dtype for name, _, dtype in arms if name == role and dtype not in UNIT_ROUND_OFF]


def from_float32(records: Sequence[SeedRecord]) -> list[Evidence]:
    """The reference in each precision of 16 bits beside its float32 self; silent as to verdicts."""
    return [_from_float32(records, dtype) for dtype in precisions_in_16_bits(records[0], "reference")]


def _from_float32(records: Sequence[SeedRecord], dtype: str) -> Evidence:
    probe, arm = replace(FROM_FLOAT32, name=f"{dtype}_{FROM_FLOAT32.name}"), f"reference.{dtype}"
    starts = [record.series("logit_distance", arm).get(0) for record in records]
    if not (starts := [s for s in starts if s is not None]):
        return probe.not_applicable("no seed was trained in both", dtype=dtype).evidence
    parted = [_parts_at(record, arm) for record in records]
    steps = ", ".join("no step" if step is None else f"step {step}" for step in parted)
    n = counted(len(starts), "seed")
    reading = f"outputs {median(starts):.2g} apart before any update (median of {n}); losses part by "
    return probe.evidence(median(starts), None, f"{reading}{PARTED:.0%} at {steps}", dtype=dtype)


def _parts_at(record: SeedRecord, arm: str) -> int | None:
    mine, wide = (record.series("loss", a) for a in (arm, "reference.float32"))
    rows = sorted(mine.keys() & wide.keys())
    return next((s for s in rows if not abs(mine[s] - wide[s]) <= PARTED * abs(wide[s])), None)


def asked_in_16_bits(records: Sequence[SeedRecord], role: str) -> Iterator[tuple[Evidence, Place | None]]:
    """Both questions, for each precision in 16 bits that a candidate was trained in; and where it departs."""
    for dtype in precisions_in_16_bits(records[0], role) if role == "candidate" else ():
        yield _pair(records, role, dtype)
        if any(record.series("skipped_updates", f"{role}.{dtype}") for record in records):
            yield _skipped(records, role, dtype)


def _pair(records: Sequence[SeedRecord], role: str, dtype: str) -> tuple[Evidence, Place | None]:
    probe, names = replace(PAIR, name=f"{dtype}_pair"), {"role": role, "dtype": dtype}
    seeds = [worst for record in records if (worst := _worst(record, role, dtype))]
    if not seeds:
        return probe.not_applicable("there is no such pair with a control", **names).evidence, None
    times = median(e.measured / e.allowed * BESIDE_16_BITS for e in seeds)
    n = f"median of {counted(len(seeds), 'seed')}"
    if times <= BESIDE_16_BITS:
        reading = f"at most {times:.2g} times the control ({n}): rounding"
        return probe.evidence(times, Verdict.ROUND_OFF, reading, **names), None
    first = min((e for e in seeds if e.measured > e.allowed), key=lambda e: (e.step, -e.measured / e.allowed))
    what = f"{first.kind.replace('_', ' ')} {first.measured:.2g} at step {first.step} of seed {first.seed}"
    reading = f"{what}; {times:.2g} times the control ({n}): more than the rounding of {dtype} makes"
    return probe.evidence(times, Verdict.BUG, reading, **names), place_of(first)


def _worst(record: SeedRecord, role: str, dtype: str) -> Excess | None:
    """The row at which the pair stands furthest above its control so far; of several such, the first."""
    found = [row for kind in COMPARED for row in _rows(record, kind, role, dtype)]
    return max(found, key=lambda e: (e.measured / e.allowed, -e.step), default=None)


def _rows(record: SeedRecord, kind: str, role: str, dtype: str) -> Iterator[Excess]:
    """Up to where one of the arms, and not the others, has skipped an update, or kinks have had a say.

    Where more pre-activations of the candidate fell on the other side of a kink than of the control, or the
    control has too few to tell, its gradients leap, and behind the next update weights and outputs. Outputs
    before that are continuous. Of steps that leave no row nobody knows. What overflows in scaled gradients is
    left to the updates that are skipped for it.
    """
    mine, control, own = (record.series(kind, f"{r}.{dtype}") for r in (role, "control", "reference"))
    scaled = kind == "gradient_distance" and bool(record.series("skipped_updates", f"{role}.{dtype}"))
    flips, allowed = (record.series("sign_flips", f"{r}.{dtype}") for r in (role, "control"))
    apart, envelope = _skips_apart(record, role, dtype), UNIT_IN_16_BITS[dtype.partition("-")[0]]
    for number, step in enumerate(sorted(mine.keys() & control.keys())):
        if step != number:
            return
        leaps = flips.get(step, 0.0) > (many if (many := allowed.get(step, 0.0)) >= MANY else 0.0)
        if (apart is not None and step >= apart) or (leaps and kind == "gradient_distance"):
            return
        if math.isfinite(control[step]) and (math.isfinite(mine[step]) or not scaled):
            envelope = max(envelope, control[step], _finite(own.get(step, 0.0)))
            value = _finite(mine[step], BEYOND)
            yield Excess(record.seed, step, kind, value, BESIDE_16_BITS * envelope)
        if leaps:
            return


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if math.isfinite(value) else otherwise


def _skips_apart(record: SeedRecord, role: str, dtype: str) -> int | None:
    """The first row behind which the arms have not skipped equally many updates."""
    arms = [record.series("skipped_updates", f"{r}.{dtype}") for r in (role, "reference", "control")]
    steps = sorted(set.intersection(*(set(series) for series in arms)))
    return next((step for step in steps if len({series[step] for series in arms}) > 1), None)


def _skipped(records: Sequence[SeedRecord], role: str, dtype: str) -> tuple[Evidence, Place | None]:
    """The updates that were skipped by the last row, beside those of reference and control."""
    roles = (role, "reference", "control")
    counts = {r: [_last(record, f"{r}.{dtype}") for record in records] for r in roles}
    own, *others = counts.values()
    apart = [min(abs(mine - other) for other in beside) for mine, *beside in zip(own, *others, strict=True)]
    said = ", ".join(f"{r} {' '.join(f'{c:.0f}' for c in values)}" for r, values in counts.items())
    probe, names = replace(SKIPPED, name=f"{dtype}_skipped"), {"role": role, "dtype": dtype}
    reading, times = f"updates skipped, seed by seed: {said}", float(median(apart))
    if times <= ONE_UPDATE:
        return probe.evidence(times, Verdict.ROUND_OFF, reading, **names), None
    step = next((s for r in records if (s := _skips_apart(r, role, dtype)) is not None), 1)
    return probe.evidence(times, Verdict.BUG, reading, **names), Place(None, "update", max(0, step - 1))


def _last(record: SeedRecord, arm: str) -> float:
    series = record.series("skipped_updates", arm)
    return series[max(series)] if series else 0.0
