"""Several jobs of a sweep at a time on one machine: ``hydra/launcher=joblib``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


class LocalLauncher(Launcher):
    """As the plugin hydra-joblib-launcher, by which each job runs; but a job that is killed ends no other.

    Args:
        n_jobs: how many at a time.
    """

    def __init__(self, n_jobs: int):
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """One return a job, in order. One whose process was killed is begun again, with fewer at a time."""
        # here, so that Hydra finds its plugins without waiting for ours
        from experiments.pool import WorkerKilled, side_by_side, visible_gpus

        jobs = enumerate(job_overrides, start=initial_job_idx)
        left = {number: self._job(number, overrides) for number, overrides in jobs}
        ended: dict[int, JobReturn] = {}
        at_once, gpus = max(1, self.n_jobs), visible_gpus()
        while left:
            try:
                for number, job in side_by_side(left, at_once, gpus=gpus):
                    ended[number] = job
            except WorkerKilled:
                if at_once == 1:  # they begin in their order: it was the first
                    first = next(number for number in left if number not in ended)
                    ended[first] = _killed(job_overrides[first - initial_job_idx])
                at_once = max(1, at_once - 1)
                print(f"a job was killed, perhaps because memory ran out: going on with {at_once} at a time")
            left = {number: job for number, job in left.items() if number not in ended}
        return [ended[number] for number in sorted(ended)]

    def _job(self, number: int, overrides: Sequence[str]) -> partial:
        from hydra_plugins.hydra_joblib_launcher._core import execute_job

        state = Singleton.get_state()
        about = (self.hydra_context, self.config, self.task_function, state)
        return partial(execute_job, number, list(overrides), *about)


def _killed(overrides: Sequence[str]) -> JobReturn:
    line = f"the job of {' '.join(overrides)} was killed though no other ran: the same command tries it again"
    return JobReturn(_return_value={"unfinished": line}, status=JobStatus.COMPLETED)
