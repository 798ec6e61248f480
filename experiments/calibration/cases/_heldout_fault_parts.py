"""Small parts that the held-out faults are made of."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from experiments.calibration.tasks import Task

UNSEEN = ("weight gradient", "update")


def sgd(params, lr: float = 0.1, momentum: float = 0.9, **settings: object) -> torch.optim.Optimizer:
    """The optimizer that a task is trained with unless a case names another."""
    return torch.optim.SGD(params, lr=lr, momentum=momentum, **settings)


def recast(model: nn.Module, name: str, kind: type[nn.Module], **attributes: object) -> nn.Module:
    """``model`` whose submodule ``name`` runs the forward of ``kind``, with further plain attributes."""
    module = model.get_submodule(name)
    module.__class__ = kind
    for key, value in attributes.items():
        setattr(module, key, value)
    return model


def everywhere(task: Task) -> tuple[str, ...]:
    """Every module of a task: where the whole optimizer is another, each of them is a right place."""
    return tuple(name for name, _ in task.network().named_modules())


class Backward(torch.autograd.Function):
    """The identity, whose gradient ``change`` alters."""

    @staticmethod
    def forward(ctx, x: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.change = change
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g: Tensor):
        return ctx.change(g), None


def low(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``x`` through another dtype and back."""
    return x.to(dtype).to(x.dtype)


def low_if_single(x: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``low`` for float32; float64 passes untouched."""
    return low(x, dtype) if x.dtype == torch.float32 else x


def shuffled(size: int, seed: int) -> Tensor:
    """A fixed permutation."""
    return torch.randperm(size, generator=torch.Generator().manual_seed(seed))


def chosen(module: nn.Module, order: Tensor) -> nn.Module:
    """``module`` (in place) whose outputs, or channels of a norm, come in another order."""
    with torch.no_grad():
        for tensor in [*module.parameters(), *module.buffers()]:
            if tensor.dim():
                tensor.copy_(tensor[order].clone())
    return module


def linear_of(weight: Tensor, bias: Tensor | None = None) -> nn.Linear:
    """A linear layer of copies."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias is not None)
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    return layer
