"""The lockstep on a Trainer is the lockstep by hand, and the Trainer counts batches."""

import torch

from driftlab.lightning import Between, LockstepModule, StepBatches, trainer
from tests.driftlab.test_lockstep import STEPS, batch, lockstep, run


class Watcher:
    def __init__(self):
        self.seen = []

    def before_step(self, step):
        self.seen.append(("before", step))

    def after_step(self, step):
        self.seen.append(("after", step))


def train(steps, start=0):
    module, watcher = LockstepModule(steps, batch), Watcher()
    runner = trainer(steps.steps - start, torch.device("cpu"), callbacks=[Between(watcher)])
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
