"""Two workers on two pretended GPUs: killed in the middle, the same command goes on to the same verdict."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from tests.suite.programs import ROOT

STEPS = 6
TRAINING = f"scale=smoke data=shapes logger=none steps={STEPS} float64_steps=2 eval_images=4 batch_size=4"
COMMAND = [
    *("train.py", "+experiment=split_conv", "seed=0..1", "workers=2", "threads=1", "device=cuda"),
    *("model._target_=tests.gpu.networks.one_block", "probe_images=2", "checkpoint_every=0"),
    *TRAINING.split(),
]


def started(results):
    """In a group of its own, so that one signal kills all of its processes."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.pretended_cuda", *COMMAND, f"results={results}"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        **{"cwd": ROOT, "start_new_session": True},
        env={**os.environ, "PRETENDED_GPUS": "2", "OMP_NUM_THREADS": "1"},
    )


def killed_after_a_checkpoint(results):
    process = started(results)
    try:
        while not list(results.rglob("state.safetensors")):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def steps_of(home):
    with (home / "curves.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_two_workers_on_two_gpus_are_killed_and_go_on(tmp_path):
    killed_after_a_checkpoint(tmp_path)
    assert not list(tmp_path.rglob("verdict.json"))
    process = started(tmp_path)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    runs = {home: json.loads((home / "run.json").read_text()) for home in tmp_path.rglob("seed=?")}
    assert [run["environment"]["device"] for run in runs.values()] == ["Pretended GPU"] * 2
    assert any(run["times"]["resumed_at_step"] for run in runs.values()), said
    assert [steps_of(home) for home in runs] == [list(range(STEPS + 1))] * 2
    # a GPU may be one process's alone: the parent is on none
    assert "pretended CUDA: not used by this process" in said
    assert "pretended CUDA: used by this process" not in said
    (file,) = tmp_path.rglob("verdict.json")
    verdict = json.loads(file.read_text())
    assert verdict["verdict"] == "round_off", said
    subprocess.run([sys.executable, "scripts/judge.py", tmp_path], cwd=ROOT, check=True)
    assert json.loads(file.read_text()) == verdict
