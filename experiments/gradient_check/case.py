"""What a gradient check is made of (module, inputs, a loss of the outputs), and the case of the thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from suite.command.errors import ConfigurationError, one_line
from suite.running.arguments import check_arguments
from suite.running.importing import imported


class Case(NamedTuple):
    """In float32 on the CPU; ``loss`` takes the outputs and gives a number."""

    module: nn.Module
    inputs: Tensor
    loss: Callable[[Tensor], Tensor]


class Halved(nn.Module):
    """(x + 1) / 2, the model of the thread: no parameters."""

    def forward(self, x: Tensor) -> Tensor:
        return (x + 1) / 2


class Against(nn.Module):
    """A loss against fixed targets: what ``functional(outputs, targets)`` gives."""

    def __init__(self, criterion: nn.Module, targets: Tensor):
        super().__init__()
        self.criterion = criterion
        self.register_buffer("targets", targets)

    def forward(self, outputs: Tensor) -> Tensor:
        return self.criterion(outputs, self.targets)


def halved(rows: int = 140, columns: int = 120, reduction: str = "sum") -> Case:
    """The thread's: standard normal inputs and targets [rows, columns], summed squares."""
    inputs = torch.randn(rows, columns)
    loss = Against(nn.MSELoss(reduction=reduction), torch.randn(rows, columns))
    return Case(Halved(), inputs, loss)


def build_case(settings: DictConfig, seed: int) -> Case:
    """The case that ``case.target`` names, drawn from the seed. Raises ConfigurationError."""
    target = settings.case.target
    function = imported("case.target", target)
    check_arguments("case.options", function, OmegaConf.to_container(settings.case).get("options") or {})
    torch.manual_seed(seed)
    try:
        case = Case(*function(**(settings.case.options or {})))
    except Exception as error:
        raise ConfigurationError(
            f"case.target={target} failed ({one_line(error)}): it takes case.options and returns a module, "
            "a floating tensor and a loss of the outputs"
        ) from None
    if not isinstance(case.inputs, Tensor) or not case.inputs.is_floating_point() or not case.inputs.numel():
        raise ConfigurationError(f"case.target={target}: its inputs must be one floating tensor, not empty")
    if not isinstance(case.module, nn.Module):
        raise ConfigurationError(f"case.target={target}: its module must be a torch.nn.Module")
    return case._replace(inputs=case.inputs.detach().float().contiguous())
