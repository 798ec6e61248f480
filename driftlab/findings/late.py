"""What the window shows that the first step did not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from driftlab.evidence import HALFWAY
from driftlab.findings.determinism import is_compiled
from driftlab.findings.function import ask_function
from driftlab.findings.precision import ask_precision
from driftlab.fold import listed
from driftlab.late import Snapshots, is_wrong
from driftlab.pairs import Excess, window_pair
from driftlab.probes.determinism import repeats
from driftlab.records import SeedRecord
from driftlab.rules import OFF_THE_PATH, settled_by
from driftlab.subject import Subject
from driftlab.verdict import Evidence, Finding, Place, Verdict
from driftlab.window import CONTROLS, Batches, Window, same_rows

REPEAT = "Does the window repeat itself, bit for bit, when it is run a second time?"
RARE = 32  # repetitions in search of what struck once
LAST = "At the end of the window, on the same weights, do both still compute the same function, as precisely?"


def ask_repeat(snapshots: Snapshots, record: SeedRecord, second: SeedRecord) -> Finding:
    """The float32 pair twice over: what strikes rarely has as many chances again."""
    subject = snapshots.subject
    if is_compiled(subject.reference) or is_compiled(subject.candidate):
        # its first calls are profiled, and the two runs do not evaluate at the same steps
        return Finding(Evidence("repeat", REPEAT, None, 0.0, None, "not asked of compiled code"))
    step = same_rows(record, second)
    if step is None:
        updates = len(second.curves) - 1
        return Finding(Evidence("repeat", REPEAT, 0.0, 0.0, None, f"it does, {updates} updates"))
    place = _wavering(snapshots, step)
    reading = f"it does not, from step {step} on ({place}): no difference between the two means anything"
    return Finding(Evidence("repeat", REPEAT, None, 0.0, Verdict.NONDETERMINISTIC, reading), place)


def _wavering(snapshots: Snapshots, step: int) -> Place:
    """Which of the two does not repeat itself, and in which module, if it shows again."""
    found = snapshots.at(step)
    subject = found.subject
    for network in (subject.candidate, subject.reference):
        if wobble := repeats(network, found.whole, subject.seed, RARE):
            name = subject.reference_name(wobble.module) if network is subject.candidate else wobble.module
            return Place(name, wobble.pass_, step)
    return Place(None, "forward", step)


def ask_last(
    snapshots: Snapshots, steps: int, earlier: Callable[[], Snapshots] | None = None
) -> list[Finding]:
    """The pair after the last update, put on the same weights.

    Args:
        earlier: makes the snapshots to search for the first wrong step, where these hold the last alone.
    """
    last = snapshots.at(steps)
    if not is_wrong(last) and not last.network.narrow():
        return [Finding(Evidence("last_step", LAST, 0.0, HALFWAY, None, f"they do, at step {steps}"))]
    if is_wrong(last):
        searched = earlier() if earlier else snapshots
        first = searched.first_wrong(steps)
        return locate(searched, first) or locate(snapshots, steps)
    ask_precision(last)
    return [_late(f, steps) for f in last.findings if f.evidence.supports]


def locate(snapshots: Snapshots, step: int) -> list[Finding]:
    """Where the pair differs at ``step``: module and pass, on the same weights."""
    found = snapshots.at(step)
    ask_function(found)
    return [
        _late(f, step)
        for f in found.findings
        if f.evidence.supports in (Verdict.BUG, Verdict.NONDETERMINISTIC)
    ]


def _late(finding: Finding, step: int) -> Finding:
    moved = finding.at_step(step)
    return replace(moved, evidence=replace(moved.evidence, probe=f"{finding.evidence.probe}_later"))


def ask_since(finding: Finding, subject: Subject, batches: Batches, steps: int, float64: bool) -> Finding:
    """The step from which a fault shows in this training, in place of that of the probe that found it."""
    place = finding.place
    if finding.evidence.probe not in OFF_THE_PATH or place is None:
        return finding
    dtype = "float64" if float64 else "float32"
    window = Window(subject, batches, steps, dtypes=(dtype,), controls=CONTROLS[:1])
    for step in window.walk():
        excess = step and window_pair([window.record()], "candidate")[1]
        if excess:
            return finding.at_step(excess.since(place.pass_))
    return finding


def ask_written_otherwise(subject: Subject, excess: Excess) -> list[Finding]:
    """Weights that the candidate writes otherwise start alike and are moved otherwise."""
    names = subject.written_otherwise
    place = Place(names[0].rpartition(".")[0], "update", excess.since("update"))
    reading = (
        f"{place}: the candidate holds {listed(names)} in another form; both agree before the update and no "
        f"longer after it, "
        f"since the optimizer moves what is stored"
    )
    question = "Do both still agree after an update, though some weights are stored in another form?"
    return [
        Finding(
            Evidence("stored_otherwise", question, excess.measured, excess.allowed, Verdict.BUG, reading),
            place,
        )
    ]


def ask_later(
    subject: Subject,
    excess: Excess | None,
    snapshots: Callable[[int], Snapshots],
    at_the_end: Callable[[], list[Finding]],
) -> list[Finding]:
    """What curves that leave their controls come from; where that is no fault, the end is looked at too.

    Args:
        snapshots: the pair up to a step.
        at_the_end: asks of the pair after the last update.
    """
    if subject.written_otherwise:  # there is no putting both on the same weights
        return ask_written_otherwise(subject, excess) if excess and excess.step else []
    found = ask_excess(snapshots(excess.step), excess) if excess else []
    return found if settled_by(found) else found + at_the_end()


CONFIRM = "Where the pair leaves its controls, do both differ on the same weights and the same batch?"


def ask_excess(snapshots: Snapshots, excess: Excess) -> list[Finding]:
    """What the excess of a pair over its controls comes from: a module, the update before it, or neither."""
    seldom_looked_at = excess.kind in ("buffer_distance", "eval_logit_distance")
    step = snapshots.first_wrong(excess.step) if seldom_looked_at else excess.step
    if found := locate(snapshots, step):
        return found
    if excess.moved:
        place = snapshots.moved_apart(excess.step)
        reading = (
            f"{place}: weights leave what the controls show, and on equal weights both agree: the update "
            f"parts them"
        )
        return [
            Finding(Evidence("excess", CONFIRM, excess.measured, excess.allowed, Verdict.BUG, reading), place)
        ]
    reading = (
        f"they do not, at step {excess.step}: what is seen there is rounding, carried on by the training"
    )
    return [Finding(Evidence("excess", CONFIRM, 0.0, excess.allowed, Verdict.ROUND_OFF, reading))]
