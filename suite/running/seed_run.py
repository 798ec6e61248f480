"""One seed of a training experiment: built, resumed, trained, recorded."""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

from driftlab.inquiry import Examined
from driftlab.lockstep.checkpoint import checkpoint_step
from driftlab.lockstep.loop import Lockstep
from driftlab.record.seed_record import write_sealed
from suite.command.errors import one_line, storage
from suite.command.users_code import told
from suite.data.batches import Batches
from suite.running.building import Built, build
from suite.running.experiment_folder import Experiment, take_up
from suite.running.first_answer import ends_here, say_first_answer
from suite.running.local_windows import LocalWindows
from suite.running.pace import Warned
from suite.running.probing import finished_record, probed, take_to_its_end
from suite.running.recorder import Recorder
from suite.running.run_record import Began, changed, run_record
from suite.running.spent import Spent
from suite.showing.loggers import MetricsLogger


def train(experiment: Experiment, seed: int, home: Path) -> None:
    """One seed, from wherever it stopped, by its owner.

    Raises:
        ConfigurationError: the user's code raised something.
        RecordError: what it was to go on from, or what it left when it finished, is damaged.
        Unfinished: the disk refused a file.
    """

    def stands() -> str:
        return _stands(seed, home)

    with storage(experiment.settings.results, stands), told(stands):
        take_up(experiment, seed, home)
        _train(experiment, seed, home)


def _stands(seed: int, home: Path) -> str:
    if os.path.exists(home / "run.json"):
        return f"seed {seed} has finished"
    step = checkpoint_step(home / "checkpoint")
    return f"seed {seed} " + (f"stands at its last checkpoint (step {step})" if step else "begins again")


def _train(experiment: Experiment, seed: int, home: Path) -> None:
    """What the probes say, the training, another look where it needs one; ``run.json`` last of all."""
    settings, began, spent = experiment.settings, Began.now(), Spent()
    with spent.on("building"):
        built = build(settings, experiment.data_set, seed)
    logger = MetricsLogger(settings, experiment.digest, seed, home, experiment.terminal.say)
    recorder = _recorder(experiment, seed, home, built, logger, spent)
    finished = finished_record(home)  # then its probes alone are asked again
    if finished is None:
        start = recorder.resume()
        _say_where(experiment, seed, recorder.parts, start)
    else:
        start = take_to_its_end(built, recorder, finished)

    def training(found: Examined) -> dict:
        if finished is not None:
            return finished
        if start == 0 and experiment.first == seed:
            say_first_answer(experiment, seed, found.findings, began)
        if ends_here(settings.stop_on_bug, found.findings):
            for arm in built.lockstep.arms:
                arm.horizon = 0
        local = LocalWindows(settings, built, found)
        recorder.follow(local)
        with spent.on("steps"):
            fit(built.lockstep, built.batches, recorder, start)
        return run_record(experiment, seed, built, began, recorder, start) | {"local": local.ended()}

    try:
        with spent.on("probes"):
            record = probed(experiment, built, home, start, training)
    except Exception as error:
        logger.crash(one_line(error))
        raise
    if finished is None:
        record["times"]["processor_seconds"] = spent.seconds()
    experiment.still_owner()
    write_sealed(home / "run.json", record)
    if not settings.keep_checkpoint:
        shutil.rmtree(home / "checkpoint", ignore_errors=True)
    logger.finish(record)
    experiment.terminal.seed_done(seed, record)


def _recorder(
    experiment: Experiment, seed: int, home: Path, built: Built, logger: MetricsLogger, spent: Spent
) -> Recorder:
    settings = experiment.settings
    return Recorder(
        built.lockstep,
        built.batches,
        logger,
        home,
        eval_every=settings.eval_every,
        eval_images=settings.eval_images,
        checkpoint_every=settings.checkpoint_every,
        progress=lambda step, row: experiment.terminal.step(seed, step, row),
        still_owner=experiment.still_owner,
        spent=spent,
    )


def _say_where(experiment: Experiment, seed: int, parts: list[dict], start: int) -> None:
    """Kernels differ: who reads the curves has to know where they were computed."""
    if parts[-1]["from"] != start or len(parts) == 1:
        return
    what = "; ".join(changed(parts[-2]["environment"], parts[-1]["environment"]))
    experiment.terminal.say(f"seed {seed} goes on from step {start} in another environment ({what})")


def fit(lockstep: Lockstep, batches: Batches, recorder: Recorder, start: int) -> None:
    """The updates from ``start`` on, a checkpoint, then the row after the last update.

    In this order because measuring once more moves the batch-norm buffers: resumed from its last
    checkpoint, a run must find them as they were.
    """
    from driftlab.lockstep.lightning import Between, LockstepModule, StepBatches, trainer

    module = LockstepModule(lockstep, batches.batch)
    with Warned(recorder.checkpoint) as warned:
        if start < lockstep.steps:
            with _quiet_lightning():
                watchers = [Between(recorder), Between(warned)]
                runner = trainer(lockstep.steps - start, batches.device, callbacks=watchers)
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
