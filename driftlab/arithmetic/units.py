"""One unit in the last place: the smallest move that a tensor can make."""

from __future__ import annotations

import torch
from torch import Tensor


def by_one_unit(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each entry's next number of its own dtype, up or down by chance."""
    up = torch.rand(tensor.shape, generator=generator).to(tensor.device) < 0.5
    infinite = torch.full_like(tensor, torch.inf)
    return torch.nextafter(tensor, torch.where(up, infinite, -infinite))


def unless_zero(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """The same, but for zeros: a mask's, a padding row's."""
    return torch.where(tensor == 0, tensor, by_one_unit(tensor, generator))
