"""Training inside a job leaves the signals and variables of Slurm to those who started it. Needs no Slurm."""

import os
import signal

import pytest
import torch

from driftlab.lockstep.lightning import Between, LockstepModule, StepBatches, trainer
from tests.driftlab.lockstep.test_lockstep import STEPS, batch, lockstep


class Sends:
    """Sends this process a signal in the middle of the training."""

    def __init__(self, number: int | None):
        self.number = number

    def before_step(self, step: int) -> None:
        if step == STEPS // 2 and self.number:
            os.kill(os.getpid(), self.number)

    def after_step(self, step: int) -> None:
        pass


def train(number: int | None = None) -> int:
    """The steps that were trained."""
    steps = lockstep()
    runner = trainer(steps.steps, torch.device("cpu"), callbacks=[Between(Sends(number))])
    runner.fit(LockstepModule(steps, batch), StepBatches(batch, 0, steps.steps))
    return runner.global_step


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_handler_that_goes_on_is_obeyed(monkeypatch, number):
    for name, value in {
        "SLURM_NTASKS": "1",
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
    }.items():
        monkeypatch.setenv(name, value)
    received = []
    before = signal.signal(number, lambda got, frame: received.append(got))
    try:
        assert train(number) == STEPS
    finally:
        signal.signal(number, before)
    assert received == [number]


def test_nobody_handles_sigusr1_for_us(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "1")
    seen = []
    monkeypatch.setattr(
        Sends, "before_step", lambda self, step: seen.append(signal.getsignal(signal.SIGUSR1))
    )
    train()
    assert seen == [signal.SIG_DFL] * STEPS


def test_an_allocation_of_several_tasks_is_no_obstacle(monkeypatch):
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert train() == STEPS
