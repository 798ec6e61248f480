"""The page of ``long_run.py``: growth along a long training, and what tells a fault that sets in late."""

from __future__ import annotations

import math
from collections.abc import Sequence

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Answer, Table
from driftlab.rounding import HALFWAY
from scripts.long_run_parts.figure import figure
from scripts.long_run_parts.rules import CONTROLS, Network, free_pair_stays, grown, times
from scripts.long_run_parts.words import LOOKS, found_at, scores, sentence, two, verdicts, whole
from suite.showing.wording import Column, share_of, spread, table

STEPS_OF_THE_PAIR = (10, 30, 100, 200, 300, 500, 700, 800, 1_000)


def answer(networks: Sequence[Network], steps: int) -> Answer:
    """From the right rewrite first, then the faults; ``steps`` are those of the whole training."""
    tables = [_rules(networks), _windows(networks, steps), _pair(networks), _ends(networks, steps)]
    return Answer(sentence(networks), tables, [figure(networks)])


def _rules(networks: Sequence[Network]) -> Table:
    lines = [(step, score) for step in LOOKS for score in scores(networks, step).values()]
    columns = [
        Column("step", "after step", lambda line: f"{line[0]:,}"),
        Column("rule", "rule", lambda line: line[1].rule.words),
        Column("right", "right", lambda line: f"{line[1].right} of {line[1].n}"),
        Column(
            "interval",
            "95 % interval (%)",
            lambda line: " to ".join(f"{100 * x:.0f}" for x in line[1].interval),
        ),
        Column("alarms", "same trainings not cleared", lambda line: f"{line[1].alarms} of {line[1].same}"),
        Column(
            "missed",
            "faults not caught",
            lambda line: f"{line[1].missed} of {line[1].wrong}" if line[1].wrong else None,
        ),
    ]
    said = (
        "Each rule is asked about the training as it was after so many updates. A fault counts once it has "
        "set in; before, the training is the same. The trainings of one seed share their reference, so the "
        "intervals (Clopper and Pearson) are nominal. What a rule could not be asked is left out: no "
        "accuracy is measured at step 30, and float64 ends at step 1,000."
    )
    return table("rules", "How often each rule is right, the later the training", lines, columns, said)


def _windows(networks: Sequence[Network], steps: int) -> Table:
    growth = {arm: grown(networks[0], arm) for arm in CONTROLS}
    excess = [times(n) for n in networks]
    columns = [
        Column("step", "window from step", lambda w: f"{w:,}"),
        Column(
            "rate",
            "learning rate (share of the first)",
            lambda w: f"{(1 + math.cos(math.pi * w / steps)) / 2:.2g}",
        ),
        *(
            Column(f"growth_{arm}", f"growth of {arm} an update", lambda w, a=arm: spread(growth[a][w], two))
            for arm in CONTROLS
        ),
        *(
            Column(
                f"times_{i}", f"{n.words}: times the controls", lambda w, i=i: spread(excess[i].get(w, []))
            )
            for i, n in enumerate(networks)
        ),
    ]
    said = (
        "A window puts candidate and controls where the reference is and follows them for six updates. "
        "Growth of a distance that only adds up is 1.2 (as a random walk) to 1.43 (in a straight line). "
        f"Times the controls: in float64, a bug from {HALFWAY:,.0f} on."
    )
    return table(
        "windows", "Growth along the run, and what the windows say", growth[CONTROLS[0]], columns, said
    )


def _pair(networks: Sequence[Network]) -> Table:
    def apart(arm: str, network: Network, step: int) -> str | None:
        found = (r.series("weight_distance", arm).get(step) for r in network.records)
        return spread([value for value in found if value is not None])

    columns = [
        Column("step", "after step", lambda s: f"{s:,}"),
        Column("control", "control.float64 (relative)", lambda s: apart(CONTROLS[0], networks[0], s)),
    ]
    for i, n in enumerate(networks):
        columns += [
            Column(f"apart_{i}", f"{n.words} (relative)", lambda s, n=n: apart("candidate.float64", n, s)),
            Column(
                f"says_{i}",
                "called a bug by then",
                lambda s, n=n: share_of(not free_pair_stays(r, s) for r in n.records),
            ),
        ]
    said = (
        "Weight distance of the float64 arms from their reference: median (least to greatest). A bug is what "
        "leaves the control's largest distance so far by more than HALFWAY, unless a kink can have made it."
    )
    return table("pair", "What the free-running float64 pair says", STEPS_OF_THE_PAIR, columns, said)


def _ends(networks: Sequence[Network], steps: int) -> Table:
    judged = {n.words: verdicts(n) for n in networks}

    def counts(words: str) -> str:
        found = [j.verdict for j in judged.get(words, ())]
        return ", ".join(f"{v} {found.count(v)}" for v in dict.fromkeys(found))

    def last(kind: str, arm: str, r: SeedRecord) -> float:
        return r.series(kind, arm, table="evaluations")[steps]

    def apart(arm: str, n: Network) -> str | None:
        return spread([100 * last("disagreement", arm, r) for r in n.records])

    def accuracy(arm: str, n: Network) -> str | None:
        found = [
            last("test_accuracy", arm, r) - last("test_accuracy", "reference.float32", r) for r in n.records
        ]
        return spread([100 * value for value in found], lambda v: f"{v:+.1f}")

    lines = [("control: one weight moved by one ulp", CONTROLS[1], networks[0])]
    lines += [(n.words, "candidate.float32", n) for n in networks]
    columns = [
        Column("network", "network", lambda line: line[0]),
        Column("n", "seeds", lambda line: len(line[2].records)),
        Column("verdict", "verdict a seed", lambda line: counts(line[0]) or None),
        Column(
            "step",
            "set in at step, by the verdict",
            lambda line: spread(found_at(judged.get(line[0], ())), whole),
        ),
        Column("accuracy", "test accuracy off (points)", lambda line: accuracy(line[1], line[2])),
        Column("disagreement", "test images classified otherwise (%)", lambda line: apart(line[1], line[2])),
    ]
    said = (
        f"After {steps:,} updates in float32: median (least to greatest) over seeds, against the reference."
    )
    return table("ends", "Where each training ends", lines, columns, said)
