"""What a session says while its jobs are in the queue. A script stands in for squeue; needs no Slurm."""

import os
from types import SimpleNamespace

import pytest

from hydra_plugins.driftlab import _slurm_submission as submission
from hydra_plugins.driftlab._slurm_waiting import Task, Waiting
from suite.command.errors import ConfigurationError


@pytest.fixture
def queue(tmp_path, monkeypatch):
    """Sets what squeue shows."""
    program, shown = tmp_path / "squeue", tmp_path / "shown"
    program.write_text(f"#!/bin/sh\ncat {shown}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return lambda state: shown.write_text(f"7_0|{state}|None\n")


@pytest.fixture
def job(tmp_path):
    paths = SimpleNamespace(stdout=tmp_path / "log", result_pickle=tmp_path / "result")
    return SimpleNamespace(job_id="7_0", paths=paths)


def test_a_requeue_is_said_with_its_reason_ever_less_often(queue, job):
    said = []
    waiting = Waiting([Task(job, ["seed=0"])], said.append, longest=1)

    def requeue(log=""):
        with open(job.paths.stdout, "a") as file:
            file.write(log)
        for state in ("RUNNING", "PENDING", "PENDING"):
            queue(state)
            waiting.ask()

    requeue("Caught signal SIGUSR2 on n1: this job is timed-out.\n")
    assert len(said) == 1
    assert said[0].startswith("job 7_0 (seed=0) was put back into the queue, at its time limit: ")
    assert "hydra.launcher.timeout_min" in said[0]
    requeue()
    assert "for the second time, by Slurm (a preemption" in said[1]
    for _ in range(6):
        requeue()
    assert [line.partition(",")[2].split(",")[0] for line in said[2:]] == [
        " for the 4th time",
        " for the 8th time",
    ]


def test_a_time_limit_that_leaves_no_time_is_refused(tmp_path):
    params = {"submitit_folder": str(tmp_path), "max_num_timeout": 1, "timeout_min": 1, "signal_delay_s": 120}
    with pytest.raises(ConfigurationError, match=r"write hydra\.launcher\.timeout_min=4 or more"):
        submission.executor(params)
