"""Normalisations: RMSNorm, LayerNorm, GroupNorm, a residual and its norm."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, behind, gain, group, normal, swap, wide

pair = group(__name__, "norm")


def rms_llama(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Llama's: rounded before the weight."""
    h = wide(x)
    h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
    return weight * h.to(x.dtype)


def rms_gemma(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Gemma's order: the weight in float32, rounded once."""
    h = wide(x)
    return (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps) * wide(weight)).to(x.dtype)


class RMS(torch.autograd.Function):
    """Float32 inside, forward and backward; ``mean_term`` is what the statistics add to dx."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float, mean_term: float) -> Tensor:
        h = wide(x)
        rstd = torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        ctx.mean_term = mean_term
        return (h * rstd * wide(weight)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        x, weight, rstd = ctx.saved_tensors
        unit, g = wide(x) * rstd, wide(dy) * wide(weight)
        dx = rstd * (g - ctx.mean_term * unit * (unit * g).mean(-1, keepdim=True))
        dw = (wide(dy) * unit).flatten(0, -2).sum(0)
        return dx.to(x.dtype), dw.to(weight.dtype), None, None


def rms_by_hand(x: Tensor, weight: Tensor, eps: float = 1e-6, mean_term: float = 1.0) -> Tensor:
    return RMS.apply(x, weight, eps, mean_term)


def rms_stepwise(x: Tensor, weight: Tensor) -> Tensor:
    """Rounded after the root, after the product and after the weight; the sum in float32."""
    rstd = torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-6).to(x.dtype)
    return x * rstd * weight


def rms_eps_outside(x: Tensor, weight: Tensor) -> Tensor:
    h = wide(x)
    return weight * (h / (h.pow(2).mean(-1, keepdim=True).sqrt() + 1e-6)).to(x.dtype)


def rms_half_sum(x: Tensor, weight: Tensor) -> Tensor:
    """The sum of squares grows in x's type, four columns at a time: 512 additions of 2048 columns.

    Once it is near its end half a unit is 2^-9 of it, at each addition: about 3 bits.
    """
    total = torch.zeros_like(x[..., :1])
    for part in x.split(4, -1):
        total = total + (part * part).sum(-1, keepdim=True)
    return x * torch.rsqrt(total / x.shape[-1] + 1e-6) * weight


def layer(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return F.layer_norm(x, weight.shape, weight.to(x.dtype), bias.to(x.dtype), eps)


def layer_two_pass(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    h = wide(x)
    h = h - h.mean(-1, keepdim=True)
    return (h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-5) * weight + bias).to(x.dtype)


def layer_half_moments(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """E[x^2] - E[x]^2 in x's type: at a mean of four deviations 17 - 16 cancels four bits."""
    mean = x.mean(-1, keepdim=True)
    variance = (x * x).mean(-1, keepdim=True) - mean * mean
    return (x - mean) * torch.rsqrt(variance + 1e-5) * weight + bias


def groups(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.group_norm(x, 4, weight.to(x.dtype), bias.to(x.dtype))


def groups_reshaped(x: Tensor, weight: Tensor, bias: Tensor, correction: int = 0) -> Tensor:
    h = wide(x).reshape(x.shape[0], 4, -1)
    variance, mean = torch.var_mean(h, -1, keepdim=True, correction=correction)
    h = ((h - mean) * torch.rsqrt(variance + 1e-5)).view(x.shape)
    return (h * wide(weight).view(-1, 1, 1) + wide(bias).view(-1, 1, 1)).to(x.dtype)


def residual_rms(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    return rms_llama(x + residual, weight)


def residual_rms_fused(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    """The sum is never rounded."""
    total = wide(x) + wide(residual)
    out = total * torch.rsqrt(total.pow(2).mean(-1, keepdim=True) + 1e-6) * weight
    return out.to(torch.promote_types(x.dtype, weight.dtype))


class AfterResidual(nn.Module):
    """A branch and a projected residual, both half under autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.branch, self.skip = nn.Linear(128, 128), nn.Linear(128, 128)
        self.op = Op(residual_rms, weight=gain(128))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.branch(x), self.skip(x))


def rms(n: int, fn=rms_llama) -> Op:
    return Op(fn, weight=gain(n))


def affine(fn, n: int) -> Op:
    return Op(fn, weight=gain(n), bias=0.1 * torch.randn(n))


def conv_groups() -> nn.Module:
    return nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), affine(groups, 16))


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("rms_by_hand", "bf16-true", R, lambda: rms(256), swap(rms_by_hand), normal(32, 256), "liger rms"),
    pair("rms_rounded_once", "16-true", R, lambda: rms(192), swap(rms_gemma), normal(2, 24, 192), "apex"),
    pair("rms_unfused_for_fused", "bf16-true", R, lambda: rms(256, rms_by_hand), swap(rms_stepwise),
         normal(32, 256), "vllm layer norm"),
    pair("layer_norm_two_pass", "bf16-mixed", R, lambda: behind(64, 128, affine(layer, 128)),
         swap(layer_two_pass), normal(48, 64), "apex"),
    pair("group_norm_reshaped", "16-true", R, lambda: affine(groups, 16), swap(groups_reshaped),
         normal(4, 16, 8, 8), "torch"),
    pair("residual_rms_fused", "bf16-mixed", R, AfterResidual, swap(residual_rms_fused), normal(48, 128),
         "vllm layer norm"),
    pair("rms_backward_without_mean_term", "bf16-true", B, lambda: rms(64),
         swap(partial(rms_by_hand, mean_term=0)), normal(48, 64), "liger rms"),
    pair("rms_eps_outside", "16-true", B, lambda: rms(128), swap(rms_eps_outside), normal(32, 128, std=4e-3),
         "vllm layer norm"),
    pair("layer_norm_other_eps", "bf16-true", B, lambda: affine(layer, 128), swap(partial(layer, eps=1e-6)),
         normal(48, 128, std=2e-2), "apex"),
    pair("group_norm_unbiased", "16-mixed", B, conv_groups, swap(partial(groups_reshaped, correction=1)),
         normal(4, 8, 6, 6), "torch"),
    pair("rms_sum_in_half", "bf16-true", L, lambda: rms(2048), swap(rms_half_sum), normal(16, 2048),
         "liger rms", factor=18),
    pair("layer_norm_moments_in_half", "16-true", L, lambda: affine(layer, 256), swap(layer_half_moments),
         normal(32, 256, mean=4.0), "apex", factor=19),
]  # fmt: skip
