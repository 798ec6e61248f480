"""The page of ``long_run.py``: growth along a long training, and what tells a fault that sets in late."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from bench import habits
from bench.habits import Score
from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Answer, Table
from driftlab.rounding import HALFWAY
from driftlab.verdict.rules import judge
from driftlab.words import Judgement, Verdict
from scripts.long_run_parts.figure import figure
from scripts.long_run_parts.rules import DRIFTLAB, RULES, Network, free_pair_stays
from scripts.long_run_parts.series import CONTROLS, grown, times
from suite.showing.wording import Column, counted, sentences, share_of, spread, table

LOOKS = (30, 300, 3_000)
STEPS_OF_THE_PAIR = (10, 30, 100, 200, 300, 500, 700, 800, 1_000)
GONE = 1e-3  # a float64 control so far from its reference has lost all that float64 has over float32


def answer(networks: Sequence[Network], steps: int) -> Answer:
    """From the right rewrite first, then the faults; ``steps`` are those of the whole training."""
    tables = [_rules(networks), _windows(networks, steps), _pair(networks), _ends(networks, steps)]
    return Answer(_sentence(networks), tables, [figure(networks)])


def scores(networks: Sequence[Network], step: int) -> dict[str, Score]:
    """How often each rule was right about the trainings as they were after so many updates."""
    found = {}
    for rule in RULES:
        said = [(n.same(step), rule.same(record, step)) for n in networks for record in n.records]
        if any(answer is not None for _, answer in said):
            found[rule.key] = habits.score(rule, said)
    return found


def verdicts(network: Network) -> list[Judgement]:
    """Of each seed by itself, at the end of the training."""
    return [judge([record]) for record in network.records]


def found_at(judged: Sequence[Judgement]) -> list[int]:
    """The steps that those name which say bug, and where."""
    return [j.where.step for j in judged if j.verdict is Verdict.BUG and j.where]


def _sentence(networks: Sequence[Network]) -> str:
    last = scores(networks, LOOKS[-1])
    faults = [n for n in networks if n.begins is not None]
    other = [f"{s.rule.words}: {s.right} of {s.n}" for key, s in last.items() if key != DRIFTLAB.key]
    mine = last[DRIFTLAB.key]
    growth = grown(networks[0], CONTROLS[0])
    first, final = min(growth), max(growth)
    most = max(growth, key=lambda step: median(growth[step]))
    return sentences(
        f"At step {LOOKS[-1]:,}, with both faults at work, driftlab's verdict is right about {mine.right} of "
        f"{mine.n} trainings; {'; '.join(other)}.",
        *(_found(n) for n in faults),
        f"In a window of six updates the drift of the control grows {spread(growth[first], _two)} times an "
        f"update at step {first:,}, most at step {most:,} ({spread(growth[most], _two)} times), and "
        f"{spread(growth[final], _two)} times at step {final:,}; rounding that only adds up grows 1.2 to "
        "1.43 times.",
        _gone(networks[0]),
    )


def _found(network: Network) -> str:
    judged = verdicts(network)
    steps = found_at(judged)
    pair = share_of(not free_pair_stays(r, LOOKS[-1]) for r in network.records)
    where = f", which it puts at step {spread(steps, _whole)}" if steps else ""
    bugs, n = sum(j.verdict is Verdict.BUG for j in judged), counted(len(judged), "seed")
    return (
        f"The {network.words} ends as `bug` in {bugs} of {n}{where}; the free-running float64 pair "
        f"leaves its control in {pair}."
    )


def _gone(network: Network) -> str:
    """When float64 is no longer any better than float32."""
    gone = []
    for record in network.records:
        apart = record.series("weight_distance", CONTROLS[0])
        gone.append(next((s for s in sorted(apart) if apart[s] > GONE), None))
    steps = [s for s in gone if s is not None]
    where = f", first at step {spread(steps, _whole)}" if steps else ""
    return (
        f"The float64 control is more than {GONE:g} of the weights away by its end in {len(steps)} of "
        f"{counted(len(gone), 'seed')}{where}: from there on the free-running pair says nothing."
    )


def _two(value: float) -> str:
    return f"{value:.2f}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


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
            Column(f"growth_{arm}", f"growth of {arm} an update", lambda w, a=arm: spread(growth[a][w], _two))
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
            lambda line: spread(found_at(judged.get(line[0], ())), _whole),
        ),
        Column("accuracy", "test accuracy off (points)", lambda line: accuracy(line[1], line[2])),
        Column("disagreement", "test images classified otherwise (%)", lambda line: apart(line[1], line[2])),
    ]
    said = (
        f"After {steps:,} updates in float32: median (least to greatest) over seeds, against the reference."
    )
    return table("ends", "Where each training ends", lines, columns, said)
