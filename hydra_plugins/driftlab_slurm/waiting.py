"""Waits for the jobs of a sweep, whatever happens to them and to the controller."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hydra.core.utils import JobReturn, JobStatus

from experiments.errors import one_line
from hydra_plugins.driftlab_slurm import controller

if TYPE_CHECKING:
    from submitit import Job

SHORTEST, LONGEST = 2.0, 30.0  # seconds between two questions to the controller
SLOW_FOLDER = 60.0  # seconds after which a file of another node is seen here for certain (NFS caches)
ORDINARY = {"None", "Resources", "Priority", "BeginTime", "JobArrayTaskLimit", "Dependency"}


class Task(NamedTuple):
    """One job of the sweep."""

    job: Job
    overrides: list[str]

    def __str__(self) -> str:
        return f"job {self.job.job_id} ({' '.join(self.overrides)})"


class Outcome(NamedTuple):
    """How a job ended: with what it returned, or with a line that says why it returned nothing."""

    task: Task
    returned: JobReturn | None
    line: str | None


class Waiting:
    """Asks about all jobs at once and gives each as it ends.

    A job has ended when its result lies in the folder, or when Slurm names it as ended, or names it no more,
    at two questions in a row and there is no result. Jobs that Slurm starts again are waited for; a
    controller that does not answer is waited for too.

    Args:
        say: takes a line for the user.
        longest: seconds between two questions, once the sweep is some minutes old.
    """

    def __init__(self, tasks: list[Task], say: Callable[[str], None], *, longest: float = LONGEST):
        self.left = {task.job.job_id: task for task in tasks}
        self.say, self.longest = say, longest
        self.absent: dict[str, tuple[int, float]] = {}  # how often in a row, and since when
        self.said: set[str] = set()

    def ended(self) -> Iterator[Outcome]:
        began = time.monotonic()
        while self.left:
            listed = self.ask()
            look_again({task.job.paths.result_pickle.parent for task in self.left.values()})
            for name, task in list(self.left.items()):
                outcome = self.look_at(task, listed)
                if outcome:
                    del self.left[name]
                    yield outcome
            if self.left:
                time.sleep(min(self.longest, max(SHORTEST, (time.monotonic() - began) / 20)))

    def ask(self) -> dict[str, controller.State] | None:
        """The states; None where the controller does not answer."""
        try:
            listed = controller.states(sorted({name.partition("_")[0] for name in self.left}))
        except controller.ControllerError as error:
            self.say_once(
                "silent", f"Slurm does not answer ({error}); the jobs go on, and so does the waiting"
            )
            return None
        self.said.discard("silent")
        for name, state in listed.items():
            if name in self.left and state.name == "PENDING" and state.reason not in ORDINARY:
                task = self.left[name]
                self.say_once(
                    state.reason, f"{task} is kept waiting by Slurm: {state.reason}; scancel ends it"
                )
        return listed

    def look_at(self, task: Task, listed: dict[str, controller.State] | None) -> Outcome | None:
        """The outcome of a job that has ended."""
        name = task.job.job_id
        state = listed.get(name) if listed is not None else None
        # first, whatever Slurm says: a controller that crashed may have forgotten that the job ended
        if task.job.paths.result_pickle.exists():
            return read_result(task)
        if listed is None:
            return None
        if state and state.name not in controller.ENDED:
            self.absent.pop(name, None)
            return None
        times, since = self.absent.get(name, (0, time.monotonic()))
        self.absent[name] = times + 1, since
        failed = state is not None and state.name != "COMPLETED"
        if times < 1 or not (failed or time.monotonic() - since >= SLOW_FOLDER):
            return None
        how = controller.how_it_ended(name, state)
        return Outcome(task, None, f"{task} ended without a result: {how}; {log_of(task)}")

    def say_once(self, about: str, line: str) -> None:
        if about not in self.said:
            self.said.add(about)
            self.say(line)


def look_again(folders: set[Path]) -> None:
    """Makes a network file system ask its server what is in them."""
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.touch()


def read_result(task: Task) -> Outcome:
    """What the job returned, or the last line of what it raised."""
    try:
        error = task.job.exception()
        returned = task.job.result() if error is None else None
    except Exception as unreadable:  # cut off, or of another version
        return Outcome(task, None, f"{task}: its result cannot be read ({one_line(unreadable)})")
    if returned is not None and returned.status == JobStatus.COMPLETED:
        return Outcome(task, returned, None)
    reason = returned._return_value if returned is not None else error
    lines = [line.strip() for line in str(reason).splitlines() if line.strip(" -")]
    said = next(
        (x for x in reversed(lines) if not x.startswith(("-", "You can check", "or at"))), "no reason"
    )
    return Outcome(task, None, f"{task} stopped with an error: {said}; {log_of(task)}")


def log_of(task: Task) -> str:
    path = task.job.paths.stdout
    return f"its log is {path}" if path.exists() else "it left no log"
