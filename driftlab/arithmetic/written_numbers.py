"""Numbers that stand in code, such as an epsilon or a mean: as written, and as float32 stores them."""

from __future__ import annotations

import struct
from functools import lru_cache

import torch
from torch import Tensor

# Of a number that people write: 1e-6, 1.702, 0.0447. Of so many digits one float32 in 10,000 has as few.
DIGITS = 4
# Of a tensor that people write down, such as the mean of each channel, at most.
MANY = 64


def in_float32(number: object) -> object:
    """As float32 stores it; but not one that would be gone in 0 or 1, which nobody writes down."""
    if not isinstance(number, float) or (stored := _stored(number)) is None:
        return number
    return number if stored in (0.0, 1.0, -1.0) else stored


def as_written(number: object) -> object:
    """The decimal that float32 made this of, where it is one of few digits.

    Operations that torch makes of others, as ``rms_norm``, round their epsilon to float32 first: to the exact
    arithmetic they would be another function than the same written out, by up to 6e-8 of the epsilon.
    """
    return _decimal(number) if type(number) is float else number


def table_as_written(tensor: Tensor) -> Tensor:
    """In float64: the decimals that a small tensor of float32 was made of, where each of its numbers is one.

    A mean of 0.485 that stands in a tensor is another than the same beside one, by up to 3e-8 of it; with 0.5
    taken off, by 1e-6 of what is left.
    """
    if tensor.dtype is torch.float32 and 0 < tensor.numel() <= MANY and tensor.layout is torch.strided:
        numbers = tensor.detach().flatten().tolist()
        written = [float(f"{number:.{DIGITS}g}") for number in numbers]
        if all(_stored(one) == number for one, number in zip(written, numbers, strict=True)):
            return torch.tensor(written, dtype=torch.float64, device=tensor.device).reshape(tensor.shape)
    return tensor.to(torch.float64)


@lru_cache(maxsize=1024)
def _decimal(number: float) -> float:
    written = float(f"{number:.{DIGITS}g}")
    rounded = _stored(number) == number != written
    return written if rounded and _stored(written) == number else number


def _stored(number: float) -> float | None:
    """None of one beyond float32's largest."""
    try:
        return struct.unpack("f", struct.pack("f", number))[0]
    except OverflowError:
        return None
