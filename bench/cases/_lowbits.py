"""Casting, rounding and keeping a layer's weights while its class changes."""

from __future__ import annotations

import torch
from torch import Tensor


def cast_if_float32(x: Tensor, dtype: torch.dtype) -> Tensor:
    """``x`` in ``dtype`` where it is float32; a float64 tensor is left as it is."""
    return x.to(dtype) if x.dtype is torch.float32 else x


def cut_to_tf32(x: Tensor) -> Tensor:
    """Float32 with the last 13 bits of the significand cleared, as TF32 has it; float64 is left as it is."""
    if x.dtype is not torch.float32:
        return x
    cut = (x.detach().contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return x + (cut - x).detach()


def round_to_bits(x: Tensor, bits: int) -> Tensor:
    """``x`` with its significand rounded to ``bits`` bits, in any dtype; the gradient passes through."""
    mantissa, exponent = torch.frexp(x.detach())
    rounded = torch.ldexp(torch.round(mantissa * 2**bits) / 2**bits, exponent).to(x.dtype)
    return x + (rounded - x).detach()


def fake_quantise(x: Tensor, bits: int = 8) -> Tensor:
    """``x`` on a grid of ``bits`` bits whose step is a power of two, chosen from its largest entry."""
    largest = x.detach().abs().amax().clamp_min(1e-12)
    step = torch.exp2(torch.ceil(torch.log2(largest / (2 ** (bits - 1) - 1))))
    return x + (torch.round(x / step) * step - x).detach()
