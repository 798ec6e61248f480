"""One seed of a training experiment: built, resumed, probed, trained, recorded.

Several rewrites of one reference are as many experiments, each with a folder of its own. Where their seed
stands at the same step they train together (``driftlab.lockstep.together``), and each leaves what it would
leave by itself.
"""

from __future__ import annotations

import logging
import os
import shutil
import warnings
from collections.abc import Callable, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

from driftlab.inquiry import Examined
from driftlab.lockstep.checkpoint import checkpoint_step
from driftlab.lockstep.loop import Lockstep
from driftlab.lockstep.together import Together, sharing
from driftlab.record.seed_record import RecordError, write_sealed
from driftlab.words import Verdict, settled_by
from suite.command.errors import Unfinished, one_line, storage
from suite.command.users_code import told
from suite.command.written import title
from suite.data.batches import Batches
from suite.running.building import Built, build
from suite.running.experiment_folder import Experiment, owned, take_up
from suite.running.first_answer import say_first_answer
from suite.running.local_windows import LocalWindows
from suite.running.ownership import OwnershipLost
from suite.running.pace import Warned
from suite.running.probing import before, examined, finished_record, probed, take_to_its_end
from suite.running.recorder import Recorder, Recorders
from suite.running.run_record import Began, changed, run_record
from suite.running.spent import Spent
from suite.showing.loggers import MetricsLogger


def train(experiment: Experiment, seed: int, home: Path) -> None:
    """One seed, from wherever it stopped, by its owner; and that of the experiments beside it.

    Those whose seed stands elsewhere, or is another process's, are left for their own turn.

    Raises:
        ConfigurationError: the user's code raised something.
        RecordError: what it was to go on from, or what it left when it finished, is damaged.
        Unfinished: the disk refused a file.
    """
    _take_in(experiment, seed, home, [], list(experiment.beside))


def _take_in(
    experiment: Experiment, seed: int, home: Path, runs: list[SeedRun], others: list[Experiment]
) -> bool:
    """Train ``runs``, this one and as many of ``others`` as can be; False where this one cannot join."""

    def stands() -> str:
        return _stands(seed, home)

    with storage(experiment.settings.results, stands), told(stands):
        take_up(experiment, seed, home)
        if runs and not runs[0].is_joined_by(experiment, home):
            return False
        run = SeedRun(experiment, seed, home, runs[0] if runs else None)
        run.examine()
        if runs and run.ends_with_its_probes:
            return False
        _go_on([*runs, run], [] if run.stands_alone else others)
        return True


def _go_on(runs: list[SeedRun], others: list[Experiment]) -> None:
    """The training, once the next of ``others`` that is free has been taken in, and the next after it."""
    first, taken = runs[0], []
    while others and not any(taken):
        other, *others = others
        other = replace(other, data_set=first.experiment.data_set, terminal=first.experiment.terminal)

        def join(experiment: Experiment, seed: int, home: Path, rest: list[Experiment] = others) -> None:
            taken.append(_take_in(experiment, seed, home, runs, rest))

        owned(other, first.seed, join, wait=False)
    if not any(taken):
        _train(runs)


def _train(runs: Sequence[SeedRun]) -> None:
    """The training of all, another look where one needs it; ``run.json`` last of all."""
    lockstep, recorder = runs[0].lockstep, runs[0].recorder
    if len(runs) > 1:
        lockstep, recorder = Together([r.lockstep for r in runs]), Recorders([r.recorder for r in runs])

    @cache
    def trained() -> None:
        """Once, whoever asks first."""
        with runs[0].spent.on("steps"):
            fit(lockstep, runs[0].built.batches, recorder, runs[0].start)

    try:
        for run in runs:
            run.follow()
        for run in runs:
            run.end(trained)
    except Exception as error:
        for run in runs:
            run.crash(one_line(error))
        if len(runs) > 1 and isinstance(error, OwnershipLost | RecordError):
            # whoever begins again with one of them would find the others' arms somewhere on the way
            raise Unfinished(f"seed {runs[0].seed}: {error}: the same command goes on") from error
        raise


def _stands(seed: int, home: Path) -> str:
    if os.path.exists(home / "run.json"):
        return f"seed {seed} has finished"
    step = checkpoint_step(home / "checkpoint")
    return f"seed {seed} " + (f"stands at its last checkpoint (step {step})" if step else "begins again")


def answer_first(experiment: Experiment, built: Built, seed: int, named: str) -> bool:
    """The probes of a seed that has not begun yet, and what they say; its training then finds their answers.

    Args:
        built: the seed; its arms may have been trained.
        named: what the experiment is called where there are several.

    Returns:
        False where that is left to the seed's own turn: where it has begun, is another process's, or is to be
        done anew; and where it raises anything, for its turn will raise it again.
    """
    answered = []

    def answer(experiment: Experiment, seed: int, home: Path) -> None:
        take_up(experiment, seed, home)
        if not os.path.lexists(home / "run.json") and not checkpoint_step(home / "checkpoint"):
            began, found = Began.now(), before(experiment, built, home, 0)
            say_first_answer(experiment, seed, examined(found).findings, began, named)
            answered.append(seed)

    if not experiment.settings.rerun:
        with suppress(Exception):
            owned(experiment, seed, answer, wait=False)
    return bool(answered)


