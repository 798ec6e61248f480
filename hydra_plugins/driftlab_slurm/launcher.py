"""Hydra's launcher for Slurm: ``hydra/launcher=submitit_slurm``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra_plugins.hydra_submitit_launcher import submitit_launcher

from hydra_plugins.driftlab_slurm import submission
from hydra_plugins.driftlab_slurm.waiting import LONGEST, Outcome, Task, Waiting


class SlurmLauncher(submitit_launcher.SlurmLauncher):
    """One Slurm array a sweep, waited for to the end of its last job.

    Each job runs as with the launcher of the plugin ``hydra-submitit-launcher``; but a job that is killed
    ends neither the session nor the sweep, and no accounting is asked for.

    Args:
        poll_seconds: longest time between two questions to the controller.
        params: the settings in conf/hydra/launcher/submitit_slurm.yaml.
    """

    def __init__(self, poll_seconds: float = LONGEST, **params: Any):
        super().__init__(**params)
        self.poll_seconds = poll_seconds

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Submit the jobs and wait for them.

        Returns:
            One a job, in their order, each with what the job returned, or with ``{"unfinished": line}``.

        Raises:
            ConfigurationError: no Slurm here, or it takes none of the jobs.
            KeyboardInterrupt: the jobs go on.
        """
        submission.check_slurm()
        executor = submission.executor(self.params)
        calls = [
            (list(overrides), "hydra.sweep.dir", number, f"job_id_for_{number}", Singleton.get_state())
            for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        jobs, refused = submission.submit(executor, self, calls, self.params["array_parallelism"])
        named = _names([filter_overrides(overrides) for overrides in job_overrides])
        tasks = [Task(job, names) for job, names in zip(jobs, named, strict=False)]
        outcomes = self._wait(tasks)
        found = [
            _returned(outcomes[task.job.job_id], call[0]) for task, call in zip(tasks, calls, strict=False)
        ]
        missed = [f"job ({' '.join(names)}) was not submitted: {refused}" for names in named[len(jobs) :]]
        return found + [
            _unfinished(line, call[0]) for line, call in zip(missed, calls[len(jobs) :], strict=True)
        ]

    def _wait(self, tasks: list[Task]) -> dict[str, Outcome]:
        """Every outcome by the job's id. Says what is going on."""
        arrays = list(dict.fromkeys(task.job.job_id.partition("_")[0] for task in tasks))
        ids, folder = " ".join(arrays), tasks[0].job.paths.stdout.parent
        _say(f"{len(tasks)} jobs in Slurm, array {ids}; logs in {folder}")
        _say("This session may end: the jobs go on, and the same command picks their results up.")
        outcomes: dict[str, Outcome] = {}
        try:
            for outcome in Waiting(tasks, _say, longest=self.poll_seconds).ended():
                outcomes[outcome.task.job.job_id] = outcome
                _say(f"{len(outcomes)} of {len(tasks)} ended: {_described(outcome)}")
        except KeyboardInterrupt:
            _say(f"The jobs go on without this session. To end them: scancel {ids}")
            raise
        return outcomes


def _names(jobs: list[Sequence[str]]) -> list[list[str]]:
    """What tells the jobs apart: experiment, seed, and any other setting that they do not share."""
    shared = set(jobs[0]).intersection(*jobs[1:])
    return [[o for o in job if o not in shared or o.startswith(("+experiment=", "seed="))] for job in jobs]


def _described(outcome: Outcome) -> str:
    value = outcome.returned.return_value if outcome.returned else None
    kinds = ("refused", "unfinished", "crashed") if isinstance(value, dict) else ()
    problem = outcome.line or next((str(value[k]) for k in kinds if value.get(k)), None)
    if not problem:
        return f"{' '.join(outcome.task.overrides)}, done"
    return outcome.line or f"{' '.join(outcome.task.overrides)}, {problem.strip().splitlines()[-1]}"


def _returned(outcome: Outcome, overrides: list[str]) -> JobReturn:
    return outcome.returned or _unfinished(str(outcome.line), overrides)


def _unfinished(line: str, overrides: list[str]) -> JobReturn:
    return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value={"unfinished": line})


def _say(line: str) -> None:
    print(line, flush=True)
