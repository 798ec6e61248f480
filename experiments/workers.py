"""Seeds that are not done yet: one after the other, or side by side in workers, each a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from experiments.errors import ConfigurationError, Unfinished
from experiments.experiment_folder import Experiment, is_done, owned
from experiments.pool import WorkerKilled, side_by_side, visible_gpus
from experiments.relay import Relay, relayed_to
from experiments.worker import How, carried_out

Work = Callable[[Experiment, int, Path], None]


def carry_out(experiment: Experiment, todo: Sequence[int], work: Work) -> None:
    """``work`` on every seed of ``todo``, as many at a time as ``settings.workers``.

    Those that another process is at come last: the same command on several machines shares the seeds out.
    Where memory does not hold so many at a time, it goes on with fewer.

    Raises:
        ConfigurationError, Unfinished: of the first seed that had one; the others were carried out.
    """
    left, workers = list(todo), min(experiment.settings.workers, len(todo))
    while workers > 1:
        ended, too_many = _side_by_side(experiment, left, work, workers)
        _raise_first(ended)
        left = [seed for seed in left if not is_done(experiment, seed)]
        if not too_many:
            break  # what is left is somebody else's
        workers = min(workers - 1, len(left))
        experiment.terminal.say(f"{too_many}: going on with {max(workers, 1)} at a time")
    for seed in [seed for seed in left if not owned(experiment, seed, work, wait=False)]:
        owned(experiment, seed, work)


def _side_by_side(
    experiment: Experiment, todo: list[int], work: Work, workers: int
) -> tuple[dict[int, How], str]:
    """How each seed ended; and, where fewer at a time may do better, why."""
    images = experiment.images
    sent = replace(experiment, images=None, terminal=Relay())
    source = images.source if images else None
    jobs = {seed: partial(carried_out, sent, seed, work, source) for seed in todo}
    gpus = visible_gpus() if experiment.settings.device == "cuda" else []
    try:
        ended = dict(side_by_side(jobs, workers, relayed_to(experiment.terminal), gpus))
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
