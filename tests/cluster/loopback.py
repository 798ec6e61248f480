"""A real Slurm for the tests, and what they do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.suite.conftest import ROOT

TOOL = [sys.executable, str(ROOT / "scripts" / "loopback_slurm.py")]
PATIENCE = 500  # seconds; far more than anything here takes, for machines that are busy


def wait_for(reached: Callable[[], object], what: str):
    deadline = time.monotonic() + PATIENCE
    while not (found := reached()):
        assert time.monotonic() < deadline, f"waited {PATIENCE} s for {what}"
        time.sleep(0.05)
    return found


class Cluster:
    """Two nodes of two CPUs each on this machine."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "PYTEST_"))},
            "SLURM_CONF": str(folder / "slurm.conf"),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }

    def tool(self, *action: str) -> subprocess.CompletedProcess[str]:
        command = [*TOOL, *action, "--folder", str(self.folder)]
        return subprocess.run(command, capture_output=True, text=True)

    def start(self) -> None:
        """What does not run."""
        done = self.tool("start", "--cpus", "2")
        assert done.returncode == 0, done.stderr

    def ask(self, *command: str) -> str:
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=True)
        return done.stdout

    def end(self, daemon: str, how: signal.Signals) -> None:
        pid = int((self.folder / f"{daemon}.pid").read_text())
        os.kill(pid, how)
        wait_for(lambda: not (Path("/proc") / str(pid) / "exe").exists(), f"{daemon} to end")

    def crash_node(self, name: str) -> None:
        """Nothing that ran on it is left; Slurm has to find that out.

        On a node without power nobody reports the end of anybody. A slurmstepd whose child dies first tells
        the controller that the job failed with exit code 137. An srun, or the process that watches over it,
        that sees another die asks for the step to be cancelled; that waits until the node is back, and kills
        the job that began again. So all of them stand still before the first one dies, and the youngest dies
        first: the kernel wakes who stands still once the parent of its process group is gone.
        """
        self.end(f"slurmd.{name}", signal.SIGKILL)
        stopped: set[int] = set()
        while moving := self._processes_of(name) - stopped:
            for pid in sorted(moving, key=self._reports, reverse=True):
                _send(pid, signal.SIGSTOP)
            stopped |= moving
        for pid in sorted(stopped, reverse=True):
            _send(pid, signal.SIGKILL)

    def _reports(self, pid: int) -> bool:
        """Whether it would report that one of the others stands still."""
        return _read(Path("/proc") / str(pid) / "comm").strip() in ("slurmstepd", "srun")

    def clear(self) -> None:
        """No job of a test that failed is left to the next one, and no node or daemon is missing."""
        self.start()
        subprocess.run(["scancel", "--user", str(os.getuid())], env=self.environment)
        wait_for(lambda: not self.ask("squeue", "--noheader"), "the queue to be empty")

    def _processes_of(self, name: str) -> set[int]:
        """What runs on a node, and what watches over it."""
        found = set()
        for place in Path("/proc").glob("[0-9]*"):
            environment = _environment(place)
            ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            on_node = ours and environment.get("SLURMD_NODENAME") == name
            if on_node or self._logs_of(place) == name:
                found.add(int(place.name))
        return found

    def _logs_of(self, process: Path) -> str | None:
        logs = {str(self.folder / f"slurmd.{name}.log"): name for name in ("n1", "n2")}
        try:
            opened = [os.readlink(f) for f in (process / "fd").iterdir()]
        except OSError:
            return None
        return next((logs[o] for o in opened if o in logs), None)

    def job_of(self, results: Path, seed: int) -> dict[str, str]:
        """The environment of the process that trains a seed of a sweep over 0, 1, ...; PID is its id."""

        def running() -> dict[str, str] | None:
            for place in Path("/proc").glob("[0-9]*"):
                command = _read(place / "cmdline")
                if "submitit.core._submit" not in command or "srun" in command or str(results) not in command:
                    continue
                environment = _environment(place)
                if environment.get("SLURM_ARRAY_TASK_ID") == str(seed) and "SLURM_PROCID" in environment:
                    return {**environment, "PID": place.name}
            return None

        return wait_for(running, f"the job of seed {seed}")

    def restarts(self, job: dict[str, str]) -> int:
        name = f"{job['SLURM_ARRAY_JOB_ID']}_{job['SLURM_ARRAY_TASK_ID']}"
        shown = self.ask("scontrol", "--oneliner", "show", "job", name)
        return int(shown.partition(" Restarts=")[2].split()[0])


def _send(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _environment(process: Path) -> dict[str, str]:
    items = (item.partition("=") for item in _read(process / "environ").split("\0"))
    return {name: value for name, _, value in items}


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""
