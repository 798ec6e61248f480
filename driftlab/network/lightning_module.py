"""A LightningModule as a network, whose forward pass is its ``training_step``. Imports no Lightning."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
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
    """A LightningModule as a network: from a batch to the loss of its own ``training_step``.

    ``training_step`` finds ``global_step``, ``current_epoch`` and ``trainer`` as in its own training.

    Args:
        gathers: how many training calls an update gathers.
        live: the Trainer of a training that goes on; a copy of its module has lost it.

    Attributes:
        begins: the updates that were made before the first call.
    """

    def __init__(self, module: Any, gathers: int = 1, live: Any = None):
        super().__init__()
        self.module, self.batch_idx = module, 0
        self.begins, self._gathers, self._live = 0, gathers, _Shared(live)
        self._calls = [0]  # in a list: it is no count of the module's own, see ``Counters``

    def forward(self, batch: Any) -> Tensor:
        with warnings.catch_warnings(), self.in_a_training():
            # what a copy logs has nowhere to go
            warnings.filterwarnings("ignore", ".*self.log.*trainer. reference is not registered")
            found = theirs(self.module.training_step, batch, self.batch_idx)
        self._calls[0] += self.training
        return found["loss"] if isinstance(found, dict) else found

    def in_a_training(self) -> AbstractContextManager[None]:
        """Inside, the module is in the training that it is a step of."""
        # in eval mode that of the last training call
        made = max(0, self._calls[0] - (not self.training)) // self._gathers
        return _in_a_training(self.module, self.begins + made, self._live.trainer)


class _Shared:
    """Holds a Trainer, which no copy of a network takes along a copy of."""

    def __init__(self, trainer: Any):
        self.trainer = trainer

    def __deepcopy__(self, memo: dict) -> _Shared:
        return self


@contextmanager
def _in_a_training(module: nn.Module, step: int, trainer: Any) -> Iterator[None]:
    """Inside, the module's properties are those of a training that has made ``step`` updates.

    Properties belong to a class, so each LightningModule has another one for as long.
    """
    own = [m for m in module.modules() if is_lightning(m)]
    classes = [type(m) for m in own]
    try:
        for part in own:
            part.__dict__[_AT] = _At(step, trainer)
            part.__class__ = _in_training(type(part))
        yield
    finally:
        for part, was in zip(own, classes, strict=True):
            part.__class__ = was
            part.__dict__.pop(_AT, None)


_AT = "_driftlab_at"


class _At(NamedTuple):
    step: int
    trainer: Any


@cache
def _in_training(kind: type) -> type:
    def trainer(self: Any) -> Any:
        return self.__dict__[_AT].trainer or kind.trainer.fget(self)  # type: ignore[attr-defined]

    def epoch(self: Any) -> int:
        live = self.__dict__[_AT].trainer
        return live.current_epoch if live else 0

    properties = {
        "global_step": property(lambda self: self.__dict__[_AT].step),
        "current_epoch": property(epoch),
        "trainer": property(trainer, kind.trainer.fset),  # type: ignore[attr-defined]
    }
    return type(kind.__name__, (kind,), properties)


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


def as_network(module: nn.Module, candidate: nn.Module | Rewrite, gathers: int = 1) -> AsNetwork:
    """With its own ``training_step`` as the loss, and what its ``configure_optimizers`` gives.

    ``global_step`` counts updates of ``gathers`` batches; ``current_epoch`` is 0.

    A scheduler that Lightning steps once an epoch stands still here.
    """
    schedulers: WeakKeyDictionary[Optimizer, Any] = WeakKeyDictionary()

    def rewritten(network: Step) -> Step:
        network.module = theirs(candidate, network.module)
        return network

    def optimizer(network: Step) -> Optimizer:
        made, schedulers[made] = configured(network)
        return made

    other = Step(candidate, gathers) if isinstance(candidate, nn.Module) else rewritten
    batches = partial(map, lambda batch: ({"batch": batch}, None))
    return AsNetwork(Step(module, gathers), other, batches, its_own, optimizer, schedulers.get)


def configured(network: Step) -> tuple[Optimizer, Any]:
    """What its ``configure_optimizers`` makes: one optimizer, and the scheduler that moves with its updates.

    Raises:
        DiagnoseError: the module steps its optimizers itself, or has several.
    """
    module = network.module
    with network.in_a_training():
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
