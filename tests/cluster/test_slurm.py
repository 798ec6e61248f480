"""Sweeps on a real Slurm: whatever happens to a job, its seed ends as if nothing had, to the last bit."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.cluster.conftest import SETTINGS
from tests.cluster.loopback import PATIENCE, Cluster, wait_for
from tests.suite.conftest import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.service]

LAUNCHER = {
    "gpus_per_node": "null",
    "cpus_per_task": "1",
    "mem_gb": "1",
    "timeout_min": "30",
    "poll_seconds": "2",
}


class Session:
    """``train.py`` on Slurm, running."""

    def __init__(
        self, cluster: Cluster, results: Path, experiment="split_conv", *settings: str, **launcher: str
    ):
        chosen = [f"hydra.launcher.{k}={v}" for k, v in (LAUNCHER | launcher).items()]
        command = [sys.executable, str(ROOT / "train.py"), "-m", f"+experiment={experiment}", "seed=0..1"]
        self.process = subprocess.Popen(
            [*command, "hydra/launcher=submitit_slurm", *chosen, *SETTINGS, f"results={results}", *settings],
            cwd=ROOT,
            env=cluster.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def end(self) -> tuple[int, str]:
        """Exit status and what was printed."""
        text, _ = self.process.communicate(timeout=PATIENCE)
        return self.process.returncode, text


@pytest.fixture
def start(cluster):
    """Start a session; none outlives its test."""
    sessions: list[Session] = []

    def started(*arguments, **launcher: str) -> Session:
        sessions.append(Session(cluster, *arguments, **launcher))
        return sessions[-1]

    yield started
    for session in sessions:
        session.process.kill()
    cluster.clear()


def home(results: Path, seed: int) -> Path:
    (folder,) = (results / "split_conv").iterdir()
    return folder / f"seed={seed}"


def freeze(cluster: Cluster, results: Path, seed: int) -> dict[str, str]:
    """Stop the process of a seed in the middle of its training, and give its environment."""
    wait_for(lambda: list(results.glob(f"split_conv/*/seed={seed}/checkpoint/*.safetensors")), "a checkpoint")
    job = cluster.job_of(results, seed)
    os.kill(int(job["PID"]), signal.SIGSTOP)
    assert not (home(results, seed) / "run.json").exists(), "too late: the seed had finished"
    return job


def assert_same(results: Path, undisturbed: Path) -> None:
    for seed in (0, 1):
        a, b = home(undisturbed, seed), home(results, seed)
        for name in ("curves.csv", "evaluations.csv"):
            assert (a / name).read_bytes() == (b / name).read_bytes(), f"{name} of seed {seed}"
        mine, theirs = (load_file(next((p / "checkpoint").glob("*.safetensors"))) for p in (a, b))
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], theirs[k]) for k in mine), f"weights of seed {seed}"


def assert_judged(results: Path, experiment: str) -> None:
    (folder,) = (results / experiment).iterdir()
    assert json.loads((folder / "verdict.json").read_text())["seeds"] == [0, 1]
    assert (folder / "report.html").exists()


def test_a_sweep_ends_with_one_verdict_and_one_report_an_experiment(start, tmp_path):
    status, text = start(tmp_path, "split_conv,control", "steps=4", "float64_steps=2").end()
    assert status == 0, text
    for experiment in ("split_conv", "control"):
        assert_judged(tmp_path, experiment)
    assert "4 of 4 ended" in text


def test_requeued(start, cluster, undisturbed, tmp_path):
    session = start(tmp_path)
    job = freeze(cluster, tmp_path, 1)
    cluster.ask("scontrol", "requeue", f"{job['SLURM_ARRAY_JOB_ID']}_1")
    status, text = session.end()
    assert status == 0, text
    assert cluster.restarts(job) == 1
    assert_same(tmp_path, undisturbed)
    assert_judged(tmp_path, "split_conv")


def test_preempted(start, cluster, undisturbed, tmp_path):
    session = start(tmp_path)
    jobs = [freeze(cluster, tmp_path, seed) for seed in (0, 1)]
    cluster.ask(
        "sbatch", "--partition=urgent", "--nodes=2", "--exclusive", "--output=/dev/null", "--wrap=true"
    )

    def stopped_and_started_again() -> bool:
        for job in jobs:  # Slurm lets them go on for the time of grace, in which they might finish
            with suppress(ProcessLookupError):
                os.kill(int(job["PID"]), signal.SIGSTOP)
        return [cluster.restarts(job) for job in jobs] == [1, 1]

    wait_for(stopped_and_started_again, "both jobs to be put back into the queue")
    status, text = session.end()
    assert status == 0, text
    assert_same(tmp_path, undisturbed)


def test_a_node_is_lost_and_comes_back(start, cluster, undisturbed, tmp_path):
    session = start(tmp_path)
    job = freeze(cluster, tmp_path, 0)
    cluster.crash_node(job["SLURMD_NODENAME"])
    wait_for(lambda: cluster.restarts(job), "Slurm to miss the node")
    # Slurm keeps what it could not tell the lost node, "end this job" among it, and says it once the node is
    # back, also where the job has begun there again: so the job goes on elsewhere first.
    assert cluster.job_of(tmp_path, 0)["SLURMD_NODENAME"] != job["SLURMD_NODENAME"]
    cluster.start()
    status, text = session.end()
    assert status == 0, text
    assert_same(tmp_path, undisturbed)


def test_the_controller_is_away_for_a_while(start, cluster, undisturbed, tmp_path):
    session = start(tmp_path)
    for seed in (0, 1):  # each of them needs the controller until it has begun
        cluster.job_of(tmp_path, seed)
    # not SIGKILL: one that has not saved its state gives the numbers of running jobs away again
    cluster.end("slurmctld", signal.SIGTERM)
    wait_for(lambda: list(tmp_path.glob("split_conv/*/seed=*/run.json")), "a seed to finish without it")
    cluster.start()
    status, text = session.end()
    assert status == 0, text
    assert_same(tmp_path, undisturbed)


def test_the_time_limit_is_reached(start, cluster, undisturbed, tmp_path):
    session = start(tmp_path, timeout_min="2", signal_delay_s="10")  # one may pass before the first step
    job = freeze(cluster, tmp_path, 0)
    process = Path("/proc") / job["PID"]
    wait_for(lambda: pending(process, signal.SIGUSR2), "Slurm's warning before the limit")
    with suppress(ProcessLookupError):
        os.kill(int(job["PID"]), signal.SIGCONT)
    status, text = session.end()
    assert status == 0, text
    assert cluster.restarts(job) >= 1  # a busy machine may reach it again
    assert_same(tmp_path, undisturbed)


def pending(process: Path, number: int) -> bool:
    """Whether the signal waits for a process that stands still; also where a slow test finds it gone."""
    if not process.exists():
        return True
    lines = dict(
        line.split(":\t", 1) for line in (process / "status").read_text().splitlines() if ":\t" in line
    )
    return bool((int(lines["SigPnd"], 16) | int(lines["ShdPnd"], 16)) >> (number - 1) & 1)


def test_a_killed_job_is_named_and_the_same_command_finishes_it(start, cluster, undisturbed, tmp_path):
    session = start(tmp_path)
    job = freeze(cluster, tmp_path, 1)
    os.kill(int(job["PID"]), signal.SIGKILL)
    status, text = session.end()
    assert status == 1, text
    (line,) = (line for line in text.splitlines() if line.startswith("error: "))
    assert "seed=1" in line
    assert "FAILED" in line
    log = Path(line.split()[-1])
    assert log.is_file()
    assert "Traceback" not in text
    assert (home(tmp_path, 0) / "run.json").exists()
    status, text = start(tmp_path).end()
    assert status == 0, text
    assert_same(tmp_path, undisturbed)
    assert_judged(tmp_path, "split_conv")


def test_started_twice_and_the_first_session_killed(forked, start, undisturbed, tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    wait_for(lambda: list(tmp_path.glob("split_conv/*/seed=1/checkpoint/*.safetensors")), "a checkpoint")
    first.process.kill()
    first.process.communicate()
    status, text = second.end()
    assert status == 0, text
    assert_same(tmp_path, undisturbed)
    assert forked.run(tmp_path, program="scripts/judge.py").status == 0
    assert_judged(tmp_path, "split_conv")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("setting", "advice"),
    [
        ({"gpus_per_node": "1"}, "gpus_per_node=null"),
        ({"partition": "nowhere"}, "partition=NAME"),
        ({"timeout_min": "abc"}, "timeout_min"),
        ({"mem_gb": "100000"}, "mem_gb"),
        ({"cpus_per_task": "64"}, "cpus_per_task"),
    ],
)
def test_what_slurm_refuses_is_one_line(start, tmp_path, setting, advice):
    status, text = start(tmp_path, **setting).end()
    assert status == 2, text
    (line,) = text.splitlines()
    assert line.startswith("error: ")
    assert advice in line


def test_without_slurm_it_says_so(tmp_path):
    nowhere = Cluster(tmp_path)
    nowhere.environment["PATH"] = ""
    status, text = Session(nowhere, tmp_path / "results").end()
    assert status == 2, text
    (line,) = text.splitlines()
    assert "hydra/launcher=joblib" in line
