"""Killed anywhere and started again, a run ends as one that was never killed: to the last bit."""

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.experiments.conftest import ROOT

SETTINGS = [
    "+experiment=split_conv",
    "seed=0..1",
    "scale=smoke",
    "steps=40",
    "float64_steps=9",
    "eval_every=7",
    "checkpoint_every=0",
    "log_schedule.dense=10",
    "log_schedule.per_decade=20",
    "logger=none",
]
KILLS = 5


def command(results: Path, data: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *SETTINGS, f"data={data}", f"results={results}"]


def folder_of(results: Path) -> Path:
    (folder,) = (results / "split_conv").iterdir()
    return folder


def kill_after(results: Path, data: str, patience: float) -> bool:
    """Start the run, let it train for ``patience`` seconds, kill it; False where it had ended before."""
    before = {p: p.stat().st_mtime_ns for p in results.rglob("*.safetensors")}
    process = subprocess.Popen(
        command(results, data), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd=ROOT
    )
    while process.poll() is None:
        now = {p: p.stat().st_mtime_ns for p in results.rglob("*.safetensors")}
        if now != before:
            break
        time.sleep(0.002)
    time.sleep(patience)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    return process.returncode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize("data", ["cifar10"])
def test_killed_at_random_points_it_ends_bit_identical(tmp_path, data):
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    killed.mkdir()
    subprocess.run(command(undisturbed, data), check=True, capture_output=True, cwd=ROOT)
    dice = random.Random()
    patience = [dice.uniform(0, 1.5) for _ in range(KILLS)]
    hits = sum(kill_after(killed, data, seconds) for seconds in patience)
    assert hits >= 2, f"too few kills landed in training, after {patience} s"
    subprocess.run(command(killed, data), check=True, capture_output=True, cwd=ROOT)
    for seed in (0, 1):
        a, b = (folder_of(p) / f"seed={seed}" for p in (undisturbed, killed))
        for name in ("curves.csv", "evaluations.csv"):
            assert (a / name).read_bytes() == (b / name).read_bytes(), f"{name} of seed {seed}, {patience}"
        mine, theirs = (load_file(p / "checkpoint" / "state.safetensors") for p in (a, b))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), f"weights of seed {seed}, {patience}"
    leftovers = [p.name for p in folder_of(killed).rglob("*") if ".damaged" in p.name]
    assert not leftovers
