"""In which arithmetic a network computes: float32, float64, TF32 where the device has it, else emulated."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from driftlab.process import settled

TF32, EMULATED = "TF32", "TF32 (emulated)"
DTYPES = {"float32": torch.float32, "float64": torch.float64, TF32: torch.float32, EMULATED: torch.float32}
# Of a significand of 24 bits TF32 keeps 11: the last 13 are rounded away.
DROPPED = 13


def has_tf32(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def arithmetics(device: torch.device) -> tuple[str, str, str]:
    return "float32", "float64", TF32 if has_tf32(device) else EMULATED


def in_arithmetic(network: nn.Module, name: str) -> nn.Module:
    """A copy that computes in the arithmetic, inside ``computing(name)``."""
    twin = copy.deepcopy(network).to(DTYPES[name])
    if name == EMULATED:
        for part in twin.modules():
            if isinstance(part, nn.Conv2d | nn.Linear):
                part.weight.data = rounded_to_tf32(part.weight.data)
                part.register_forward_pre_hook(lambda _, inputs: (rounded_to_tf32(inputs[0]),))
    return twin


def rounded_to_tf32(x: Tensor) -> Tensor:
    """Finite float32 values, each to the nearest with 11 significant bits, ties to even.

    The operands of a product in TF32; their products are exact in float32, which they are summed in.
    """
    bits = x.contiguous().view(torch.int32)
    half, even = (1 << (DROPPED - 1)) - 1, (bits >> DROPPED) & 1
    return ((bits + half + even) & ~((1 << DROPPED) - 1)).view(torch.float32)


@contextmanager
def computing(name: str) -> Iterator[None]:
    """Without gradients, TF32 on in convolutions and matrix products if it is asked for, else off."""
    with settled(tf32=name == TF32), torch.no_grad():
        yield
