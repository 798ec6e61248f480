"""What the ports of vision networks are made of."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.held_back._fourth_ports import leaf
from bench.tasks import Task

SAME = ("round_off", "bit_identical")


def right(
    task: Task,
    name: str,
    kind: str,
    make: Callable,
    diverges: bool = False,
    other: str | None = None,
    **options: object,
) -> None:
    """Register ``make(model)``, which is the same function, as a case of that name.

    Args:
        diverges: whether the reference does, trained as ``diagnose`` trains where nothing else is said.
        other: another verdict that is right, as where a kernel of torch's is wrong in the reference.
    """

    def rewrite(model: nn.Module) -> nn.Module:
        return make(model)

    rewrite.__name__, rewrite.__module__ = name, make.__module__
    labels = (*SAME, "unstable") if diverges else SAME
    case((*labels, other) if other else labels, kind, task, **options)(rewrite)


def wrong_under(options: dict, task: Task, make: Callable, **faults: tuple) -> None:
    """Register ``make(model, name)`` for each fault, with these options: its kind, the right place."""
    for name, (kind, module) in faults.items():
        rewrite = partial(make, fault=name)
        rewrite.__name__, rewrite.__module__ = name, make.__module__
        case("bug", kind, task, module=module, **options)(rewrite)


def tapped(x: Tensor, weight: Tensor, stride: int = 1, rate: int = 1) -> Tensor:
    """A square convolution of [N, H, W, C] with [O, C, k, k], one tap after the other."""
    size = weight.shape[-1]
    edge = rate * (size // 2)
    padded = F.pad(x, (0, 0, *[edge] * 4))
    high, wide = (stride * ((length - 1) // stride) + 1 for length in x.shape[1:3])
    total = 0
    for i in range(size):
        rows = padded[:, i * rate : i * rate + high : stride]
        for j in range(size):
            total = total + rows[:, :, j * rate : j * rate + wide : stride] @ weight[:, :, i, j].T
    return total


class Stats(nn.Module):
    """A batch norm of the last axis; ``by_images`` corrects the kept variance by their count."""

    def __init__(self, norm: nn.Module, by_images: bool = False):
        super().__init__()
        self.rate, self.eps, self.by_images = norm.momentum, norm.eps, by_images
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("middle", norm.running_mean.clone())
        self.register_buffer("width", norm.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        middle, width = self.middle, self.width
        if self.training:
            rows = x.flatten(0, -2)
            middle = rows.mean(0)
            width = (rows - middle).square().mean(0)
            count = len(x) if self.by_images else len(rows)
            with torch.no_grad():
                self.middle.mul_(1 - self.rate).add_(self.rate * middle)
                self.width.mul_(1 - self.rate).add_(self.rate * count / (count - 1) * width)
        scale = self.gain / (width + self.eps).sqrt()
        return x * scale + (self.offset - middle * scale)


def picked(norm: nn.BatchNorm2d, index: Tensor | list[int]) -> nn.BatchNorm2d:
    """A batch norm of the channels of that index, in that order."""
    index = torch.as_tensor(index)
    new = nn.BatchNorm2d(len(index), norm.eps, norm.momentum).to(norm.weight)
    state = {key: value[index] if value.ndim else value for key, value in norm.state_dict().items()}
    new.load_state_dict(state)
    return new


def filled(module: nn.Module, weight: Tensor, bias: Tensor | None = None) -> nn.Module:
    """The module with these values as its weights."""
    module = module.to(weight)
    with torch.no_grad():
        module.weight.copy_(weight)
        if bias is not None:
            module.bias.copy_(bias)
    return module


class Heavy(torch.optim.Optimizer):
    """Momentum whose velocity has the learning rate inside."""

    def __init__(self, params, lr: float = 0.1, momentum: float = 0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    speed = state.setdefault("speed", torch.zeros_like(p))
                    speed.mul_(group["momentum"]).sub_(p.grad, alpha=group["lr"])
                    p.add_(speed)
