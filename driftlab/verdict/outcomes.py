"""Which runs trained and which diverged, seed by seed, and whether the control does so too."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from statistics import fmean, median, stdev

from driftlab.probes.probe import Probe
from driftlab.record.seed_record import SeedRecord
from driftlab.verdict.in_16_bits import precisions_in_16_bits
from driftlab.verdict.statistics import equal_means, mcnemar_exact
from driftlab.words import Evidence, Verdict, counted

# A loss that ends at twice its initial value is worse than not to have trained; batches of one run differ
# by less than that. The tenth of the rows at the end is taken, and its median: a training that leaps up and
# comes down again (1.99, 7.59, 5.69, 1.71, ..., 1.57, as high learning rates make it) has learned, and one
# batch of many is no end.
FALLEN = 2.0

# A training that has learned was seen to leap to four times its first loss, see above; at ten times it runs
# away. What a network gives there, float64 rounds too coarsely to be told from another function: of two right
# pairs gradients were 5e-11 off at 850 times the first loss.
RUNS_AWAY = 10.0

# One chance in a hundred of taking equal odds for different ones; it needs at least 8 seeds that disagree.
SIGNIFICANT = 0.01

# The usual level of each of two one-sided tests; that of a claim of difference is SIGNIFICANT.
EQUAL = 0.05

STABILITY = Probe(
    name="stability",
    question="Does the training diverge, for the reference and the control as well as for the candidate?",
    threshold=0.0,
    reason="no run diverges",
    unit="trainings that diverged",
    sees="an unstable training",
)
EQUAL_ACCURACY = Probe(
    name="equal_accuracy",
    question="Do {arm} and its reference end with the same test accuracy?",
    threshold=EQUAL,
    reason="the level of two one-sided tests within the reference's spread over seeds",
    unit="p",
    sees="describes a long run; decides nothing",
)
DISAGREEMENT = Probe(
    name="disagreement",
    question="On what share of the test set do {arm} and its reference disagree, beside the control?",
    reason="its threshold is the control's largest",
    unit="share of the test set",
    sees="describes a long run; decides nothing",
)


def part_of_a_training(record: SeedRecord) -> SeedRecord:
    """A record of some updates in the middle of one."""
    return replace(record, run=record.run | {"part_of": "a training"})


def fell_over(record: SeedRecord, arm: str) -> bool:
    """Whether an arm blew up (NaN or inf), or ended at more than ``FALLEN`` times the loss it began with.

    Its end is the median over the last tenth of its rows, see ``ended_above``. A look into a training
    (``part_of``) has no end: of a few noisy batches the last may be the hardest.
    """
    if record.run["arms"][arm]["blown_up_at"] is not None:
        return True
    if record.run.get("part_of"):
        return False
    losses = record.series("loss", arm)
    steps = sorted(losses)
    return len(steps) > 1 and ended_above(
        losses[steps[0]], [losses[s] for s in steps[-tail_of(len(steps)) :]]
    )


def before_it_ran_away(record: SeedRecord, arm: str) -> int | None:
    """The last step of an arm before its loss is beyond ``RUNS_AWAY`` times its first; None if never.

    Nor where the first is zero, which is no yardstick.
    """
    losses = record.series("loss", arm)
    steps = sorted(losses)
    first = losses[steps[0]] if steps else 0.0
    far = (after for after in pairwise(steps) if not losses[after[1]] - first <= (RUNS_AWAY - 1) * abs(first))
    return next(far, (None,))[0] if first else None  # NaN is far as well


def tail_of(rows: int) -> int:
    """How many of the rows, or steps, of a run are its end: a tenth."""
    return max(1, rows // 10)


def ended_above(first: float, tail: Sequence[float]) -> bool:
    """Whether the median loss of the end is more than ``FALLEN`` times the one that it began with."""
    # of a loss below zero: risen by as much as it lay below
    return median(tail) - first > (FALLEN - 1) * abs(first)


def outcomes(records: Sequence[SeedRecord], role: str) -> dict:
    """Which runs trained and which diverged, per seed, for the float32 arms, and the paired test."""
    arms = [f"{r}.float32" for r in ("reference", role, "control")]
    arms = [a for a in dict.fromkeys(arms) if all(a in r.run["arms"] for r in records)]
    table = {arm: {record.seed: fell_over(record, arm) for record in records} for arm in arms}
    reference = list(table.get("reference.float32", {}).values())
    others = {arm: list(t.values()) for arm, t in table.items() if arm != "reference.float32"}
    return {
        "fell_over": table,
        "discordant": {
            arm: sum(x != y for x, y in zip(reference, fell, strict=True)) for arm, fell in others.items()
        },
        "mcnemar_p": {arm: mcnemar_exact(reference, fell) for arm, fell in others.items()},
    }


def stability(table: dict) -> Evidence:
    """Does training itself diverge, and for the control as for the candidate?

    Speaks for ``unstable`` where the reference or the control diverged too, unless the candidate differs
    from the reference in its outcomes, by the paired test at ``SIGNIFICANT``, and the control does not.
    """
    fallen = {arm.split(".")[0]: sum(seeds.values()) for arm, seeds in table["fell_over"].items()}
    n = max((len(seeds) for seeds in table["fell_over"].values()), default=0)
    if not any(fallen.values()):
        return STABILITY.evidence(0.0, None, f"no run diverged in {counted(n, 'seed')}")
    p = {arm.split(".")[0]: value for arm, value in table["mcnemar_p"].items()}
    alone = p.get("candidate", 1.0) < SIGNIFICANT <= p.get("control", 1.0)
    shared = any(count for name, count in fallen.items() if name != "candidate")
    counts = ", ".join(f"{name} {count} of {n}" for name, count in fallen.items())
    tests = ", ".join(f"{name} {value:.2g}" for name, value in p.items())
    reading = f"diverged: {counts}; McNemar's exact p against the reference: {tests}"
    verdict = Verdict.UNSTABLE if shared and not alone else None
    return STABILITY.evidence(float(sum(fallen.values())), verdict, reading)


def accuracy_evidence(records: Sequence[SeedRecord], role: str) -> list[Evidence]:
    """Final accuracy and disagreement over the seeds; silent as to verdicts.

    Of the reference in 16 bits, where it was trained in them, the accuracy beside float32's too.

    Summers and Dinneen ("Nondeterminism and instability in neural network optimization", ICML 2021): one
    changed bit makes as much disagreement as all other sources of randomness, so the control's is the
    yardstick.
    """
    arm = f"{role}.float32"
    last = [r for record in records if (r := _last_evaluation(record, arm))]
    found = [_equal_accuracy(last, arm), _disagreement(last, arm)]
    for dtype in precisions_in_16_bits(records[0], "reference"):
        other = f"reference.{dtype}"
        last = [r for record in records if (r := _last_evaluation(record, other))]
        equal = _equal_accuracy(last, other)
        found.append(equal and replace(equal, probe=f"{dtype}_accuracy"))
    return [e for e in found if e]


def _last_evaluation(record: SeedRecord, arm: str) -> Mapping[str, float] | None:
    """The last row in which both this arm and the reference were evaluated."""
    wanted = {f"test_accuracy/{arm}", "test_accuracy/reference.float32"}
    return next((row for row in reversed(record.evaluations) if wanted <= row.keys()), None)


def _equal_accuracy(rows: Sequence[Mapping[str, float]], arm: str) -> Evidence | None:
    if len(rows) < 3 or arm == "reference.float32":
        return None
    own = [row["test_accuracy/reference.float32"] for row in rows]
    differences = [row[f"test_accuracy/{arm}"] - a for row, a in zip(rows, own, strict=True)]
    margin = stdev(own)
    p = equal_means(differences, margin)
    equal = "equal" if p < EQUAL else "not shown to be equal: more seeds would tell"
    reading = (
        f"mean difference {100 * fmean(differences):+.2f} points over {len(rows)} seeds; within "
        f"+-{100 * margin:.2f}, the spread "
        f"of the reference over seeds, they are {equal} (two one-sided tests)"
    )
    return EQUAL_ACCURACY.evidence(p, None, reading, arm=arm)


def _disagreement(rows: Sequence[Mapping[str, float]], arm: str) -> Evidence | None:
    mine = [row[f"disagreement/{arm}"] for row in rows if f"disagreement/{arm}" in row]
    control = [row["disagreement/control.float32"] for row in rows if "disagreement/control.float32" in row]
    if not mine or not control or arm == "control.float32":
        return None
    reading = (
        f"{100 * median(mine):.1f} % of the test set, the control {100 * median(control):.1f} % "
        f"(medians of {counted(len(mine), 'seed')}; the control at most {100 * max(control):.1f} %)"
    )
    return DISAGREEMENT.evidence(median(mine), None, reading, threshold=max(control), arm=arm)
