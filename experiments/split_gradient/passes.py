"""The three passes of a convolution in parts, their exact result, and what rounding may do to them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input, conv2d_weight

from experiments.split_gradient.case import Case, Operands

PASSES = ("forward", "weight gradient", "input gradient")
Passes = dict[str, Tensor]
# Where a dtype of 16 bits is summed up: cuDNN, oneDNN and the tensor cores hold such sums in float32.
_SUMMED_IN = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def passes(operands: Operands, sizes: Sequence[int]) -> Passes:
    """Forward and backward in the thread's own words: a convolution for each part, and ``cat``.

    Args:
        sizes: the output channels of each part; one part is the convolution as it was.

    Returns:
        pass -> tensor; the weight gradients of the parts concatenated, [out, in, k, k].
    """
    weights = [w.clone().requires_grad_() for w in operands.weight.split(list(sizes))]
    inputs = operands.inputs.detach().clone().requires_grad_()
    outputs = torch.cat([F.conv2d(inputs, w) for w in weights], dim=1)
    # the same as outputs.backward(gradient), to the bit, which would import sympy: a second and more
    (outputs * operands.gradient).sum().backward()
    found = (outputs.detach(), torch.cat([w.grad for w in weights]), inputs.grad)
    return dict(zip(PASSES, found, strict=True))


def whole(operands: Operands) -> Passes:
    """The convolution as it was."""
    return passes(operands, [len(operands.weight)])


def magnitudes(operands: Operands) -> Passes:
    """|W| * |x| of every element of every pass, in float64."""
    return whole(operands.to(torch.float64).map(torch.abs))


def terms(operands: Operands) -> Passes:
    """K, the products that every element of every pass is the sum of, in float64."""
    return whole(operands.to(torch.float64).map(torch.ones_like))


def unit_round_off(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def ulp(values: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance to the next number of ``dtype`` above each magnitude, in float64."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(values.double().abs().clamp(min=info.tiny)).exponent - 1
    return torch.ldexp(torch.full_like(exponent, info.eps, dtype=torch.float64), exponent)


def bound(case: Case, pass_: str, magnitude: Tensor, count: Tensor, dtype: torch.dtype) -> Tensor:
    """How far two ways to compute a pass may be apart by rounding alone, a priori.

    float32 and float64: 2 gamma_K (|W| * |x|) for sums of K products in any order (Higham, "Accuracy and
    Stability of Numerical Algorithms", 2nd ed., section 3.1). 16 bits: gamma_K does not exist where K u >= 1
    (bfloat16: K >= 256), but the sums are held in float32, and what is rounded to 16 bits is their result
    and, where a kernel stores them, the sums of single kernel positions (input gradient) and samples
    (weight gradient); in the split at most one more for each part, as these are added. With r such
    roundings in a row gamma_K(float32) + gamma_r(16 bits) bounds the error (Blanchard et al., SIAM J. Sci.
    Comput. 42, 2020).

    Args:
        magnitude, count: |W| * |x| and K of each element, in float64.
    """
    if dtype not in _SUMMED_IN:
        return _times(2 * _gamma(count, unit_round_off(dtype)), magnitude)
    stored = {"forward": 1, "weight gradient": case.batch, "input gradient": case.kernel_size**2}[pass_]
    added = len(case.split) if pass_ == "input gradient" else 0
    summed = _gamma(count, unit_round_off(_SUMMED_IN[dtype]))
    sides = [(1 + summed) * (1 + _gamma(r, unit_round_off(dtype))) - 1 for r in (stored, stored + added)]
    return _times(sum(sides), magnitude)


def _gamma(count: Tensor | int, u: float) -> Tensor:
    """K u / (1 - K u); inf where K u >= 1, for which nothing is promised."""
    product = torch.as_tensor(count, dtype=torch.float64) * u
    return torch.where(product < 1, product / (1 - product), torch.inf)


def _times(factor: Tensor, magnitude: Tensor) -> Tensor:
    return torch.where(magnitude == 0, magnitude, factor * magnitude)


def ratio(apart: Tensor, scale: Tensor) -> Tensor:
    """apart / scale by element, 0 where nothing is apart: a sum of zeros has no scale."""
    return torch.where(apart == 0, torch.zeros_like(apart), apart / scale)


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
