"""One seed of a training experiment: built, resumed, trained, recorded."""

from __future__ import annotations

import logging
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from omegaconf import DictConfig

from driftlab.checkpoint import checkpoint_step
from driftlab.lockstep import Lockstep
from driftlab.logschedule import LogSchedule
from driftlab.records import write_sealed
from driftlab.subject import Subject
from experiments.data.batches import Batches
from experiments.data.images import Images
from experiments.experiment_folder import Experiment, take_up
from experiments.loggers import MetricsLogger
from experiments.networks import build_arms
from experiments.probing import probed, probed_later
from experiments.recorder import Recorder
from experiments.run_record import Began, changed, run_record
from experiments.storage import storage


def train(experiment: Experiment, seed: int, home: Path) -> None:
    """One seed, from wherever it stopped, by its owner.

    Raises:
        RecordError: what it was to go on from, or what it left when it finished, is damaged.
        Unfinished: the disk refused a file.
    """
    with storage(experiment.settings.results, lambda: _stands(seed, home)):
        take_up(experiment, seed, home)
        _train(experiment, seed, home)


def _stands(seed: int, home: Path) -> str:
    if os.path.exists(home / "run.json"):
        return f"seed {seed} has finished"
    step = checkpoint_step(home / "checkpoint")
    return f"seed {seed} " + (f"stands at its last checkpoint (step {step})" if step else "begins again")


def _train(experiment: Experiment, seed: int, home: Path) -> None:
    settings, began = experiment.settings, Began.now()
    built = build(settings, experiment.images, seed)
    lockstep, batches = built.lockstep, built.batches
    logger = MetricsLogger(settings, experiment.digest, seed, home)
    recorder = Recorder(
        lockstep,
        batches,
        logger,
        home,
        eval_every=settings.eval_every,
        eval_images=settings.eval_images,
        checkpoint_every=settings.checkpoint_every,
        progress=lambda step, row: experiment.terminal.step(seed, step, row),
        still_owner=experiment.still_owner,
    )
    start = recorder.resume()
    _say_where(experiment, seed, recorder.parts, start)
    clock = time.perf_counter()
    probes = probed(experiment, built, home, start)
    probing = time.perf_counter() - clock
    fit(lockstep, batches, recorder, start)
    record = run_record(experiment, seed, built, began, recorder, start) | probes
    clock = time.perf_counter()
    record["probes"] += probed_later(experiment, seed, built, home, record)
    record["times"]["probes_seconds"] = round(probing + time.perf_counter() - clock, 3)
    experiment.still_owner()
    write_sealed(home / "run.json", record)
    if not settings.keep_checkpoint:
        shutil.rmtree(home / "checkpoint", ignore_errors=True)
    logger.finish(record)
    experiment.terminal.seed_done(seed, record)


def _say_where(experiment: Experiment, seed: int, parts: list[dict], start: int) -> None:
    """Kernels differ: who reads the curves has to know where they were computed."""
    if parts[-1]["from"] != start or len(parts) == 1:
        return
    what = "; ".join(changed(parts[-2]["environment"], parts[-1]["environment"]))
    experiment.terminal.say(f"seed {seed} goes on from step {start} in another environment ({what})")


class Built(NamedTuple):
    """One seed, ready for step 0."""

    lockstep: Lockstep
    batches: Batches
    subject: Subject | None


def build(settings: DictConfig, images: Images, seed: int) -> Built:
    seeds = own_seeds(settings, seed)
    batches = make_batches(settings, images, seeds)
    few = batches.batch(0)[0][:2].cpu()
    arms, subject = build_arms(settings, images, seeds, few)
    schedule = LogSchedule(settings.log_schedule.dense, settings.log_schedule.per_decade)
    return Built(Lockstep(arms, F.cross_entropy, seed=seeds["order"], logged=schedule), batches, subject)


def own_seeds(settings: DictConfig, seed: int) -> dict[str, int]:
    """Of everything random: ``seed``, where ``seeds`` does not set one alone."""
    return {name: seed if own is None else own for name, own in settings.seeds.items()}


def make_batches(settings: DictConfig, images: Images, seeds: Mapping[str, int]) -> Batches:
    return Batches(
        images,
        batch_size=settings.batch_size,
        order_seed=seeds["order"],
        augmentation_seed=seeds["augmentation"],
        device=torch.device(settings.device),
        augment=settings.augment,
    )


def fit(lockstep: Lockstep, batches: Batches, recorder: Recorder, start: int) -> None:
    """The updates from ``start`` on, a checkpoint, then the row after the last update.

    In this order because measuring once more moves the batch-norm buffers: resumed from its last
    checkpoint, a run must find them as they were.
    """
    from driftlab.lightning import Between, LockstepModule, StepBatches, trainer

    module = LockstepModule(lockstep, batches.batch)
    if start < lockstep.steps:
        with _quiet_lightning():
            runner = trainer(lockstep.steps - start, batches.device, callbacks=[Between(recorder)])
            runner.fit(module, StepBatches(batches.batch, start, lockstep.steps))
    recorder.checkpoint(lockstep.steps)
    recorder.evaluate(lockstep.steps)
    module.measure_last()
    recorder.log_new_rows()
    recorder.write_tables()


@contextmanager
def _quiet_lightning():
    """Lightning's hints are about trainings that are not these."""
    logger = logging.getLogger("lightning.pytorch")
    level = logger.level
    logger.setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        try:
            yield
        finally:
            logger.setLevel(level)
