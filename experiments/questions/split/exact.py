"""The exact result of a convolution, forward and backward, to measure the distance from."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from experiments.questions.split.case import Operands
from experiments.questions.split.passes import PASSES, terms


def exact(operands: Operands) -> dict[str, list[Tensor]]:
    """Every pass as tensors in float64 whose sum, not rounded, is exact; the largest first.

    Weights, inputs and output gradients are cut into slices of so few bits that a pass of any two slices
    is exact in float64, whatever the order of its sums (Ozaki, Ogita, Oishi, Rump, "Error-free
    transformations of matrix multiplication", Numer. Algorithms 59, 2012).
    """
    wide = operands.to(torch.float64)
    longest = max(int(t.max()) for t in terms(wide).values())
    bits = (53 - math.ceil(math.log2(longest))) // 2
    weights, inputs, gradients = (_slices(t, bits) for t in (wide.weight, wide.inputs, wide.gradient))
    w, x, g = weights[:1], inputs[:1], gradients[:1]  # what a pass does not depend on
    products = ((weights, inputs, g), (w, inputs, gradients), (weights, x, gradients))
    return {pass_: _pieces(pass_, slices) for pass_, slices in zip(PASSES, products, strict=True)}


def _pieces(pass_: str, slices: tuple[list[Tensor], ...]) -> list[Tensor]:
    """The pass on each combination of slices, those of the leading ones first."""
    numbered = [list(enumerate(part)) for part in slices]
    combinations = sorted(product(*numbered), key=lambda three: sum(number for number, _ in three))
    return [_ALONE[pass_](*(t for _, t in three)) for three in combinations]


# Of weights, inputs and output gradients; each pass without the other two, which would only take time.
_ALONE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "forward": lambda w, x, g: F.conv2d(x, w),
    "weight gradient": lambda w, x, g: conv2d_weight(x, w.shape, g),
    "input gradient": lambda w, x, g: conv2d_input(x.shape, w, g),
}


def _slices(tensor: Tensor, bits: int) -> list[Tensor]:
    """Multiples of a power of two, below 2^(bits - 1) of it each, which add up to the tensor exactly."""
    found, rest = [], tensor
    while not found or bool(rest.any()):
        top = float(rest.abs().max())
        grid = 2.0 ** (math.floor(math.log2(top)) + 2 - bits) if top else 1.0
        found.append(torch.round(rest / grid) * grid)
        rest = rest - found[-1]
    return found


def distance(values: Tensor, pieces: Sequence[Tensor]) -> Tensor:
    """|values - exact| in float64; near numbers subtract without rounding, and the pieces begin near."""
    left = values.double().cpu()
    for piece in pieces:
        left = left - piece
    return left.abs()
