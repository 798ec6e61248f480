"""Waits for the jobs of a sweep, whatever happens to them and to the controller."""

from __future__ import annotations

import contextlib
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from hydra.core.utils import JobReturn, JobStatus

from hydra_plugins.driftlab import _slurm_controller as controller
from suite.command.errors import one_line

if TYPE_CHECKING:
    from submitit import Job

SHORTEST = 2.0  # seconds between two questions to the controller, at first
SLOW_FOLDER = 60.0  # seconds after which a file of another node is seen here for certain (NFS caches)
WHY_LIMIT = (
    "at its time limit: its seed goes on from the last checkpoint; where it gets nowhere in that time, write "
    "a larger hydra.launcher.timeout_min"
)
WHY_OTHER = (
    "by Slurm (a preemption, a lost node, scontrol requeue): its seed goes on from the last checkpoint"
)
# After this a job that waits for the seed of one that was cancelled on another machine takes it up.
TAKEN_UP = "a job of another sweep that waits for the same seed takes it up within minutes"
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

    def __str__(self) -> str:
        value = self.returned.return_value if self.returned else None
        kinds = ("refused", "unfinished", "crashed") if isinstance(value, dict) else ()
        problem = next((str(value[k]) for k in kinds if value.get(k)), None)
        ended = problem.strip().splitlines()[-1] if problem else "done"
        return self.line or f"{' '.join(self.task.overrides)}, {ended}"


class Waiting:
    """Asks about all jobs at once and gives each as it ends.

    A job has ended when its result lies in the folder, or when Slurm names it as ended, or names it no more,
    at two questions in a row and there is no result. Jobs that Slurm starts again are waited for; a
    controller that does not answer is waited for too.

    Args:
        say: takes a line for the user.
        longest: seconds between two questions, once the sweep is some minutes old.
    """

    def __init__(self, tasks: list[Task], say: Callable[[str], None], *, longest: float):
        self.left = {task.job.job_id: task for task in tasks}
        self.say, self.longest = say, longest
        self.absent: dict[str, tuple[int, float]] = {}  # how often in a row, and since when
        self.said: set[str] = set()
        self.running: set[str] = set()
        self.requeued, self.at_limit = Counter[str](), Counter[str]()

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
            if name in self.left:
                self.look_for_requeue(self.left[name], state)
            if name in self.left and state.name == "PENDING" and state.reason not in ORDINARY:
                task = self.left[name]
                self.say_once(
                    state.reason, f"{task} is kept waiting by Slurm: {state.reason}; scancel ends it"
                )
        return listed

    def look_for_requeue(self, task: Task, state: controller.State) -> None:
        """Say that a job has to begin again, at the first time, the second, the fourth, the eighth ..."""
        name = task.job.job_id
        if state.name == "RUNNING":
            self.running.add(name)
        elif state.name == "PENDING" and name in self.running:
            self.running.discard(name)
            self.requeued[name] += 1
            times, limits = self.requeued[name], times_at_limit(task)
            why = WHY_LIMIT if limits > self.at_limit[name] else WHY_OTHER
            self.at_limit[name] = limits
            if times & (times - 1) == 0:
                often = {1: "", 2: ", for the second time"}.get(times, f", for the {times}th time")
                self.say(f"{task} was put back into the queue{often}, {why}")

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
        how += f", as by scancel ({TAKEN_UP})" if how.startswith("CANCELLED") else ""
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


def times_at_limit(task: Task) -> int:
    """How often submitit has noted in a job's log, which every start of the job adds to, that time was up."""
    try:
        log = task.job.paths.stdout.read_bytes()
    except OSError:
        return 0
    return len(re.findall(rb"this job is timed-out", log))


def log_of(task: Task) -> str:
    path = task.job.paths.stdout
    return f"its log is {path}" if path.exists() else "it left no log"
