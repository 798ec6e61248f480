"""Ports that are registered twice: as they should be, and with their one fault switched on."""

from collections.abc import Callable
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import Names, case
from bench.held_back._first_shared import same
from bench.surgery import recast
from bench.tasks import Task


class Port(nn.Module):
    """A candidate that ``take``s what it needs of the reference; the docstring of each names its fault."""

    def __init__(self, model: nn.Module, fault: bool):
        super().__init__()
        self.fault = fault
        self.take(model)


def pair(
    task: Task,
    make: Callable,
    right: str,
    wrong: str,
    module: Names,
    passes: Names = (),
    at: str | None = None,
    bug: Names = "bug",
) -> None:
    """Register ``make(model, fault)`` without its fault and with it; its docstring names both kinds.

    Args:
        right: name of the case without the fault.
        wrong: name of the case with the fault.
        at: the module that takes ``make`` as its class and keeps its weights, where only that changes.
        bug: the verdicts that are right of the case with the fault.
    """
    make_it = make if at is None else lambda model, fault: recast(model, at, make, fault=fault)
    rewritten, broken = make.__doc__.rstrip(".").split("; the fault: ")
    truth = {"module": module, "passes": passes}
    for labels, name, kind, where in ((same(task), right, rewritten, {}), (bug, wrong, broken, truth)):
        rewrite = partial(make_it, fault=labels is bug)
        rewrite.__name__, rewrite.__module__ = name, make.__module__
        case(labels, kind, task, **where)(rewrite)


def leaf(values: Tensor) -> nn.Parameter:
    """A weight of its own with these values."""
    return nn.Parameter(values.detach().clone())


def classifier(*layers: nn.Module, width: int = 16) -> nn.Sequential:
    """The layers, a mean over the pixels, five classes."""
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def squares(outputs: Tensor | dict, targets: Tensor) -> Tensor:
    """Mean squared error of the only output."""
    (output,) = outputs.values() if isinstance(outputs, dict) else [outputs]
    return F.mse_loss(output, targets.to(output.dtype))
