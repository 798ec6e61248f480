"""Several seeds at a time: the same bits as one alone, whatever becomes of the workers."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.suite.below import below
from tests.suite.conftest import ROOT
from tests.suite.programs import ONE_BLOCK, attempt

SMALL = ["scale=smoke", "data=shapes", "logger=none", "checkpoint_every=0"]
SMALL += [ONE_BLOCK, "batch_size=4", "probe_images=2", "eval_images=8"]
LONG = ["steps=40", "float64_steps=9"]


def command(results: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(ROOT / "train.py"), *settings(results, *arguments)]


def settings(results: Path, *arguments: str) -> list[str]:
    return [*SMALL, *arguments, f"results={results}"]


def tables(results: Path) -> dict[str, bytes]:
    """Of every seed, by its place."""
    files = [f for name in ("curves.csv", "evaluations.csv") for f in results.rglob(name)]
    return {str(f.relative_to(results)): f.read_bytes() for f in files}


def workers_of(front: int) -> list[int]:
    """The processes that train: forks of one that the watched process started."""
    started = [process for child in children(front) for process in children(child)]
    return [w for process in started if b"forkserver" in command_line(process) for w in children(process)]


def children(parent: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def command_line(process: int) -> bytes:
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:  # one that the run started for a moment, and that has ended
        return b""


def trained(results: Path) -> bool:
    return any(below(results, "state.safetensors"))


def wait_until(condition) -> None:
    deadline = time.monotonic() + 500  # far more than it takes, for machines that are busy
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def alone(forked, tmp_path_factory):
    """What each seed gives in a process of its own."""
    results = tmp_path_factory.mktemp("alone")
    for seed in (0, 1):
        ended = forked.run(*settings(results, "+experiment=control", *LONG, f"seed={seed}"))
        assert ended.status == 0, ended.out
    return results


@pytest.mark.slow
@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "how",
    [["workers=2"], ["-m", "hydra/launcher=joblib"], ["-m", "workers=2"]],
    ids=["workers", "joblib", "both"],
)
def test_seeds_side_by_side_have_the_bits_of_one_alone(forked, tmp_path, alone, how):
    done = forked.run(*settings(tmp_path, *how, "+experiment=control", *LONG, "seed=0..1"))
    assert done.status == 0, done.out
    assert "Warning" not in done.stderr
    assert tables(tmp_path) == tables(alone)
    for record in tmp_path.rglob("run.json"):
        assert json.loads(record.read_text())["environment"]["threads"] == 1
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["seeds"] == [0, 1]


@pytest.mark.slow
def test_a_worker_that_is_killed_costs_no_seed(tmp_path, alone):
    run = command(tmp_path, "+experiment=control", *LONG, "seed=0..1", "workers=2")
    process = subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)
    wait_until(lambda: trained(tmp_path))
    os.kill(workers_of(process.pid)[0], signal.SIGKILL)
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "a worker was killed" in out
    assert tables(tmp_path) == tables(alone)


@pytest.mark.slow
def test_workers_end_with_the_process_that_started_them(tmp_path, alone):
    run = command(tmp_path, "+experiment=control", *LONG, "seed=0..1", "workers=2")
    process = subprocess.Popen(run, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, cwd=ROOT)
    wait_until(lambda: trained(tmp_path))
    workers = workers_of(process.pid)
    assert len(workers) == 2
    process.kill()
    process.wait()
    wait_until(lambda: not any(is_running(w) for w in workers))
    done = subprocess.run(run, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert tables(tmp_path) == tables(alone)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_where_memory_does_not_hold_two_seeds_it_goes_on_with_one(forked, tmp_path):
    own = ["+experiment=split_conv", "rewrite.target=tests.suite.rewrites.memory_for_one"]
    done = forked.run(*settings(tmp_path, *own, "seed=0..1", "workers=2"))
    assert done.status == 0, done.out
    assert "memory does not hold 2 seeds at a time: going on with 1 at a time" in " ".join(
        done.stdout.split()
    )
    (verdict,) = tmp_path.rglob("verdict.json")
    assert json.loads(verdict.read_text())["seeds"] == [0, 1]


@pytest.mark.slow
def test_the_same_command_on_several_machines_shares_the_seeds_out(forked, tmp_path, alone):
    """Two processes stand for two machines: neither knows of the other but by the folder."""
    run = attempt(*settings(tmp_path, "+experiment=control", *LONG, "seed=0..1", "workers=1"))
    both = forked.together(run, run)
    said = [done.stdout for done in both]
    assert [done.status for done in both] == [0, 0]
    assert tables(tmp_path) == tables(alone)
    finished = sum(text.count("all arms finished") for text in said)
    assert finished == 2, said  # each seed once
    assert all("round_off" in text for text in said)
