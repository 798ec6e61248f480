import json
import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir

from experiments import training
from experiments.configuration import register_resolvers, resolve

ROOT = Path(__file__).resolve().parent.parent.parent


def resolved(experiment: str, *overrides: str):
    """The settings of an experiment, small and on the CPU, as its run resolves them."""
    register_resolvers()
    small = [f"+experiment={experiment}", "scale=smoke", "data=shapes", "logger=none"]
    with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
        return resolve(compose("config", [*small, "device=cpu", "threads=1", *overrides]))


class Finished:
    """What a command left: exit status, both streams."""

    def __init__(self, done: subprocess.CompletedProcess):
        self.status, self.out, self.err = done.returncode, done.stdout, done.stderr
        self.errors = [line for line in done.stderr.splitlines() if line.strip()]


@pytest.fixture
def train(tmp_path):
    """Run train.py as a person does, small, without a network, results under a temporary folder."""

    def run(*arguments: str, results: Path | None = None, quick: bool = True) -> Finished:
        small = ["scale=smoke", "data=shapes", "logger=none"] if quick else []
        given = {a.split("=")[0] for a in arguments}
        small = [s for s in small if s.split("=")[0] not in given]
        place = [] if any(a.startswith("results=") for a in arguments) else [f"results={results or tmp_path}"]
        command = [sys.executable, str(ROOT / "train.py"), *arguments, *small, *place]
        return Finished(subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600))

    return run


@pytest.fixture
def judged(tmp_path):
    """The verdict of a small run in this process: what train.py does, without starting Python anew."""

    def run(*overrides: str) -> dict:
        register_resolvers()
        given = {o.split("=")[0] for o in overrides}
        small = ["scale=smoke", "data=shapes", "logger=none", f"results={tmp_path}"]
        small = [s for s in small if s.split("=")[0] not in given]
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            training.run(compose("config", [*overrides, *small]))
        (file,) = tmp_path.rglob("verdict.json")
        return json.loads(file.read_text())

    return run