class SeedRun:
    """One seed of one experiment, at work.

    Args:
        first: the run that trains the reference and the controls; this one takes them from it.
    """

    def __init__(self, experiment: Experiment, seed: int, home: Path, first: SeedRun | None = None):
        self.experiment, self.seed, self.home = experiment, seed, home
        self.began, self.spent, self.closed = Began.now(), Spent(), False
        self.follows = first is not None
        with self.spent.on("building"):
            self.built = build(experiment.settings, experiment.data_set, seed)
            if first:
                self.built = self.built._replace(lockstep=sharing(first.lockstep, self.built.lockstep))
        self.logger = MetricsLogger(
            experiment.settings, experiment.digest, seed, home, experiment.terminal.say
        )
        self.recorder = _recorder(self)
        self.finished = finished_record(home)  # then its probes alone are asked again
        if self.finished is None:
            self.start = self.recorder.resume()
            self._say_where()
        else:
            self.start = take_to_its_end(self.built, self.recorder, self.finished)

    @property
    def lockstep(self) -> Lockstep:
        return self.built.lockstep

    @property
    def ends_with_its_probes(self) -> bool:
        settled = settled_by(self.found.findings)
        return self.experiment.settings.stop_on_bug and settled is not None and settled[0] is Verdict.BUG

    @property
    def stands_alone(self) -> bool:
        """Whether nobody can train beside it."""
        return self.finished is not None or self.ends_with_its_probes

    def is_joined_by(self, other: Experiment, home: Path) -> bool:
        """Whether its seed, in ``home``, stands where this one does, with as much before it."""
        if os.path.lexists(home / "run.json") or (checkpoint_step(home / "checkpoint") or 0) != self.start:
            return False
        return other.settings.float64_steps == self.experiment.settings.float64_steps

    def examine(self) -> None:
        """Ask the probes, or read what they said."""
        try:
            with self.spent.on("probes"):
                self.before = before(self.experiment, self.built, self.home, self.start)
                self.spent.skip(self.before.get("processor_seconds", 0.0))  # wherever they were asked
        except Exception as error:
            self.crash(one_line(error))
            raise
        self.found = examined(self.before)

    def follow(self) -> None:
        """Make ready for the training, which begins now."""
        if self.follows:
            self.spent.skip()
        if self.finished is not None:
            return
        if self.start == 0 and self.experiment.first == self.seed:
            say_first_answer(self.experiment, self.seed, self.found.findings, self.began, self._named)
        if self.ends_with_its_probes:
            for arm in self.lockstep.arms:
                arm.horizon = 0
        self.local = LocalWindows(self.experiment.settings, self.built, self.found)
        self.recorder.follow(self.local)

    def end(self, trained: Callable[[], None]) -> None:
        """What is asked after the training, and the files of a seed that has finished."""

        def training(found: Examined) -> dict:
            if self.finished is not None:
                return self.finished
            trained()
            record = run_record(self.experiment, self.seed, self.built, self.began, self.recorder, self.start)
            return record | {"local": self.local.ended()}

        if self.follows:  # the steps of all are the first's
            self.spent.skip()
        with self.spent.on("probes"):
            record = probed(self.experiment, self.built, self.home, self.before, training)
        if self.finished is None:
            record["times"]["processor_seconds"] = self.spent.seconds()
        self.experiment.still_owner()
        write_sealed(self.home / "run.json", record)
        settings = self.experiment.settings
        if not settings.keep_checkpoint:
            shutil.rmtree(self.home / "checkpoint", ignore_errors=True)
        self.closed = True
        self.logger.finish(record)
        self.experiment.terminal.seed_done(self.seed, record, self._named)

    @property
    def _named(self) -> str:
        """What it is called where several are at work."""
        several = self.experiment.beside or self.follows
        return title(self.experiment.settings) if several else ""

    def crash(self, why: str) -> None:
        if not self.closed:
            self.closed = True
            self.logger.crash(why)

    def _say_where(self) -> None:
        """Kernels differ: who reads the curves has to know where they were computed."""
        parts = self.recorder.parts
        if parts[-1]["from"] != self.start or len(parts) == 1:
            return
        what = "; ".join(changed(parts[-2]["environment"], parts[-1]["environment"]))
        said = f"seed {self.seed} goes on from step {self.start} in another environment ({what})"
        self.experiment.terminal.say(said)


def _recorder(run: SeedRun) -> Recorder:
    experiment, settings = run.experiment, run.experiment.settings
    return Recorder(
        run.lockstep,
        run.built.batches,
        run.logger,
        run.home,
        eval_every=settings.eval_every,
        eval_images=settings.eval_images,
        checkpoint_every=settings.checkpoint_every,
        progress=lambda step, row: experiment.terminal.step(run.seed, step, row),
        still_owner=experiment.still_owner,
        spent=run.spent,
    )


def fit(lockstep: Lockstep | Together, batches: Batches, recorder: Recorder | Recorders, start: int) -> None:
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
