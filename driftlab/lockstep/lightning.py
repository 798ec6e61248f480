"""The lockstep on a Lightning Trainer: one training step of the Trainer steps every arm once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from driftlab.extras import extra

with extra("lightning"):
    import lightning
    from lightning.pytorch.plugins.environments import LightningEnvironment

import torch
from torch import Tensor

from driftlab.lockstep.loop import Lockstep
from driftlab.lockstep.together import Together

GetBatch = Callable[[int], tuple[Tensor, Tensor]]


class Watcher(Protocol):
    """Something that acts between the steps."""

    def before_step(self, step: int) -> None: ...

    def after_step(self, step: int) -> None: ...


class AllArms(torch.optim.Optimizer):
    """Steps the optimizers of all arms as one.

    Lightning counts a step for every optimizer that it knows of (Lightning #17958), so it is shown one.
    """

    def __init__(self, lockstep: Lockstep | Together):
        self._lockstep, self.next_step = lockstep, 0
        super().__init__([p for arm in lockstep.arms for p in arm.module.parameters()], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:
        if closure is not None:
            closure()
        self._lockstep.update(self.next_step)


class Between(lightning.Callback):
    """Calls ``before_step(step)`` and ``after_step(step)`` of whatever watches the run."""

    def __init__(self, watcher: Watcher):
        self.watcher = watcher

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        self.watcher.before_step(batch[0])

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx) -> None:
        self.watcher.after_step(batch[0])


class KeepSigterm(lightning.Callback):
    """What SIGTERM did before the Trainer it goes on to do: call a handler, end the process, or nothing.

    Lightning ends the training at SIGTERM even if the job has a handler that goes on. Slurm sends it at the
    start of a preemption, and starts a job again only if that is still there when the time of grace is over.
    And Lightning ends it by a SystemExit without a code: a process that was told to stop exits with 0.
    """

    def __init__(self):
        self.before = signal.getsignal(signal.SIGTERM)

    def on_train_start(self, trainer, pl_module) -> None:
        if self.before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, self.before)


class StepBatches:
    """The batches of the steps ``start`` .. ``stop`` - 1, with their step, as an iterable for the Trainer."""

    def __init__(self, get_batch: GetBatch, start: int, stop: int):
        self.get_batch, self.start, self.stop = get_batch, start, stop

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[tuple[int, tuple[Tensor, Tensor]]]:
        return ((step, self.get_batch(step)) for step in range(self.start, self.stop))


class LockstepModule(lightning.LightningModule):
    """All arms in one LightningModule; ``trainer.global_step`` counts batches.

    Each batch is ``(step, (inputs, targets))`` as ``StepBatches`` gives it. After the last update the
    arms are measured once more, on the batch that would come next, for the last row of the curves.
    So the arms are no submodules of it: those the Trainer moves to the CPU when it ends (Lightning #10294),
    and ours stay where they and their batches are made.
    """

    def __init__(self, lockstep: Lockstep | Together, get_batch: GetBatch):
        super().__init__()
        self.automatic_optimization = False
        self.lockstep, self.get_batch = lockstep, get_batch

    def configure_optimizers(self) -> AllArms:
        return AllArms(self.lockstep)

    def training_step(self, batch: tuple[int, tuple[Tensor, Tensor]], batch_idx: int) -> None:
        step, (inputs, targets) = batch
        self.lockstep.forward_backward(step, inputs, targets)
        optimizer = self.optimizers()
        optimizer.optimizer.next_step = step
        optimizer.step()

    def transfer_batch_to_device(self, batch, device, dataloader_idx):
        """The batches are made on the device."""
        return batch

    def measure_last(self) -> None:
        """The row after the last update."""
        step = self.lockstep.steps
        self.lockstep.forward_backward(step, *self.get_batch(step))
        self.lockstep.flush()


def trainer(
    steps: int, device: torch.device, callbacks: Sequence[lightning.Callback] = ()
) -> lightning.Trainer:
    """A Trainer that adds nothing of its own: no checkpoint, bar, summary or validation.

    Under Slurm it stays one process like anywhere else: Lightning's own Slurm environment would requeue the
    job at SIGUSR1, and refuse an allocation of several tasks.

    Args:
        steps: batches still to train.
    """
    return lightning.Trainer(
        accelerator="gpu" if device.type == "cuda" else "cpu",
        devices=1,
        max_steps=steps,
        max_epochs=-1,
        barebones=True,
        use_distributed_sampler=False,
        plugins=[LightningEnvironment()],
        callbacks=[KeepSigterm(), *callbacks],
    )
