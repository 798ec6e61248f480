"""Optimizers as the cases need them: the usual ones, some parameters apart, and rules written out."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from bench.tasks import Task

UNSEEN = ("weight gradient", "update")  # where a weight that does not learn may be seen first


class UsualSGD(torch.optim.SGD):
    """With the settings that a task is trained with unless a case names others."""

    def __init__(self, params, lr: float = 0.1, momentum: float = 0.9, **settings: object):
        super().__init__(params, lr=lr, momentum=momentum, **settings)

    def all_params(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]


class ByHand(Optimizer):
    """Calls ``rule(p, gradient, state, settings)`` for each weight that has a gradient."""

    def __init__(self, params, **settings: object):
        super().__init__(params, settings)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.rule(p, p.grad, self.state[p], group)


def sgd(lr: float = 0.1, momentum: float = 0.9, **settings: object) -> Callable:
    """A maker of SGD."""
    return partial(torch.optim.SGD, lr=lr, momentum=momentum, **settings)


def adam(lr: float) -> Callable:
    """A maker of Adam."""
    return partial(torch.optim.Adam, lr=lr)


def of(make: Callable[..., Optimizer], **settings: object) -> Callable[[nn.Module], Optimizer]:
    """A candidate's optimizer: ``make`` of all its parameters."""
    return lambda model: make(model.parameters(), **settings)


def apart(part: str, make: Callable[..., Optimizer] = sgd(), **settings: object) -> Callable:  # noqa: B008
    """A candidate's optimizer whose parameters with ``part`` in their names are a second group."""

    def build(model: nn.Module) -> Optimizer:
        groups: dict[bool, list] = {False: [], True: []}
        for name, parameter in model.named_parameters():
            groups[part in name].append(parameter)
        return make([{"params": groups[False]}, {"params": groups[True], **settings}])

    return build


def everywhere(task: Task) -> tuple[str, ...]:
    """Every module of a task: where the whole optimizer is another, each of them is a right place."""
    return tuple(name for name, _ in task.network().named_modules())
