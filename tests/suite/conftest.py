import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from experiments import training
from suite.command.configuration import composed, resolve
from tests.suite.programs import ONE_BLOCK, ROOT

__all__ = ["ROOT"]


def resolved(experiment: str, *overrides: str):
    """The settings of an experiment, small and on the CPU, as its run resolves them."""
    quick = [f"+experiment={experiment}", "scale=smoke", "data=shapes", "logger=none"]
    return resolve(composed(*quick, "device=cpu", "threads=1", *overrides))


@cache
def _composed(experiment: str) -> DictConfig:
    quick = ["scale=smoke", "data=shapes", "logger=none", "device=cpu", "threads=1"]
    return composed(f"+experiment={experiment}", *quick)


def set_anew(experiment: str, *overrides: str) -> DictConfig:
    """What ``resolved`` gives, in a hundredth of the time; with no other choice of a group."""
    config = _composed(experiment).copy()
    given = OverridesParser.create().parse_overrides(list(overrides))
    ConfigLoaderImpl._apply_overrides_to_config(given, config)
    return resolve(config)


class Finished:
    """What a command left: exit status, both streams."""

    def __init__(self, status: int, out: str, err: str):
        self.status, self.out, self.err = status, out, err
        self.errors = [line for line in err.splitlines() if line.strip()]


OF_ANY_NETWORK = [f"+experiment={n}" for n in ("control", "precision", "split_conv", "control,precision")]


def small(arguments: tuple[str, ...], results: Path) -> list[str]:
    """The arguments of a run without a network that takes seconds, but for what is asked for."""
    given = {a.split("=")[0] for a in arguments}
    settings = ["scale=smoke", "data=shapes", "logger=none", f"results={results}"]
    if any(a in OF_ANY_NETWORK for a in arguments) and not any("model" in a for a in given):
        settings.append(ONE_BLOCK)
    return [*arguments, *(s for s in settings if s.split("=")[0] not in given)]


@pytest.fixture
def train_afresh(tmp_path):
    """Run train.py as a person does, small, in a Python of its own; results under a temporary folder."""

    def run(*arguments: str) -> Finished:
        command = [sys.executable, str(ROOT / "train.py"), *small(arguments, tmp_path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=600)
        return Finished(done.returncode, done.stdout, done.stderr)

    return run


@pytest.fixture
def train(forked, tmp_path):
    """The same in a fork of a process that has imported everything: some seconds less each time."""

    def run(*arguments: str) -> Finished:
        ended = forked.run(*small(arguments, tmp_path), kill_after=600, columns=80)
        return Finished(ended.status, ended.stdout, ended.stderr)

    return run


@pytest.fixture
def judged(tmp_path):
    """The verdict of a small run in this process: what train.py does, without starting Python anew."""

    def run(*overrides: str) -> dict:
        settings = composed(*small(overrides, tmp_path))
        training.run(settings)
        (file,) = Path(settings.results).rglob("verdict.json")
        return json.loads(file.read_text())

    return run
