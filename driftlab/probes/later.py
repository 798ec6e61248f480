"""The probes of one step, asked again at a later one: both networks put on the same weights there."""

from __future__ import annotations

from dataclasses import replace

from driftlab.lockstep.window import Snapshots
from driftlab.probes.examination import Examination
from driftlab.probes.function import PROBE as FUNCTION
from driftlab.words import Finding, Verdict


def examination_at(snapshots: Snapshots, step: int) -> Examination:
    return Examination(*snapshots.at(step))


def first_wrong(snapshots: Snapshots, last: int) -> int:
    """The first step whose pair differs by more than rounding, given that ``last`` does: by bisection."""
    low, high = 0, min(last, snapshots.last)
    while low < high:
        middle = (low + high) // 2
        wrong = examination_at(snapshots, middle).wrong
        low, high = (low, middle) if wrong else (middle + 1, high)
    return high


def locate(snapshots: Snapshots, step: int) -> list[Finding]:
    """Where the pair differs at ``step``: module and pass, on the same weights."""
    found = FUNCTION.ask(examination_at(snapshots, step))
    accusing = (Verdict.BUG, Verdict.NONDETERMINISTIC)
    return [at_later_step(f, step) for f in found if f.evidence.supports in accusing]


def at_later_step(finding: Finding, step: int) -> Finding:
    """Under a name of its own, ``function_later``, beside the answer of the first step."""
    moved = finding.at_step(step)
    evidence = replace(moved.evidence, probe=f"{finding.evidence.probe}_later")
    return replace(moved, evidence=evidence, supersedes=())
