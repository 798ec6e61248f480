"""The lockstep on a Trainer is the lockstep by hand, and the Trainer counts batches."""

import pytest
import torch

from driftlab.lockstep.lightning import Between, LockstepModule, StepBatches, trainer
from tests.driftlab.lockstep.test_lockstep import STEPS, batch, lockstep, network, run


class Watcher:
    def __init__(self):
        self.seen = []

    def before_step(self, step):
        self.seen.append(("before", step))

    def after_step(self, step):
        self.seen.append(("after", step))


def train(steps, start=0, batch=batch, device="cpu"):
    module, watcher = LockstepModule(steps, batch), Watcher()
    runner = trainer(steps.steps - start, torch.device(device), callbacks=[Between(watcher)])
    runner.fit(module, StepBatches(batch, start, steps.steps))
    module.measure_last()
    return runner, watcher


def test_the_step_count_counts_batches_whatever_the_number_of_arms():
    steps = lockstep()
    runner, watcher = train(steps)
    assert len(steps.arms) == 6
    assert runner.global_step == STEPS
    assert watcher.seen == [(when, s) for s in range(STEPS) for when in ("before", "after")]


def test_the_rows_are_those_of_the_plain_loop():
    on_trainer, plain = lockstep(), run(lockstep())
    train(on_trainer)
    assert on_trainer.rows == plain.rows


def test_the_arms_stay_on_their_gpu_for_the_last_row(cuda):
    on_gpu, on_cpu = lockstep(network().cuda()), run(lockstep())
    train(on_gpu, batch=lambda step: tuple(t.cuda() for t in batch(step)), device="cuda")
    assert {p.device.type for arm in on_gpu.arms for p in arm.module.parameters()} == {"cuda"}
    losses = [steps.rows[STEPS]["loss/control.float32"] for steps in (on_gpu, on_cpu)]
    assert losses[0] == pytest.approx(losses[1])
