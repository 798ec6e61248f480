"""A LightningModule as a network, whose forward pass is its ``training_step``. Imports no Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.blame import theirs
from driftlab.network.pair import Rewrite
from driftlab.words import DiagnoseError


def is_lightning(module: object) -> bool:
    """Whether it is a LightningModule, of either package, without importing one."""
    packages = ("lightning", "pytorch_lightning")
    return any(
        c.__name__ == "LightningModule" and c.__module__.partition(".")[0] in packages
        for c in type(module).__mro__
    )


class Step(nn.Module):
    """A LightningModule as a network: from a batch to the loss of its own ``training_step``."""

    def __init__(self, module: Any):
        super().__init__()
        self.module, self.batch_idx = module, 0

    def forward(self, batch: Any) -> Tensor:
        with warnings.catch_warnings():  # what a copy logs has nowhere to go
            warnings.filterwarnings("ignore", ".*self.log.*trainer. reference is not registered")
            found = theirs(self.module.training_step, batch, self.batch_idx)
        return found["loss"] if isinstance(found, dict) else found


def its_own(loss: Tensor, targets: None) -> Tensor:
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

    def rewritten(network: Step) -> Step:
        network.module = theirs(candidate, network.module)
        return network

    def optimizer(network: Step) -> Optimizer:
        made, scheduler = _configured(network.module)
        schedulers[made] = scheduler
        return made

    other = Step(candidate) if isinstance(candidate, nn.Module) else rewritten
    batches = partial(map, lambda batch: ({"batch": batch}, None))
    return AsNetwork(Step(module), other, batches, its_own, optimizer, schedulers.get)


def _configured(module: Any) -> tuple[Optimizer, Any]:
    """The one optimizer, and the scheduler that moves with its updates, where there is one.

    Raises:
        DiagnoseError: the module steps its optimizers itself, or has several.
    """
    made = theirs(module.configure_optimizers)
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
