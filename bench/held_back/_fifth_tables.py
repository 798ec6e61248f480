"""What the ports of tables, graphs and agents share."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from bench.case import Names, case
from bench.held_back._fourth_ports import leaf
from bench.tasks import Task

SAME = ("round_off", "bit_identical")


def right(task: Task, make: Callable, name: str, kind: str, **options: object) -> None:
    """Register ``make(model)`` as a pair that is right."""
    rewrite = partial(make)
    rewrite.__name__, rewrite.__module__ = name, make.__module__
    case(SAME, kind, task, **options)(rewrite)


def fault(
    task: Task, make: Callable, name: str, kind: str, module: Names, passes: Names = (), **options: object
) -> None:
    """Register ``make(model, name)`` as a bug at ``module``."""
    rewrite = partial(make, fault=name)
    rewrite.__name__, rewrite.__module__ = name, make.__module__
    case("bug", kind, task, module=module, passes=passes, **options)(rewrite)


def named(outputs: object, *names: str) -> list[Tensor]:
    """The outputs of these names, whether they are keys or attributes."""
    return [outputs[name] if isinstance(outputs, dict) else getattr(outputs, name) for name in names]


def turned(layer: nn.Linear) -> nn.Parameter:
    """The weight of a linear layer, inputs first."""
    return leaf(layer.weight.T.contiguous())


def joined(values: Iterable[Tensor], axis: int = 0) -> nn.Parameter:
    """Tensors one after the other in one weight."""
    return leaf(torch.cat(list(values), axis))


def layer_norm(x: Tensor, scale: Tensor, shift: Tensor, eps: float = 1e-5) -> Tensor:
    """A layer norm of the last axis, by two passes."""
    y = x - x.mean(-1, keepdim=True)
    return y * (y.square().mean(-1, keepdim=True) + eps).rsqrt() * scale + shift
