"""Ports that know several faults, of which each case switches one on, and what such ports are made of."""

from collections.abc import Callable, Iterable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import Names, case
from bench.tasks import Task


class Port(nn.Module):
    """A candidate that ``take``s what it needs of the reference, with the fault of that name, if any."""

    def __init__(self, model: nn.Module, fault: str = ""):
        super().__init__()
        self.fault = fault
        self.take(model)


def wrong(task: Task, make: Callable, **faults: tuple[str, Names, Names] | tuple[str, Names]) -> None:
    """Register ``make(model, name)`` for each fault: its kind, the right place, the right passes."""
    for name, (kind, module, *passes) in faults.items():
        rewrite = partial(make, fault=name)
        rewrite.__name__, rewrite.__module__ = name, make.__module__
        case("bug", kind, task, module=module, passes=passes[0] if passes else ())(rewrite)


def parts(outputs: tuple | dict) -> list[Tensor]:
    """The outputs one by one."""
    return [*(outputs.values() if isinstance(outputs, dict) else outputs)]


def leaf(values: Tensor) -> nn.Parameter:
    """A weight of its own with these values."""
    return nn.Parameter(values.detach().clone())


def pile(values: Iterable[Tensor]) -> nn.Parameter:
    """Tensors of one shape stacked in one weight."""
    return leaf(torch.stack(list(values)))


def spatial(x: Tensor, weight: Tensor, bias: Tensor | None = None, stride: int = 1) -> Tensor:
    """A square convolution of [N, H, W, C] by windows; it keeps the size or divides it by the stride."""
    size = weight.shape[-1]
    edge = (size - 1) // 2
    windows = F.pad(x, (0, 0, *[edge] * 4)).unfold(1, size, stride).unfold(2, size, stride)
    y = torch.einsum("nhwcij,ocij->nhwo", windows, weight)
    return y if bias is None else y + bias


class Rows(nn.Module):
    """A batch norm of the last axis, by ``own`` statistics in eval mode too; ``shared`` rows count as one."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.rate, self.eps, self.own, self.shared = norm.momentum, norm.eps, False, 1
        self.scale, self.shift = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("center", norm.running_mean.clone())
        self.register_buffer("spread", norm.running_var.clone())
        self.register_buffer("seen", norm.num_batches_tracked.clone())

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x.flatten(0, -2), 0, correction=0)
        if self.training:
            count = x[..., 0].numel() / self.shared
            with torch.no_grad():
                self.center.lerp_(center, self.rate)
                self.spread.lerp_(spread * count / (count - 1), self.rate)
                self.seen += 1
        elif not self.own:
            spread, center = self.spread, self.center
        return (x - center) * (spread + self.eps).rsqrt() * self.scale + self.shift
