"""Who trained and who fell over, seed by seed, and whether the control does so too."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from driftlab.records import SeedRecord
from driftlab.statistics import mcnemar_exact
from driftlab.verdict import Evidence, Verdict

# A loss that ends at twice its initial value is worse than not to have trained; batches of one run differ
# by less than that. The tenth of the rows at the end is taken, and its median.
FALLEN = 2.0

# One chance in a hundred of taking equal odds for different ones; it needs at least 8 seeds that disagree.
SIGNIFICANT = 0.01


def fell_over(record: SeedRecord, arm: str) -> bool:
    """Whether an arm blew up (NaN or inf), or ended at more than ``FALLEN`` times the loss it began with."""
    if record.run["arms"][arm]["blown_up_at"] is not None:
        return True
    losses = record.series("loss", arm)
    steps = sorted(losses)
    tail = [losses[s] for s in steps[-max(1, len(steps) // 10) :]]
    return len(steps) > 1 and median(tail) > FALLEN * losses[steps[0]]


def outcomes(records: Sequence[SeedRecord], role: str) -> dict:
    """Who trained and who fell over, per seed, for the float32 arms, and the paired test."""
    arms = [f"{r}.float32" for r in ("reference", role, "control")]
    arms = [a for a in dict.fromkeys(arms) if all(a in r.run["arms"] for r in records)]
    table = {arm: {record.seed: fell_over(record, arm) for record in records} for arm in arms}
    reference = list(table.get("reference.float32", {}).values())
    tests = {
        a: mcnemar_exact(reference, list(t.values())) for a, t in table.items() if a != "reference.float32"
    }
    discordant = {
        a: sum(x != y for x, y in zip(reference, t.values(), strict=True))
        for a, t in table.items()
        if a != "reference.float32"
    }
    return {"fell_over": table, "discordant": discordant, "mcnemar_p": tests}


def stability(table: dict) -> Evidence:
    """Does training itself fall over, and for the control as for the candidate?

    Speaks for ``unstable`` where the reference or the control fell over too, unless the candidate differs
    from the reference in its outcomes, by the paired test at ``SIGNIFICANT``, and the control does not.
    """
    question = "Does the training fall over, and the reference and the control as well as the candidate?"
    fallen = {arm.split(".")[0]: sum(seeds.values()) for arm, seeds in table["fell_over"].items()}
    n = max((len(seeds) for seeds in table["fell_over"].values()), default=0)
    if not any(fallen.values()):
        return Evidence(
            "stability", question, 0.0, 0.0, None, f"nobody fell over in {n} seed{'s' * (n != 1)}"
        )
    p = {arm.split(".")[0]: value for arm, value in table["mcnemar_p"].items()}
    alone = p.get("candidate", 1.0) < SIGNIFICANT <= p.get("control", 1.0)
    shared = any(count for name, count in fallen.items() if name != "candidate")
    counts = ", ".join(f"{name} {count} of {n}" for name, count in fallen.items())
    tests = ", ".join(f"{name} {value:.2g}" for name, value in p.items())
    reading = f"fell over: {counts}; McNemar's exact p against the reference: {tests}"
    verdict = Verdict.UNSTABLE if shared and not alone else None
    return Evidence("stability", question, float(sum(fallen.values())), 0.0, verdict, reading)
