"""Programs of the project in processes of their own, forked from one that has imported everything."""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# A quarter of what a smoke run of the whole ResNet18 takes: most of that is probing its twenty convolutions.
ONE_BLOCK = "model._target_=tests.networks.one_block"


class Ended:
    """What an attempt left: its status (negative: the signal) and what it printed."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.stdout, self.stderr = status, out, err
        self.out = out + err
        self.words = "".join(self.out.split())  # a panel breaks lines anywhere

    @property
    def errors(self) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith("error: ")]

    def says(self, text: str) -> bool:
        return "".join(text.split()) in self.words


class Forked:
    """The process that has imported everything, and what to ask it for."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.suite.forked"],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT},
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._lock = threading.Lock()
        assert json.loads(self._process.stdout.readline()) == "ready"

    def together(self, *attempts: dict) -> list[Ended]:
        with self._lock:
            self._process.stdin.write(json.dumps(attempts) + "\n")
            self._process.stdin.flush()
            return [Ended(**answer) for answer in json.loads(self._process.stdout.readline())]

    def run(self, *arguments: str, **more) -> Ended:
        (ended,) = self.together(attempt(*arguments, **more))
        return ended

    def end(self):
        self._process.kill()  # it holds nothing, and torch takes its time to end
        self._process.wait()


def attempt(
    *arguments, program="train.py", kill_after=None, kill_by=signal.SIGKILL, path=None, columns=200
) -> dict:
    """``path``: what stands first in ``sys.path``; ``columns``: of the terminal."""
    found = {"program": program, "arguments": [str(a) for a in arguments]}
    environment = {**os.environ, "COLUMNS": str(columns)}
    killed = {"kill_after": kill_after, "kill_by": int(kill_by)}
    return found | {"environment": environment, "path": path} | killed
