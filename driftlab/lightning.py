"""``Watch``: a training on a Lightning Trainer, watched (``driftlab.watching`` for a loop of one's own)."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab import watch
from driftlab.diagnosis import Diagnosis
from driftlab.extras import extra
from driftlab.network.pair import Rewrite
from driftlab.words import DiagnoseError

with extra("lightning"):
    import lightning
    from lightning.pytorch.utilities import rank_zero_warn

SHOWN = ("weight_distance/", "gradient_distance/")  # of each look, in the trainer's logger


class Watch(lightning.Callback):
    """Watches a training: would it be the same with the rewritten module?

        watch = driftlab.lightning.Watch(my_rewrite)
        trainer = lightning.Trainer(..., callbacks=[watch])
        trainer.fit(my_module, datamodule)
        watch.diagnosis

    The training is bit for bit what it is without. What is compared is the loss of the module's own
    ``training_step``, all gradients and the updates, in float32 and float64 at the learning rate of that
    batch; not mixed precision, clipping or accumulation. Names in a place begin with ``module.``, the
    LightningModule. At its end ``report.html`` lies in the trainer's ``log_dir``, and the distances of each
    look are in its logger as ``local/weight_distance/candidate.float64`` and so on.

    Args:
        candidate: makes the rewritten module from a deep copy of the LightningModule.
        budget, updates, fold, seed: as in ``driftlab.watching``.
    """

    def __init__(
        self,
        candidate: Rewrite,
        *,
        budget: float = 0.05,
        updates: int = 6,
        fold: Callable | None = None,
        seed: int = 0,
    ):
        self._candidate = candidate
        self._options = {"budget": budget, "updates": updates, "fold": fold, "seed": seed}
        self._watch: watch.Watch | None = None

    @property
    def looks(self) -> list[watch.Look]:
        return self._watch.looks if self._watch else []

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The worst that was found, the first of its kind; None before the first batch."""
        return self._watch.diagnosis if self._watch else None

    def on_train_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Raises DiagnoseError where the module steps its optimizers itself, or has several."""
        if not pl_module.automatic_optimization or len(trainer.optimizers) != 1:
            raise DiagnoseError(
                "Watch follows one optimizer, which the Trainer steps: in a module that steps its own, or "
                "several, use driftlab.watching"
            )
        optimizer, network = trainer.optimizers[0], _Step(pl_module)
        self._watch = watch.Watch(network, self._rewritten, optimizer, _its_own, **self._options)

    def on_train_batch_start(self, trainer, pl_module, batch: Any, batch_idx: int) -> None:
        self._watch.model.batch_idx = batch_idx
        if self._watch.step({"batch": batch}):
            self._log(trainer)

    def on_train_end(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        if self._watch.end():
            self._log(trainer)
        if self.diagnosis and trainer.is_global_zero:
            folder = Path(trainer.log_dir or trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                self.diagnosis.to_html(folder / "report.html")
            except ModuleNotFoundError as error:  # a training is not lost for want of a page
                rank_zero_warn(f"no report.html: {error}")

    def _rewritten(self, network: _Step) -> _Step:
        network.module = self._candidate(network.module)
        return network

    def _log(self, trainer: lightning.Trainer) -> None:
        last = next(iter(reversed(self.looks[-1].diagnosis.curves)), {})
        shown = {f"local/{name}": value for name, value in last.items() if name.startswith(SHOWN)}
        for logger in trainer.loggers:
            logger.log_metrics(shown, step=trainer.global_step)


class _Step(nn.Module):
    """A LightningModule as a network: from a batch to the loss of its own ``training_step``."""

    def __init__(self, module: lightning.LightningModule):
        super().__init__()
        self.module, self.batch_idx = module, 0

    def forward(self, batch: Any) -> Tensor:
        with warnings.catch_warnings():  # what a copy logs has nowhere to go
            warnings.filterwarnings("ignore", ".*self.log.*trainer. reference is not registered")
            found = self.module.training_step(batch, self.batch_idx)
        return found["loss"] if isinstance(found, dict) else found


def _its_own(loss: Tensor, targets: None) -> Tensor:
    return loss


class AsNetwork(NamedTuple):
    """A LightningModule as ``diagnose`` takes a network.

    Attributes:
        candidate: as ``diagnose`` takes one.
        batches: from those of a DataLoader.
        optimizer: of a network; ``scheduler`` of an optimizer that it made.
    """

    reference: nn.Module
    candidate: nn.Module | Rewrite
    batches: Callable[[Iterable[Any]], Iterable[tuple[object, object]]]
    loss: Callable[[Tensor, object], Tensor]
    optimizer: Callable[[nn.Module], Optimizer]
    scheduler: Callable[[Optimizer], Any]


def as_network(module: nn.Module, candidate: nn.Module | Rewrite) -> AsNetwork:
    """With its own ``training_step`` as the loss, and what its ``configure_optimizers`` gives.

    A scheduler that Lightning steps once an epoch stands still here.
    """
    schedulers: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()

    def rewritten(network: _Step) -> _Step:
        network.module = candidate(network.module)
        return network

    def optimizer(network: _Step) -> Optimizer:
        made, scheduler = _configured(network.module)
        schedulers[made] = scheduler
        return made

    other = _Step(candidate) if isinstance(candidate, nn.Module) else rewritten
    batches = partial(map, lambda batch: ({"batch": batch}, None))
    return AsNetwork(_Step(module), other, batches, _its_own, optimizer, schedulers.get)


def _configured(module: lightning.LightningModule) -> tuple[Optimizer, Any]:
    """The one optimizer, and the scheduler that moves with its updates, where there is one.

    Raises:
        DiagnoseError: the module steps its optimizers itself, or has several.
    """
    made = module.configure_optimizers()
    optimizers, schedulers = made, []
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], list):
        optimizers, schedulers = made
    (first,) = optimizers if isinstance(optimizers, list | tuple) and len(optimizers) == 1 else (optimizers,)
    if isinstance(first, dict):
        schedulers = [first["lr_scheduler"]] if "lr_scheduler" in first else []
        first = first["optimizer"]
    if not module.automatic_optimization or not isinstance(first, Optimizer) or len(schedulers) > 1:
        raise DiagnoseError(
            "diagnose follows the one optimizer of a LightningModule: of one that steps its own, or several, "
            "give loss and optimizer, and (inputs, targets) as batches"
        )
    moves = [s for s in schedulers if isinstance(s, dict) and s.get("interval") == "step"]
    return first, moves[0]["scheduler"] if moves else None
