"""Small helpers for the ports: leaves made of a reference's tensors, and both forms of a port as cases."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from bench.case import case
from bench.surgery import recast
from bench.tasks import Task

BACK = ("input gradient", "weight gradient")


def leaf(tensor: Tensor) -> nn.Parameter:
    """A trained copy."""
    return nn.Parameter(tensor.detach().clone().contiguous())


def pile(tensors: Iterable[Tensor]) -> nn.Parameter:
    """Equal shapes stacked in one trained tensor."""
    return leaf(torch.stack([t.detach() for t in tensors]))


def joined(tensors: Iterable[Tensor]) -> nn.Parameter:
    """Concatenated along the first axis in one trained tensor."""
    return leaf(torch.cat([t.detach() for t in tensors]))


def later(t: int, device: torch.device) -> Tensor:
    """[T, T], true where the key comes after the query."""
    return torch.ones(t, t, dtype=torch.bool, device=device).triu(1)


# Where the reference itself diverges at the default learning rate: in 24 steps its loss goes from 1.4 to 28,
# and from 3.9 to 2e8.
FALLS_OVER = ("first_lora", "second_flow")


def same(on: Task) -> tuple[str, ...]:
    """The verdicts that are right of a right pair."""
    return ("round_off", "bit_identical", *(["unstable"] if on.name in FALLS_OVER else []))


def both(on: Task, make: Callable, right: str, wrong: str, module: str | tuple, **truth: object) -> None:
    """Register ``make(model, wrong)`` twice, without its fault and with it, under these names.

    A class with ``wrong`` of its own is taken on by the reference's module of the first name in ``module``.
    """
    at = module if isinstance(module, str) else module[0]
    for fault, name in enumerate((right, wrong)):

        def rewrite(model: nn.Module, wrong: bool = bool(fault)) -> nn.Module:
            return recast(model, at, make, wrong=wrong) if hasattr(make, "wrong") else make(model, wrong)

        rewrite.__name__, rewrite.__module__ = name, make.__module__
        kind = name.replace("_", " ")
        labels = "bug" if fault else same(on)
        case(labels, kind, on, **(truth | {"module": module} if fault else {}))(rewrite)
