import json
import os
import subprocess
import sys
import threading

import pytest

from tests.experiments.conftest import ROOT

# A training of two seconds: every step leaves a checkpoint.
TINY = "scale=smoke data=shapes logger=none steps=8 float64_steps=2 eval_every=5 eval_images=8 batch_size=4"
TRAINING = [*TINY.split(), "checkpoint_every=0", "probe_images=2", "threads=1", "workers=1"]
QUESTION = (
    "scale=smoke logger=none faults=false case.points=4 curve.points=2 curve.decades=3 threads=1 workers=1"
)
QUESTION = QUESTION.split()


class Ended:
    """What an attempt left: its status (negative: the signal) and what it printed."""

    def __init__(self, status: int, out: str):
        self.status, self.out = status, out
        self.words = "".join(out.split())  # a panel breaks lines anywhere

    @property
    def errors(self) -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith("error: ")]

    def says(self, text: str) -> bool:
        return "".join(text.split()) in self.words


class Forked:
    """Programs of the project in processes of their own, forked from one that has imported everything."""

    def __init__(self):
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.experiments.faults.forked"],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT},
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        )
        self._lock = threading.Lock()
        assert json.loads(self._process.stdout.readline()) == "ready"

    def together(self, *attempts: dict) -> list[Ended]:
        with self._lock:
            self._process.stdin.write(json.dumps(attempts) + "\n")
            self._process.stdin.flush()
            return [Ended(a["status"], a["out"]) for a in json.loads(self._process.stdout.readline())]

    def run(self, *arguments: str, program: str = "train.py", **more) -> Ended:
        (ended,) = self.together(attempt(*arguments, program=program, **more))
        return ended

    def end(self):
        self._process.kill()  # it holds nothing, and torch takes its time to end
        self._process.wait()


def attempt(*arguments, program="train.py", kill_after=None, path=None) -> dict:
    """``path``: what stands first in ``sys.path``."""
    found = {"program": program, "arguments": [str(a) for a in arguments]}
    return found | {"kill_after": kill_after, "path": path}


@pytest.fixture(scope="session")
def forked():
    server = Forked()
    yield server
    server.end()


def folder_of(results):
    """The one experiment in a results folder."""
    (file,) = results.glob("*/*/experiment.yaml")
    return file.parent


def assert_same(a, b, what=""):
    """Two seeds' folders hold the same tables and the same state, to the bit."""
    import torch
    from safetensors.torch import load_file

    for name in ("curves.csv", "evaluations.csv"):
        assert (a / name).read_bytes() == (b / name).read_bytes(), f"{name} of {b.name} {what}"
    if (a / "checkpoint").exists():
        mine, theirs = (load_file(p / "checkpoint" / "state.safetensors") for p in (a, b))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), f"state of {b.name} {what}"
    else:
        mine, theirs = (json.loads((p / "measurements.json").read_text()) for p in (a, b))
        assert mine == theirs, f"measurements of {b.name} {what}"
