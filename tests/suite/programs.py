"""Programs of the project in processes of their own, forked from one that has imported everything."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from filelock import FileLock

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
    """What is asked for programs: the process that has imported everything, which listens at ``place``."""

    def __init__(self, place: Path):
        with FileLock(f"{place}.lock"):  # whoever comes first starts it
            ready = self._connected(place)
            if not ready:
                self._started(place)
                ready = self._connected(place)
        assert json.loads(ready) == "ready"
        self._lock = threading.Lock()

    def _connected(self, place: Path) -> str:
        """What it says once it has imported everything; "" where there is none, or one that is ending."""
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect(str(place))
            self._lines = self._socket.makefile("rw")
            return self._lines.readline()
        except OSError:
            return ""

    def _started(self, place: Path) -> None:
        place.unlink(missing_ok=True)  # of one that has ended
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.suite.forked", str(place)],
            **{"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "cwd": ROOT},
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        deadline = time.monotonic() + 60
        while not place.exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def together(self, *attempts: dict) -> list[Ended]:
        with self._lock:
            print(json.dumps(attempts), file=self._lines, flush=True)
            return [Ended(**answer) for answer in json.loads(self._lines.readline())]

    def run(self, *arguments: str, **more) -> Ended:
        (ended,) = self.together(attempt(*arguments, **more))
        return ended

    def end(self):
        """It ends with the last who was connected."""
        self._lines.close()
        self._socket.close()


def attempt(
    *arguments, program="train.py", kill_after=None, kill_by=signal.SIGKILL, path=None, columns=200
) -> dict:
    """``path``: what stands first in ``sys.path``; ``columns``: of the terminal."""
    found = {"program": program, "arguments": [str(a) for a in arguments]}
    environment = {**os.environ, "COLUMNS": str(columns)}
    killed = {"kill_after": kill_after, "kill_by": int(kill_by)}
    return found | {"environment": environment, "path": path} | killed
