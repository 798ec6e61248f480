"""The inquiry into a seed: its probes before the training, and another look after it; each stored, so that a
resumed seed goes on from there, and a finished one can be probed again without training anew."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from driftlab.arithmetic.layers import layers
from driftlab.arithmetic.sizes import fewer_samples
from driftlab.inquiry import Examined, before_training, inquire, without_training
from driftlab.lockstep.arm import Arm
from driftlab.lockstep.window import Snapshots
from driftlab.probes.examination import Examination
from driftlab.probes.probe import Probe
from driftlab.probes.repeat import PROBE as REPEAT
from driftlab.record.environment import instruments
from driftlab.record.seed_record import RecordError, SeedRecord, read_table, write_sealed
from driftlab.words import Finding, Status, Verdict
from suite.command.errors import ConfigurationError
from suite.data.batches import Batches
from suite.reading.stored import read_checked
from suite.running.asked_once import asked_once, checked, is_of, made_today
from suite.running.building import Built, build
from suite.running.experiment_folder import Experiment
from suite.running.local_windows import walked
from suite.running.recorder import Recorder

# A replay keeps both networks at each of its steps: no more of them than that.
LONGEST_REPLAY = 150
ONE_RUN = "an experiment trains a seed once, beside one control; diagnose() trains twice, beside three"


def probed(
    experiment: Experiment,
    built: Built,
    home: Path,
    before: Mapping,
    train: Callable[[Examined], dict],
) -> dict:
    """``train``'s record of the seed with all that the probes found, before the training and after it.

    Args:
        before: what they found before it, as ``before`` has it.
    """
    training = SeedTraining(experiment, built, home, train, before.get("seconds", 0.0))
    record = training.inquire(examined(before))
    for finding in (Finding.from_dict(f) for f in record["probes"]):
        if finding.evidence.status is Status.FAILED:
            experiment.terminal.say(
                f"seed {record['seed']}: the probe {finding.evidence.probe} {finding.evidence.reading}"
            )
    return record | {"float64": before["float64"], "layers": before["layers"], "instruments": instruments()}


def examined(before: Mapping) -> Examined:
    """What the probes found before any update, of what ``before`` has stored."""
    return Examined([Finding.from_dict(f) for f in before["probes"]], before["float64"])


def before(experiment: Experiment, built: Built, home: Path, start: int) -> dict:
    """What the probes found before any update: run once a seed, and read again when it is resumed.

    Args:
        start: the step that the seed goes on with.

    One that has no checkpoint yet, and now runs in another environment or by other instruments than its
    probes did, is probed again; so is a finished one. Probes off the training's path are asked of one seed.
    """
    if built.pair is None:
        return {"probes": [], "float64": True, "layers": []}
    stored, made_by = home / "probes.json", made_today(built.batches.device)
    if os.path.lexists(stored) and not os.path.lexists(home / "run.json"):
        record = checked(stored)
        if start or is_of(record, made_by):
            return record
    began = time.perf_counter(), time.process_time()
    batch = built.batches.batch(0)
    few = fewer_samples(batch, experiment.settings.probe_images)
    found, examination = before_training(built.pair, few or batch, _probes(experiment, home.name, made_by))
    record = {
        "probes": [f.as_dict() for f in found.findings],
        "float64": found.float64,
        "layers": _layers(examination),
        "seconds": round(time.perf_counter() - began[0], 3),
        "processor_seconds": round(time.process_time() - began[1], 3),
    }
    write_sealed(stored, record | made_by)
    return record


def _probes(experiment: Experiment, seed: str, made_by: Mapping) -> Iterator[Probe]:
    """Those that need no training, each announced on the terminal; ``seed`` as its folder is called."""
    probes = without_training()
    for place, probe in enumerate(probes, 1):
        experiment.terminal.doing(f"{seed.replace('=', ' ')}  probe {place} of {len(probes)}: {probe.name}")
        yield asked_once(probe, experiment.folder, seed, made_by) if probe.off_path else probe


def _layers(found: Examination) -> list[dict]:
    """Where the difference arises, where modules were compared; of networks that repeat themselves."""
    if not found.compared_modules or found.supports(Verdict.NONDETERMINISTIC):
        return []
    accused = {f.place.module for f in found.findings if f.place and f.evidence.supports is Verdict.BUG}
    return layers(found.local, accused - {None, ""})


class SeedTraining:
    """A seed's training for ``driftlab.inquiry``: what it leaves are the seed's files.

    Args:
        train: trains what is left, leaves the tables and gives what ``run.json`` says of it.
        probing: seconds that the probes have taken so far.
    """

    def __init__(
        self,
        experiment: Experiment,
        built: Built,
        home: Path,
        train: Callable[[Examined], dict],
        probing: float,
    ):
        self.pair, self.steps = built.pair, built.lockstep.steps
        self._experiment, self._built, self._home, self._train = experiment, built, home, train
        self._probing, self._began = probing, 0.0

    def inquire(self, found: Examined) -> dict:
        """``run.json`` with the findings in it; nothing is asked where there is no pair of float32."""
        findings = found.findings
        if {"reference.float32", "candidate.float32"} <= {arm.name for arm in self._built.lockstep.arms}:
            record, findings = inquire(self, found)
        else:
            record = self.train(found)
        run = record.run | {"probes": [f.as_dict() for f in findings]}
        run["times"]["probes_seconds"] = round(self._probing + time.perf_counter() - self._began, 3)
        return run

    def train(self, found: Examined) -> SeedRecord:
        run = self._train(found) | {"float64": found.float64}
        self._began = time.perf_counter()
        tables = (read_table(self._home / name) for name in ("curves.csv", "evaluations.csv"))
        return SeedRecord(run["seed"], *tables, run)

    def after(self, found: Examined, record: SeedRecord) -> list[Finding]:
        self._seed = record.seed
        local = record.run.get("local")  # of a seed that finished before there were any: none
        return [REPEAT.not_applicable(ONE_RUN), *([Finding.from_dict(local["finding"])] if local else [])]

    def until(self, step: int) -> Snapshots:
        """Trained once more, since only the end of a seed is kept."""
        return Snapshots(self.pair, Replay(self._experiment, self._seed, min(step, LONGEST_REPLAY)))

    def at_the_end(self) -> Snapshots | None:
        ends = [a for a in self._built.lockstep.arms if a.name in ("reference.float32", "candidate.float32")]
        if any(arm.blown_up_at is not None for arm in ends):
            return None
        return Snapshots(self.pair, AtTheEnd(ends, self._built.batches, self.steps))


class AtTheEnd:
    """The float32 pair as training left it: a run of which only the last step is known."""

    def __init__(self, ends: list[Arm], batches: Batches, last: int):
        self._arms, self._batches, self.steps = {a.name: a for a in ends}, batches, last

    def walk(self) -> Iterator[int]:
        yield self.steps

    def arm(self, name: str) -> Arm:
        return self._arms[name]

    def batch(self, step: int) -> tuple:
        return self._batches.batch(step)


class Replay:
    """Reference and candidate in float32, trained and evaluated as this seed does, without anything else."""

    def __init__(self, experiment: Experiment, seed: int, last: int):
        settings = copy.deepcopy(experiment.settings)
        settings.roles, settings.dtypes = ["reference", "candidate"], ["float32"]
        self._built, self.steps, self._settings = build(settings, experiment.data_set, seed), last, settings

    def walk(self) -> Iterator[int]:
        return walked(self._built.lockstep, self._built.batches, self._settings, 0, self.steps)

    def arm(self, name: str) -> Arm:
        return next(a for a in self._built.lockstep.arms if a.name == name)

    def batch(self, step: int) -> tuple:
        return self._built.batches.batch(step)


def finished_record(home: Path) -> dict | None:
    """What a seed's ``run.json`` says, where it has finished."""
    record = read_checked(home.parent, int(home.name.removeprefix("seed=")))
    return record and dict(record.run)


def take_to_its_end(built: Built, recorder: Recorder, finished: dict) -> int:
    """The arms as the training left them, from the checkpoint of its end; returns the step.

    Raises:
        ConfigurationError: there is no such checkpoint that can be read.
    """
    lockstep = built.lockstep
    try:
        step = recorder.resume()
    except RecordError:
        step = 0
    if step != lockstep.steps:
        raise ConfigurationError(
            f"reprobe=true: seed {finished['seed']} has no checkpoint of its end (keep_checkpoint=false?): "
            "write rerun=true to train it again"
        )
    for arm in lockstep.arms:
        arm.blown_up_at = finished["arms"][arm.name]["blown_up_at"]
    # measured once more at the end, which moves the buffers
    lockstep.forward_backward(step, *built.batches.batch(step))
    return step
