"""Kernels of torch's for CUDA that a measurement cannot use, and what computes in their place.

- The cross entropy of maps and of sequences, ``nll_loss2d``, sums in any order: blocks add to one number as
  they come ("Reproducibility", torch's notes, which list it). On an H200 the loss of one and the same pass
  moved by 6e-8 to 1e-7 from run to run. The network is not at fault, and its gradients repeat.
- In float64 hard swish and hard sigmoid hold their 1/6 in float32, and weight norm takes its root in float32
  (``ActivationHardswishKernel.cu``, ``ActivationHardsigmoidKernel.cu``, ``WeightNorm.cu`` of torch): each is
  off by up to 3e-8, which no rounding of float64 explains in whoever writes them out.

Registered with torch's dispatcher in the place of its kernels, as long as a measurement lasts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_NARROW = (torch.float16, torch.bfloat16)
NONE, MEAN = 0, 1  # torch's numbers for how a loss is reduced
_registered: list[torch.library.Library] = []


def begin() -> None:
    """From now on; nothing more where it is so already."""
    if _registered:
        return
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that torch's own are overridden
        library.impl("nll_loss2d_forward", nll_loss2d, "CUDA")
        for name, kernel in IN_FLOAT64.items():
            if torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CUDA"):
                own = torch.library.get_kernel(f"aten::{name}", "CUDA")
                library.impl(name, _in_float64(own, kernel), "CUDA", with_keyset=True)
    _registered.append(library)


def end() -> None:
    """torch's own again."""
    while _registered:
        _registered.pop()._destroy()


def _in_float64(own: Any, kernel: Callable) -> Callable:
    def chosen(keys: object, *given: Any) -> object:
        return kernel(*given) if given[0].dtype is torch.float64 else own.call_boxed(keys, *given)

    return chosen


def nll_loss2d(
    input: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """As ``aten::nll_loss2d_forward``: the loss and what its weights add up to.

    Args:
        input: log probabilities, shape (n, classes, height, width).
        target: classes, shape (n, height, width).
    """
    counts = target != ignore_index
    classes = target.where(counts, 0)
    picked = -input.gather(1, classes[:, None]).squeeze(1)
    weights = torch.ones_like(picked) if weight is None else weight[classes]
    losses, weights = (picked * weights).where(counts, 0), weights.where(counts, 0)
    if reduction == NONE:
        return losses, input.new_zeros(())
    wide = torch.float32 if input.dtype in _NARROW else input.dtype
    loss, total = losses.sum(dtype=wide), weights.sum(dtype=wide)
    loss = loss / total if reduction == MEAN else loss
    return loss.to(input.dtype), total.to(input.dtype)


def _hard_sigmoid(x: Tensor) -> Tensor:
    return (x + 3).clamp(0, 6) / 6


def hard_sigmoid_backward(gradient: Tensor, x: Tensor) -> Tensor:
    """As ``aten::hardsigmoid_backward``, whose 1/6 is float32's on a CPU as well."""
    return (gradient / 6).where((x > -3) & (x < 3), 0)


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    norms = torch.norm_except_dim(v, 2, dim)
    return v * (g / norms), norms


IN_FLOAT64: dict[str, Callable] = {
    "hardsigmoid": _hard_sigmoid,
    "hardsigmoid_": lambda x: x.copy_(_hard_sigmoid(x)),
    "hardsigmoid_backward": hard_sigmoid_backward,
    "hardswish": lambda x: x * _hard_sigmoid(x),
    "hardswish_": lambda x: x.mul_(_hard_sigmoid(x)),
    "_weight_norm_interface": _weight_norm,
}
