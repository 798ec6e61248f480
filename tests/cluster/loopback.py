"""A real Slurm for the tests, and what they do to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from tests.experiments.conftest import ROOT

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
        """Nothing that ran on it is left; Slurm has to find that out."""
        self.end(f"slurmd.{name}", signal.SIGKILL)
        for place in Path("/proc").glob("[0-9]*"):
            environment = _environment(place)
            watching = _read(place / "comm").strip() == "slurmstepd" and self._logs_of(place) == name
            ours = environment.get("SLURM_CONF") == self.environment["SLURM_CONF"]
            if watching or (ours and environment.get("SLURMD_NODENAME") == name):
                os.kill(int(place.name), signal.SIGKILL)

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


def _environment(process: Path) -> dict[str, str]:
    items = (item.partition("=") for item in _read(process / "environ").split("\0"))
    return {name: value for name, _, value in items}


def _read(file: Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace")
    except OSError:
        return ""
