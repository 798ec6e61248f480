"""The probes of a training experiment: before it, where its curves leave the controls, at its end."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from driftlab.arm import Arm
from driftlab.environment import environment
from driftlab.examination import Examination, examined
from driftlab.findings.late import ask_last, ask_later
from driftlab.late import Snapshots
from driftlab.pairs import first_excess, honoured
from driftlab.probes.layers import layers
from driftlab.probes.sizes import fewer_samples
from driftlab.records import RecordError, SeedRecord, read_json, read_table, write_sealed
from driftlab.rules import settled_by
from driftlab.verdict import Finding, Verdict
from experiments.data.batches import Batches
from experiments.stored_run import wrong_probe

if TYPE_CHECKING:
    from experiments.experiment_folder import Experiment
    from experiments.seed_run import Built

# A replay keeps both networks at each of its steps: no more of them than that.
LONGEST_REPLAY = 150


def probed(experiment: Experiment, built: Built, home: Path, start: int) -> dict:
    """What the probes found before any update: run once a seed, and read again when it is resumed.

    Args:
        start: the step that the seed goes on with. One that has no checkpoint yet, and now runs in another
            environment than its probes did, is probed again.
    """
    if built.subject is None:
        return {"probes": [], "float64": True, "layers": []}
    stored, here = home / "probes.json", environment(built.batches.device)
    if os.path.lexists(stored):
        record = _checked(stored)
        if record.pop("environment", here) == here or start:
            return record
    batch = built.batches.batch(0)
    few = fewer_samples(batch, experiment.settings.probe_images)
    found = examined(built.subject, few or batch)
    record = {
        "probes": [f.as_dict() for f in found.findings],
        "float64": found.float64,
        "layers": _layers(found),
    }
    write_sealed(stored, record | {"environment": here})
    return record


def _checked(stored: Path) -> dict:
    """Raises RecordError where it is not what ``probed`` writes."""
    record = read_json(stored)
    if wrong := wrong_probe(record.get("probes")):
        raise RecordError(f"{stored} is damaged: {wrong} cannot be read")
    return record


def _layers(found: Examination) -> list[dict]:
    """Where the difference arises, where modules were compared; of networks that repeat themselves."""
    if not found.compared_modules or found.supports(Verdict.NONDETERMINISTIC):
        return []
    accused = {f.place.module for f in found.findings if f.place and f.evidence.supports is Verdict.BUG}
    return layers(found.local, accused - {None, ""})


def probed_later(experiment: Experiment, seed: int, built: Built, home: Path, record: dict) -> list[dict]:
    """Where the pair left its controls, and at the end: nothing where the first probes settled it."""
    subject, probes = built.subject, [Finding.from_dict(f) for f in record["probes"]]
    arms = {arm.name: arm for arm in built.lockstep.arms}
    if subject is None or settled_by(probes) or not {"reference.float32", "candidate.float32"} <= set(arms):
        return []
    tables = (read_table(home / name) for name in ("curves.csv", "evaluations.csv"))
    narrow = any(f.evidence.supports is Verdict.REDUCED_PRECISION for f in probes)
    excess = first_excess([honoured(SeedRecord(seed, *tables, record))], narrow)
    found = ask_later(
        subject,
        excess,
        lambda step: _replayed(experiment, seed, subject, step),
        lambda: _at_the_end(experiment, seed, built, arms),
    )
    return [f.as_dict() for f in found]


def _at_the_end(experiment: Experiment, seed: int, built: Built, arms: dict[str, Arm]) -> list[Finding]:
    last = built.lockstep.steps
    ends = (arms["reference.float32"], arms["candidate.float32"])
    if any(arm.blown_up_at is not None for arm in ends):
        return []
    snapshots = Snapshots(built.subject, AtTheEnd(*ends, built.batches, last))
    return ask_last(
        snapshots, last, lambda: _replayed(experiment, seed, built.subject, min(last, LONGEST_REPLAY))
    )


class AtTheEnd:
    """The float32 pair as training left it: a window of which only the last step is known."""

    def __init__(self, reference: Arm, candidate: Arm, batches: Batches, last: int):
        self._arms, self._batches, self.steps = {a.name: a for a in (reference, candidate)}, batches, last

    def walk(self) -> Iterator[int]:
        yield self.steps

    def arm(self, name: str) -> Arm:
        return self._arms[name]

    def batch(self, step: int) -> tuple:
        return self._batches.batch(step)


def _replayed(experiment: Experiment, seed: int, subject, last: int) -> Snapshots:
    """The float32 pair of this seed once more, up to ``last``."""
    return Snapshots(subject, Replay(experiment, seed, last))


class Replay:
    """Reference and candidate in float32, trained as this seed trains them, without anything else."""

    def __init__(self, experiment: Experiment, seed: int, last: int):
        from experiments.seed_run import build

        settings = copy.deepcopy(experiment.settings)
        settings.roles, settings.dtypes = ["reference", "candidate"], ["float32"]
        self._built, self.steps = build(settings, experiment.images, seed), last

    def walk(self) -> Iterator[int]:
        lockstep, batches = self._built.lockstep, self._built.batches
        for step in range(self.steps + 1):
            yield step
            lockstep.forward_backward(step, *batches.batch(step))
            lockstep.update(step)

    def arm(self, name: str) -> Arm:
        return next(a for a in self._built.lockstep.arms if a.name == name)

    def batch(self, step: int) -> tuple:
        return self._built.batches.batch(step)
