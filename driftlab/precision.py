"""The precision in which a network runs, in torch's and Lightning's own terms.

``-true`` holds weights, buffers and batches in 16 bits. ``-mixed`` holds them in float32 and runs forward
passes and losses under ``torch.autocast``, which casts for each operation by torch's own lists.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import nn

from driftlab.refusing import shown
from driftlab.rounding import HALFWAY_BITS, NARROWER
from driftlab.words import DiagnoseError


@dataclass(frozen=True)
class Precision:
    """What a network is held and computed in.

    Attributes:
        name: as users write it, ``bf16-mixed``.
        dtype: of weights, buffers and batches.
        autocast: the dtype that forward passes are cast to on their way; None without autocast.
        narrower: as many times the reference's error is an error of fewer bits.
    """

    name: str
    dtype: torch.dtype
    autocast: torch.dtype | None = None
    narrower: float = HALFWAY_BITS

    @property
    def computes_in(self) -> torch.dtype:
        """The dtype with the fewest bits that results are rounded to."""
        return self.autocast or self.dtype

    @property
    def bits(self) -> int:
        """Of its significand, the leading one included: 24 in float32, 11 in float16, 8 in bfloat16."""
        return 1 - round(math.log2(torch.finfo(self.computes_in).eps))

    @property
    def in_16_bits(self) -> bool:
        return self.computes_in in (torch.bfloat16, torch.float16)

    @property
    def unit_round_off(self) -> float:
        return 2.0**-self.bits

    def forward(self, module: nn.Module) -> AbstractContextManager[object]:
        """Inside, forward passes and losses of ``module`` run; backward passes belong outside."""
        if self.autocast is None:
            return nullcontext()
        return torch.autocast(_device(module), self.autocast)

    def scaler(self, module: nn.Module) -> torch.amp.GradScaler | None:
        """Of the loss, as torch and Lightning begin it; without, gradients of float16 underflow."""
        return torch.amp.GradScaler(_device(module)) if self.autocast is torch.float16 else None


def _device(module: nn.Module) -> str:
    return next((p.device.type for p in module.parameters()), "cpu")


FLOAT32 = Precision("float32", torch.float32)
FLOAT64 = Precision("float64", torch.float64)
PRECISIONS = {
    p.name: p
    for p in (
        FLOAT64,
        FLOAT32,
        Precision("bf16-mixed", torch.float32, torch.bfloat16, NARROWER),
        Precision("16-mixed", torch.float32, torch.float16, NARROWER),
        Precision("bf16-true", torch.bfloat16, narrower=NARROWER),
        Precision("16-true", torch.float16, narrower=NARROWER),
    )
}


# What networks are trained in, float32 and float64 always among them: nobody trains weights of float16.
TRAINED_IN = tuple(name for name in PRECISIONS if name != "16-true")


def trained_in(name: object, handed_over: torch.dtype) -> Precision:
    """The one of this name in which a network is trained; where it is None as ``precision_of`` has it.

    Raises:
        DiagnoseError: there is none of this name, or no network is trained in it.
    """
    if name is None and handed_over is torch.float16:
        raise DiagnoseError(
            "the reference is in float16, in which no network trains: hand it over in float32 with "
            'precision="16-mixed", or ask assert_equivalent'
        )
    return precision_of(name, handed_over, TRAINED_IN)


def precision_of(
    name: object, handed_over: torch.dtype, among: Iterable[str] = tuple(PRECISIONS)
) -> Precision:
    """The one of this name ``among`` some; where it is None that of a network as it was handed over.

    A network in float64 is judged in float32 too, which its own float64 is held against.

    Raises:
        DiagnoseError: there is none of this name.
    """
    known = [p for p in among if p != "float64"]
    if name is None:
        own = (p for p in map(PRECISIONS.__getitem__, known) if p.autocast is None and p.dtype is handed_over)
        return next(own, FLOAT32)
    if not isinstance(name, str) or name not in known:
        raise DiagnoseError(f"precision is {shown(name)}: give one of {', '.join(known)}, or None")
    return PRECISIONS[name]
