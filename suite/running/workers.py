"""Seeds that are not done yet: one after the other, or side by side in workers, each a process of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from traceback import format_exception
from typing import TypeVar

from omegaconf import OmegaConf

from driftlab.blame import is_out_of_memory
from suite.command.errors import ConfigurationError, Unfinished, exit_called
from suite.command.machine import process_settled
from suite.data.images import DataError
from suite.data.samples import DataSet
from suite.running.experiment_folder import Experiment, is_done, owned
from suite.running.own_data import load_data
from suite.running.pool import WorkerKilled, side_by_side, tell, visible_gpus

SECONDS_BETWEEN_STEPS = 0.25  # that a worker tells of

Work = Callable[[Experiment, int, Path], None]
Result = TypeVar("Result")


def carry_out(experiment: Experiment, todo: Sequence[int], work: Work) -> None:
    """``work`` on every seed of ``todo``, as many at a time as ``settings.workers``.

    Those that another process is at come last: the same command on several machines shares the seeds out.
    Where memory does not hold so many at a time, it goes on with fewer.

    Raises:
        ConfigurationError, Unfinished: of the first seed that had one; the others were carried out.
    """
    left, workers = list(todo), min(experiment.settings.workers, len(todo))
    while workers > 1:
        ended, too_many = _in_workers(experiment, left, work, workers)
        _raise_first(ended)
        left = [seed for seed in left if not is_done(experiment, seed)]
        if not too_many:
            break  # what is left is somebody else's
        workers = min(workers - 1, len(left))
        experiment.terminal.say(f"{too_many}: going on with {max(workers, 1)} at a time")
    for seed in [seed for seed in left if not owned(experiment, seed, work, wait=False)]:
        owned(experiment, seed, work)


@dataclass(frozen=True)
class How:
    """How a seed ended in its worker. Handed back instead of raised, so that the other seeds go on.

    Attributes:
        kind: "done", "elsewhere" (another process is at it), "refused", "unfinished", "memory", "crashed".
        text: the line for the user; a traceback where it crashed.
    """

    kind: str
    text: str = ""

    @classmethod
    def failed(cls, error: Exception) -> How:
        if is_out_of_memory(error):
            return cls("memory", str(error))
        if isinstance(error, ConfigurationError | DataError):
            return cls("refused", str(error))
        if isinstance(error, Unfinished):
            return cls("unfinished", str(error))
        return cls("crashed", "".join(format_exception(error)))


def in_a_worker(experiment: Experiment, call: Callable[[Experiment], Result]) -> Result:
    """What ``call`` returns in a process of its own, which ends: this one is left without a GPU's context.

    Raises:
        Unfinished: it was killed.
    """
    sent = _light(experiment)
    source = experiment.data_set.source if experiment.data_set else None
    gpus = visible_gpus() if experiment.settings.device == "cuda" else []
    try:
        ((_, result),) = side_by_side({0: partial(_called, sent, source, call)}, 1, gpus=gpus)
    except WorkerKilled:
        raise Unfinished("the process that times a step was killed, perhaps because memory ran out") from None
    return result


def _light(experiment: Experiment) -> Experiment:
    """To be sent to a worker, which reads the data set for itself."""
    beside = tuple(replace(e, data_set=None, terminal=Told()) for e in experiment.beside)
    return replace(experiment, data_set=None, terminal=Told(), beside=beside)


def _called(experiment: Experiment, source: str | None, call: Callable[[Experiment], Result]) -> Result:
    with _settled_in(experiment, source) as settled:
        return call(settled)


def _in_workers(
    experiment: Experiment, todo: list[int], work: Work, workers: int
) -> tuple[dict[int, How], str]:
    """How each seed ended; and, where fewer at a time may do better, why."""
    data_set, terminal, sent = experiment.data_set, experiment.terminal, _light(experiment)
    source = data_set.source if data_set else None
    jobs = {seed: partial(_in_this_worker, sent, seed, work, source) for seed in todo}
    gpus = visible_gpus() if experiment.settings.device == "cuda" else []
    try:
        ended = dict(side_by_side(jobs, workers, lambda name, said: getattr(terminal, name)(*said), gpus))
    except WorkerKilled:
        return {}, "a worker was killed, perhaps because memory ran out"
    if any(how.kind == "memory" for how in ended.values()):
        return ended, f"memory does not hold {workers} seeds at a time"
    return ended, ""


def _raise_first(ended: dict[int, How]) -> None:
    kinds = {"refused": ConfigurationError, "unfinished": Unfinished}
    for seed, how in sorted(ended.items()):
        if how.kind in kinds:
            raise kinds[how.kind](how.text)
        if how.kind == "crashed":
            raise RuntimeError(f"seed {seed} failed in its worker\n{how.text}")


def _in_this_worker(experiment: Experiment, seed: int, work: Work, source: str | None) -> How:
    """``work`` on the seed, unless another process is at it.

    Args:
        experiment: as the parent opened it, less its data set, which each worker reads for itself.
        source: where the parent has the data set from, None where the experiment trains on none.
    """
    try:
        with _settled_in(experiment, source, f"seed {seed}: ") as settled:
            return How("done" if owned(settled, seed, work, wait=False) else "elsewhere")
    except Exception as error:
        return How.failed(error)
    except SystemExit as asked:
        return How("refused", exit_called(asked))


@contextmanager
def _settled_in(experiment: Experiment, source: str | None, whose: str = "") -> Iterator[Experiment]:
    """This process made ready, and the experiment with its data set; ``whose`` opens what is said of it."""
    settings = experiment.settings
    with process_settled(settings, lambda line: experiment.terminal.say(f"{whose}{line}")):
        if source is not None:
            data_set = _own_data(OmegaConf.to_yaml(settings.data))
            experiment = replace(experiment, data_set=replace(data_set, source=source))
        yield experiment


@cache
def _own_data(chosen: str) -> DataSet:
    return load_data(OmegaConf.create({"data": OmegaConf.create(chosen)}))


class Told:
    """In a worker, in place of a ``Terminal``: what a seed says is told to the parent's, method by method."""

    def __init__(self):
        self._last_step = 0.0

    def say(self, text: str) -> None:
        tell("say", text)

    def doing(self, text: str) -> None:
        tell("doing", text)

    def step(self, seed: int, step: int, row: Mapping[str, float]) -> None:
        if (now := time.monotonic()) - self._last_step >= SECONDS_BETWEEN_STEPS:
            self._last_step = now
            tell("step", seed, step, dict(row))

    def seed_done(self, seed: int, record: Mapping, of: str = "") -> None:
        tell("seed_done", seed, {key: record[key] for key in ("arms", "times")}, of)
