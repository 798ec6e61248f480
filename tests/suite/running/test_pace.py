"""When a seed leaves a checkpoint: by its cost, and before Slurm ends the job."""

import os
import signal
from typing import NamedTuple

import pytest
import torch

from driftlab.lockstep.checkpoint import checkpoint_step
from suite.running import pace
from suite.running.pace import LONGEST, SHARE, SHORTEST, Pace
from suite.running.recorder import Recorder
from suite.running.seed_run import fit
from tests.driftlab.lockstep.test_lockstep import STEPS, batch, lockstep


class Clock:
    def __init__(self):
        self.now = 1000.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


class Written(NamedTuple):
    number: int
    seconds: float
    longest: float  # seconds without one


def trained(clock, every, costs):
    """The checkpoints of 1,800 steps of 2 s, each of which ``costs`` seconds."""
    rhythm, number, longest, last = Pace(every), 0, 0.0, clock.now
    for _ in range(1800):
        clock.now += 2
        if rhythm.is_due():
            longest = max(longest, clock.now - last)
            with rhythm.writing():
                clock.now += costs
            number, last = number + 1, clock.now
    return Written(number, number * costs, longest)


@pytest.mark.parametrize("costs", [0.001, 0.5, 1.0, 2.9])
def test_checkpoints_take_their_share_of_the_time_and_come_every_few_minutes(clock, costs):
    written = trained(clock, "auto", costs)
    assert written.seconds <= 3600 * SHARE + costs  # the first tells what one costs
    assert written.longest <= LONGEST + 2


def test_however_much_one_costs_it_comes_every_few_minutes(clock):
    assert trained(clock, "auto", 60.0).longest <= LONGEST + 2


def test_what_costs_little_is_not_written_all_the_time(clock):
    assert trained(clock, "auto", 0.01).number <= 3600 / SHORTEST


@pytest.mark.parametrize(("every", "number"), [(0, 1800), (20, 180)])
def test_a_number_is_seconds_and_0_every_step(clock, every, number):
    assert trained(clock, every, 0.0).number == number


class FewBatches:
    """Those of the lockstep's tests; at one step a signal comes."""

    device, batch_size = torch.device("cpu"), 12

    def __init__(self, number, at):
        self.number, self.at = number, at

    def epoch(self, step):
        return 0

    def test_batches(self, images, size):
        return [batch(100)]

    def batch(self, step):
        if step == self.at:
            self.at = None
            os.kill(os.getpid(), self.number)
        return batch(step)


class Silent:
    def log(self, step, row):
        pass


def recorder(steps, home, number=signal.SIGUSR2, at=None):
    every = {"eval_every": 0, "eval_images": None, "checkpoint_every": "auto"}
    quiet = FewBatches(number, at)
    return Recorder(steps, quiet, Silent(), home, progress=lambda step, row: None, **every)


def undisturbed(home):
    alone = recorder(lockstep(), home)
    fit(alone.lockstep, alone.batches, alone, 0)
    return (home / "curves.csv").read_bytes()


@pytest.fixture(params=[signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2])
def number(request):
    before = signal.getsignal(request.param)
    yield request.param
    signal.signal(request.param, before)


def test_a_warning_is_heard_once_the_step_is_stored_and_the_seed_goes_on_from_there(tmp_path, number):
    stood = []

    def requeue(number, frame):  # as submitit: back into the queue, and out
        stood.append(checkpoint_step(tmp_path / "checkpoint"))
        raise SystemExit(-1)

    signal.signal(number, requeue)
    warned = recorder(lockstep(), tmp_path, number, at=3)
    with pytest.raises(SystemExit):
        fit(warned.lockstep, warned.batches, warned, 0)
    assert stood in ([3], [4])  # Lightning fetches a batch ahead
    assert signal.getsignal(number) is requeue
    again = recorder(lockstep(), tmp_path)
    assert again.resume() == stood[0]
    fit(again.lockstep, again.batches, again, stood[0])
    assert (tmp_path / "curves.csv").read_bytes() == undisturbed(tmp_path / "undisturbed")


def test_who_ignores_a_warning_stores_and_goes_on(tmp_path, number):
    """A worker: its parent hears of it too."""
    signal.signal(number, signal.SIG_IGN)
    stored = []
    warned = recorder(lockstep(), tmp_path, number, at=3)
    checkpoint = warned.checkpoint
    warned.checkpoint = lambda step: (stored.append(step), checkpoint(step))
    fit(warned.lockstep, warned.batches, warned, 0)
    assert stored in ([3, STEPS], [4, STEPS])
    assert (tmp_path / "curves.csv").read_bytes() == undisturbed(tmp_path / "undisturbed")
