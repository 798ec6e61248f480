"""Two workers on two pretended GPUs: killed in the middle, the same command ends as it ends on the CPU."""

import csv
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from tests.gpu.test_experiments import OF_KIND, QUICK
from tests.suite.below import below
from tests.suite.programs import ROOT

# where so few steps do not reach what the experiment expects, on the CPU neither
OTHERWISE = {"kinks": "inconclusive"}
STEPS = 6


def started(results, of_kind):
    """In a group of its own, so that one signal kills all of its processes."""
    name, *settings = OF_KIND[of_kind]
    command = ["train.py", f"+experiment={name}", "seed=0..1", *QUICK.split(), *settings]
    if of_kind == "training":
        command += [f"steps={STEPS}", "checkpoint_every=0"]
    return subprocess.Popen(
        [sys.executable, "-m", "tests.pretended_cuda", *command, f"results={results}"],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True},
        **{"cwd": ROOT, "start_new_session": True},
        env={**os.environ, "PRETENDED_GPUS": "2", "OMP_NUM_THREADS": "1"},
    )


def killed_once_there_is(pattern, results, of_kind):
    process = started(results, of_kind)
    try:
        while not any(below(results, pattern)):
            assert process.poll() is None, process.stdout.read()
            time.sleep(0.01)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
    assert not list(results.rglob("run.json"))


def ends_as_on_the_cpu(forked, results, of_kind):
    process = started(results, of_kind)
    said, _ = process.communicate(timeout=600)
    assert process.returncode == 0, said
    runs = {home: json.loads((home / "run.json").read_text()) for home in results.rglob("seed=?")}
    assert [run["environment"]["device"] for run in runs.values()] == ["Pretended GPU"] * 2
    # a GPU may be one process's alone: the parent is on none
    assert "pretended CUDA: not used by this process" in said
    assert "pretended CUDA: used by this process" not in said
    (file,) = results.rglob("verdict.json")
    verdict = json.loads(file.read_text())
    expected = yaml.safe_load((file.parent / "experiment.yaml").read_text())["expected"]
    assert verdict["verdict"] == OTHERWISE.get(of_kind, expected), said
    assert verdict["seeds"] == [0, 1]
    judged = forked.run(results, program="scripts/judge.py")
    assert judged.status == 0, judged.out
    assert json.loads(file.read_text()) == verdict
    return runs


@pytest.mark.slow
@pytest.mark.drawn(1)
@pytest.mark.parametrize("of_kind", [k for k in OF_KIND if k != "training"])
def test_a_question_is_killed_and_goes_on(forked, tmp_path, of_kind):
    killed_once_there_is(".seed=?.owner", tmp_path, of_kind)
    ends_as_on_the_cpu(forked, tmp_path, of_kind)


def steps_of(home):
    with (home / "curves.csv").open() as file:
        return [int(row["step"]) for row in csv.DictReader(file)]


@pytest.mark.slow
def test_a_training_is_killed_and_goes_on(forked, tmp_path):
    killed_once_there_is("state.safetensors", tmp_path, "training")
    runs = ends_as_on_the_cpu(forked, tmp_path, "training")
    assert any(run["times"]["resumed_at_step"] for run in runs.values())
    assert [steps_of(home) for home in runs] == [list(range(STEPS + 1))] * 2
