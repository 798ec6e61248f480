"""A network that is given its batch one row at a time: the same function wherever rows do not interact."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RowByRow(nn.Module):
    """[N, ...] -> the outputs of ``module`` on [1, ...], N times over, concatenated along the batch.

    Args:
        module: takes a tensor, gives a tensor; the batch dimension of both is the first.
    """

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module
        self.training = module.training  # of its own: parts of the module may be in another mode

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(row) for row in x.split(1)])

    def fold(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """From its own names to those of ``module``."""
        return {name.removeprefix("module."): tensor for name, tensor in tensors.items()}


def row_by_row(model: nn.Module) -> RowByRow:
    """``model``, applied to one row after the other; all modes are kept."""
    return RowByRow(model)
