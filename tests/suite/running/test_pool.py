"""Jobs side by side in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from functools import partial

import pytest

from suite.running.pool import IMPORTED_ONCE, WorkerKilled, side_by_side, tell


def test_every_job_returns_under_its_key():
    jobs = {key: partial(pow, key, 2) for key in (3, 1, 2)}
    assert dict(side_by_side(jobs, 2)) == {3: 9, 1: 1, 2: 4}


def test_jobs_run_at_the_same_time_in_other_processes(tmp_path):
    def meet(mine, other):
        (tmp_path / mine).touch()
        deadline = time.monotonic() + 300
        while not (tmp_path / other).exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return os.getpid()

    jobs = {0: partial(meet, "a", "b"), 1: partial(meet, "b", "a")}
    processes = set(dict(side_by_side(jobs, 2)).values())
    assert len(processes) == 2
    assert os.getpid() not in processes


def test_what_a_job_tells_is_heard_in_its_order():
    heard = []
    jobs = {0: lambda: [tell("number", n, "of ten") for n in range(10)] and None}
    dict(side_by_side(jobs, 1, lambda name, said: heard.append((name, *said))))
    assert heard == [("number", n, "of ten") for n in range(10)]


def test_what_a_job_raises_is_raised():
    def fail():
        raise LookupError("not there")

    with pytest.raises(LookupError, match="not there"):
        dict(side_by_side({0: fail, 1: partial(pow, 2, 2)}, 2))


def test_a_killed_process_is_said():
    with pytest.raises(WorkerKilled):
        dict(side_by_side({0: lambda: os.kill(os.getpid(), signal.SIGKILL)}, 2))


def test_each_process_has_a_gpu_of_its_own(tmp_path):
    def meet(mine):
        (tmp_path / mine).touch()
        deadline = time.monotonic() + 300
        while len(list(tmp_path.iterdir())) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return os.environ["CUDA_VISIBLE_DEVICES"]

    jobs = {n: partial(meet, str(n)) for n in range(3)}
    assert sorted(dict(side_by_side(jobs, 3, gpus=["4", "6", "7"])).values()) == ["4", "6", "7"]


def test_a_process_has_the_environment_of_when_it_is_asked_for(monkeypatch):
    monkeypatch.delenv("DRIFTLAB_TEST_OWN", raising=False)

    def own():
        return os.environ.get("DRIFTLAB_TEST_OWN")

    assert dict(side_by_side({0: own}, 1)) == {0: None}
    monkeypatch.setenv("DRIFTLAB_TEST_OWN", "of now")
    assert dict(side_by_side({0: own}, 1)) == {0: "of now"}


ASKS_NO_GPU = """
import importlib, os, sys, torch
asked = []
doors = (torch.cuda, "device_count"), (torch.cuda, "_lazy_init"), (torch._C, "_cuda_getDeviceCount")
for home, name in doors:
    setattr(home, name, lambda *given, name=name: asked.append(name) or 0)
for name in sys.argv[1:]:
    importlib.import_module(name)
print(asked)
print(torch.cuda.is_available(), bool(asked))
"""


def test_what_is_imported_before_the_fork_asks_for_no_gpu():
    """A process that has asked the driver cannot hand the GPU on to its forks."""
    run = [sys.executable, "-c", ASKS_NO_GPU, *IMPORTED_ONCE]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["[]", "False True"]  # who asks is heard


def test_what_slurm_tells_every_process_does_not_end_a_worker():
    def told():
        for number in (signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(os.getpid(), number)
        return "alive"

    assert dict(side_by_side({0: told}, 1)) == {0: "alive"}
