"""What Hydra finds of driftlab: the sweeper, the launchers of this machine and of Slurm, and their settings.

Hydra imports this file whenever it starts, and none whose name begins with an underscore: what a sweep needs
is imported when there is one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.types import Override
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher import submitit_launcher
from omegaconf import DictConfig, OmegaConf, open_dict

from suite.command import jobs
from suite.command.command_line import CONF
from suite.command.errors import ConfigurationError
from suite.command.leftovers import to_take_away
from suite.command.supervision import Stopped

if TYPE_CHECKING:
    from hydra_plugins.driftlab._slurm_waiting import Outcome, Task


class SeedSweeper(BasicSweeper):
    """``hydra/sweeper=seeds``, the default: Hydra's own sweep, then one verdict an experiment.

    What a job cannot have is refused before the first one begins, of any batch.
    """

    def sweep(self, arguments: list[str]) -> list:
        jobs.begin()
        for name in ("sweeper.max_batch_size", "launcher.n_jobs"):
            _check_count(name, OmegaConf.select(self.config.hydra, name))
        take_away = to_take_away(Path(self.config.hydra.sweep.dir), "multirun.yaml")
        try:
            returns = super().sweep(arguments)
        except Exception:  # a job that cannot be composed
            take_away()
            raise
        from suite.running.ending import end_sweep

        ended = [job.return_value for batch in returns for job in batch]
        if all(e.get("refused") for e in ended):
            take_away()
        end_sweep(ended)
        return returns

    def split_arguments(self, overrides: list[Override], max_batch_size: int | None) -> list[list[list[str]]]:
        """Raises ConfigurationError for the first job whose settings cannot be used."""
        from hydra_plugins.driftlab._sweep_check import check

        batches = super().split_arguments(overrides, max_batch_size)
        jobs = [job for batch in batches for job in batch]
        if not jobs:  # of glob(*) over what is no group
            raise ConfigurationError("the sweep holds no job: give each setting a value at least")
        loader = self.hydra_context.config_loader
        check(jobs, _names(jobs), partial(loader.load_sweep_config, self.config), self.config.hydra.launcher)
        return batches

    def validate_batch_is_legal(self, batch: Sequence[Sequence[str]]) -> None:
        """Each was composed with all others."""


def _check_count(name: str, value: object) -> None:
    """Raises ConfigurationError where it is given and is no number of jobs."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ConfigurationError(f"hydra.{name}={value} must be a whole number of at least 1")


class LauncherSettings(SearchPathPlugin):
    """The settings of the launchers are those in ``conf/hydra/launcher/``, in place of their plugins' own.

    Where both have one name Hydra warns in every process that it starts. Other applications of Hydra see no
    change.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if str(CONF) not in [element.path.removeprefix("file://") for element in search_path.get_path()]:
            return
        stored = ConfigStore.instance().repo.get("hydra", {}).get("launcher", {})
        for file in (CONF / "hydra" / "launcher").glob("*.yaml"):
            stored.pop(file.name, None)


class LocalLauncher(Launcher):
    """``hydra/launcher=joblib``: jobs at a time here, each a process; one that is killed ends no other.

    Args:
        n_jobs: how many at a time.
    """

    def __init__(self, n_jobs: int):
        self.n_jobs = n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """One return a job, in order. One whose process was killed is begun again, with fewer at a time."""
        from suite.running.pool import WorkerKilled, side_by_side, visible_gpus

        state = Singleton.get_state()
        jobs = enumerate(job_overrides, start=initial_job_idx)
        left = {number: partial(self._job, number, list(overrides), state) for number, overrides in jobs}
        ended: dict[int, JobReturn] = {}
        at_once, gpus = self.n_jobs, visible_gpus()
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

    def _job(self, number: int, overrides: list[str], state: dict) -> JobReturn:
        """One job, in the process that carries it out."""
        setup_globals()
        Singleton.set_state(state)
        config = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        with open_dict(config):
            config.hydra.job.id, config.hydra.job.num = f"{config.hydra.job.name}_{number}", number
        return run_job(
            hydra_context=self.hydra_context,
            task_function=self.task_function,
            config=config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )


class SlurmLauncher(submitit_launcher.SlurmLauncher):
    """``hydra/launcher=submitit_slurm``: one Slurm array a sweep, waited for to the end of its last job.

    Each job runs as with the launcher of the plugin ``hydra-submitit-launcher``; but a job that is killed
    ends neither the session nor the sweep, and no accounting is asked for.

    Args:
        poll_seconds: longest time between two questions to the controller.
        params: the settings in conf/hydra/launcher/submitit_slurm.yaml.
    """

    def __init__(self, poll_seconds: float, **params: Any):
        super().__init__(**params)
        self.poll_seconds = poll_seconds

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        """Submit the jobs and wait for them.

        Returns:
            One a job, in their order, each with what the job returned, or with ``{"unfinished": line}``.

        Raises:
            ConfigurationError: no Slurm here, or it takes none of the jobs.
            Stopped, KeyboardInterrupt: the jobs go on.
        """
        from hydra_plugins.driftlab import _slurm_submission as submission
        from hydra_plugins.driftlab._slurm_waiting import Task

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
        found = [outcomes[task.job.job_id] for task in tasks]
        missed = [f"job ({' '.join(names)}) was not submitted: {refused}" for names in named[len(jobs) :]]
        lines = [str(outcome.line) for outcome in found] + missed
        returned = [outcome.returned for outcome in found] + [None] * len(missed)
        return [r or _unfinished(line, c[0]) for r, line, c in zip(returned, lines, calls, strict=True)]

    def _wait(self, tasks: list[Task]) -> dict[str, Outcome]:
        """Every outcome by the job's id. Says what is going on."""
        from hydra_plugins.driftlab._slurm_waiting import Waiting

        arrays = list(dict.fromkeys(task.job.job_id.partition("_")[0] for task in tasks))
        ids, folder = " ".join(arrays), tasks[0].job.paths.stdout.parent
        _say(f"{len(tasks)} jobs in Slurm, array {ids}; logs in {folder}")
        _say("This session may end: the jobs go on, and the same command picks their results up.")
        outcomes: dict[str, Outcome] = {}
        try:
            for outcome in Waiting(tasks, _say, longest=self.poll_seconds).ended():
                outcomes[outcome.task.job.job_id] = outcome
                _say(f"{len(outcomes)} of {len(tasks)} ended: {outcome}")
        except (Stopped, KeyboardInterrupt):
            _say(f"The jobs go on without this session. To end them: scancel {ids}")
            raise
        return outcomes


def _names(jobs: list[Sequence[str]]) -> list[list[str]]:
    """What tells the jobs apart: experiment, seed, and any other setting that they do not share."""
    shared = set(jobs[0]).intersection(*jobs[1:])
    return [[o for o in job if o not in shared or o.startswith(("+experiment=", "seed="))] for job in jobs]


def _unfinished(line: str, overrides: list[str]) -> JobReturn:
    return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value={"unfinished": line})


def _killed(overrides: Sequence[str]) -> JobReturn:
    said = f"the job of {' '.join(overrides)} was killed though no other ran: the same command tries it again"
    return _unfinished(said, list(overrides))


def _say(line: str) -> None:
    print(line, flush=True)
