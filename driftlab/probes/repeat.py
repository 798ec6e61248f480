"""The float32 pair of a window twice over: what strikes rarely has as many chances again."""

from __future__ import annotations

from driftlab.lockstep.window import Snapshots, same_rows
from driftlab.network.compiled import is_scripted
from driftlab.probes.determinism import repeats
from driftlab.probes.later import examination_at
from driftlab.probes.probe import Probe
from driftlab.record.seed_record import SeedRecord
from driftlab.words import Finding, Place, Verdict

RARE = 32  # repetitions in search of what struck once


def ask_repeat(snapshots: Snapshots, record: SeedRecord, second: SeedRecord) -> Finding:
    """Hold the rows of a window against those of a second run of its float32 pair."""
    pair = snapshots.pair
    if is_scripted(pair.reference) or is_scripted(pair.candidate):
        # its first calls are profiled, and the two runs do not evaluate at the same steps
        return PROBE.not_applicable("not asked of scripted code")
    step = same_rows(record, second)
    if step is None:
        return PROBE.finding(0.0, None, f"it does, {len(second.curves) - 1} updates")
    place = _wavering(snapshots, step)
    says = f"it does not, from step {step} on ({{place}}): no difference between the two means anything"
    return PROBE.finding(None, Verdict.NONDETERMINISTIC, says, place)


def _wavering(snapshots: Snapshots, step: int) -> Place:
    """Which of the two does not repeat itself, and in which module, if it shows again."""
    found = examination_at(snapshots, step)
    pair = found.pair
    for network in (pair.candidate, pair.reference):
        if wobble := repeats(network, found.whole, pair.seed, RARE):
            name = pair.reference_name(wobble.module) if network is pair.candidate else wobble.module
            return Place(name, wobble.pass_, step)
    return Place(None, "forward", step)


PROBE = Probe(
    name="repeat",
    question="Does the window repeat itself, bit for bit, when it is run a second time?",
    threshold=0.0,
    reason="equal bits in every row",
    unit="relative difference",
    sees="rare nondeterminism",
    misses="asked by `diagnose`; an experiment trains a seed once",
    order=90,
    decides=False,
)
