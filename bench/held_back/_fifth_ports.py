"""What the ports of the sequence networks are made of."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import Names, case
from bench.held_back._fourth_ports import leaf
from bench.tasks import Task

SAME = ("round_off", "bit_identical")


def pairs(label: Names, task: Task, make: Callable, options: dict | None = None, **told: str | tuple) -> None:
    """Register ``make(model, name)`` for each name: its kind, the right place and passes where there are any.

    Args:
        options: more keywords for ``case``.
    """
    for name, (kind, *right) in ((name, (x,) if isinstance(x, str) else x) for name, x in told.items()):
        rewrite = partial(make, fault=name)
        rewrite.__name__, rewrite.__module__ = name, make.__module__
        truth = dict(zip(("module", "passes"), right, strict=False))
        case(label, kind, task, **truth, **(options or {}))(rewrite)


def flattened(module: nn.Module) -> nn.ParameterDict:
    """The module's parameters with underscores in their names."""
    return nn.ParameterDict({name.replace(".", "_"): leaf(p) for name, p in module.named_parameters()})


def centred(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    """A layer norm of the last axis."""
    x = x - x.mean(-1, keepdim=True)
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias


def scaled(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """An RMS norm of the last axis."""
    return weight * x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()


def shares(scores: Tensor) -> Tensor:
    """A softmax of the last axis."""
    raised = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    return raised / raised.sum(-1, keepdim=True)


def gently(parameters) -> torch.optim.Optimizer:
    """Momentum with small steps."""
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def next_token(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def tokens(count: int, length: int, vocabulary: int):
    """What draws a batch of tokens, the targets one step on."""

    def batch() -> tuple[Tensor, Tensor]:
        drawn = torch.randint(vocabulary, (count, length + 1))
        return drawn[:, :-1], drawn[:, 1:]

    return batch
