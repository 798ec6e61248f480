"""Small parts that the held-out faults are made of."""

from __future__ import annotations

import torch
from torch import Tensor, nn


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
