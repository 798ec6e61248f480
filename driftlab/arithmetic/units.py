"""One unit in the last place: the smallest move that a tensor can make."""

from __future__ import annotations

import torch
from torch import Tensor


def by_one_unit(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Each entry's next number of its own dtype, up or down by chance."""
    up = torch.rand(tensor.shape, generator=generator).to(tensor.device) < 0.5
    infinite = torch.full_like(tensor, torch.inf)
    return torch.nextafter(tensor, torch.where(up, infinite, -infinite))


def unless_zero(tensor: Tensor, generator: torch.Generator, computed_in: torch.dtype | None = None) -> Tensor:
    """The same, but for zeros: a mask's, a padding row's.

    Args:
        computed_in: a dtype of fewer bits that the entries are cast to before anything is computed with them:
            what they are cast to moves by one unit. A move by one unit of their own would be gone.
    """
    if computed_in is None or torch.finfo(computed_in).eps <= torch.finfo(tensor.dtype).eps:
        return torch.where(tensor == 0, tensor, by_one_unit(tensor, generator))
    cast = tensor.to(computed_in)
    return torch.where(cast == 0, tensor, by_one_unit(cast, generator).to(tensor.dtype))
