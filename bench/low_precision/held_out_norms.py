"""Normalisations in other places: modulated, gated, of queries, of instances, over a batch."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, behind, gain, group, normal, swap, wide

pair = group(__name__, "norm")


def unit(x: Tensor, eps: float) -> Tensor:
    """Divided by its root mean square, at least in float32."""
    return wide(x) * torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + eps)


def one_plus(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    """Gemma's: the weight is what is added to one."""
    return (unit(x, eps) * (1 + wide(weight))).to(x.dtype)


def one_plus_rounded(x: Tensor, weight: Tensor) -> Tensor:
    """A rounding before the weight too."""
    return (unit(x, 1e-6).to(x.dtype) * (1 + weight)).to(x.dtype)


def modulated(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    """A diffusion transformer's, in three steps of x's type."""
    return F.layer_norm(x, x.shape[-1:]) * (1 + scale) + shift


def modulated_fused(x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    h = wide(x)
    variance, mean = torch.var_mean(h, -1, correction=0, keepdim=True)
    return ((h - mean) * torch.rsqrt(variance + 1e-5) * (1 + wide(scale)) + wide(shift)).to(x.dtype)


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.x, self.condition, self.op = nn.Linear(48, 96), nn.Linear(16, 192), Op(modulated)

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        return self.op(self.x(x), *self.condition(condition).chunk(2, -1))


def gated(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """Mamba's: the gate first, one rounding."""
    return (unit(wide(x) * F.silu(wide(z)), 1e-5) * wide(weight)).to(x.dtype)


def gated_unfused(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    """A rounding after the gate, after the norm and after the weight."""
    return unit(x * F.silu(z), 1e-5).to(x.dtype) * weight


def gated_late(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
    return (unit(x, 1e-5) * wide(weight) * F.silu(wide(z))).to(x.dtype)


def instances(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.instance_norm(x, weight=weight, bias=bias)


def instances_merged(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Chan's: means and squared distances of eight parts are merged."""
    parts = wide(x).flatten(2).unflatten(-1, (8, -1))
    mean = parts.mean(-1)
    squares = (parts - mean.unsqueeze(-1)).pow(2).sum(-1)
    whole = mean.mean(-1, keepdim=True)
    squares = squares + parts.shape[-1] * (mean - whole).pow(2)
    variance = squares.sum(-1, keepdim=True) / x[0, 0].numel()
    h = (wide(x).flatten(2) - whole) * torch.rsqrt(variance + 1e-5)
    return (h.view(x.shape) * wide(weight).view(-1, 1, 1) + wide(bias).view(-1, 1, 1)).to(x.dtype)


def lengths(x: Tensor) -> Tensor:
    return F.normalize(wide(x), dim=-1).to(x.dtype)


def lengths_by_hand(x: Tensor) -> Tensor:
    h = wide(x)
    return (h * torch.rsqrt((h * h).sum(-1, keepdim=True))).to(x.dtype)


def lengths_in_half(x: Tensor) -> Tensor:
    """Two squares at a time in x's type: 512 additions, about 2 bits."""
    total = torch.zeros_like(x[..., :1])
    for part in x.split(2, -1):
        total = total + (part * part).sum(-1, keepdim=True)
    return x * torch.rsqrt(total)


class Layer(torch.autograd.Function):
    """LayerNorm; ``mean_term`` is what the mean adds to dx, ``rows`` how many of them make dw."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, mean_term: float, rows: int | None) -> Tensor:
        variance, mean = torch.var_mean(wide(x), -1, correction=0, keepdim=True)
        rstd = torch.rsqrt(variance + 1e-5)
        ctx.save_for_backward(x, weight, mean, rstd)
        ctx.mean_term, ctx.rows = mean_term, rows
        return ((wide(x) - mean) * rstd * wide(weight) + wide(bias)).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        x, weight, mean, rstd = ctx.saved_tensors
        h, dy = (wide(x) - mean) * rstd, wide(dy)
        g = dy * wide(weight)
        dx = g - ctx.mean_term * g.mean(-1, keepdim=True) - h * (g * h).mean(-1, keepdim=True)
        dw, db = (dy * h)[: ctx.rows].sum(0), dy.sum(0)
        return (rstd * dx).to(x.dtype), dw.to(weight.dtype), db.to(weight.dtype), None, None


def layer(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(wide(x), x.shape[-1:], wide(weight), wide(bias)).to(x.dtype)


def layer_by_hand(
    x: Tensor, weight: Tensor, bias: Tensor, mean_term: float = 1.0, rows: int | None = None
) -> Tensor:
    return Layer.apply(x, weight, bias, mean_term, rows)


def over_rows(x: Tensor, weight: Tensor) -> Tensor:
    """Batch statistics of [rows, size] in training."""
    variance, mean = torch.var_mean(wide(x), 0, correction=0)
    return ((wide(x) - mean) * torch.rsqrt(variance + 1e-5) * wide(weight)).to(x.dtype)


def over_rows_in_half(x: Tensor, weight: Tensor) -> Tensor:
    """A row at a time in x's type: 768 additions; the variance is off by 2 % and more, 3 bits."""
    mean = x.mean(0)
    total = torch.zeros_like(mean)
    for row in x:
        total = total + (row - mean) ** 2
    return (x - mean) * torch.rsqrt(total / len(x) + 1e-5) * weight


def affine(fn, n: int) -> Op:
    return Op(fn, weight=gain(n), bias=0.1 * torch.randn(n))


def two(n: int, d: int) -> partial:
    return partial(lambda: (torch.randn(n, d), torch.randn(n, d)))


def near_one(n: int) -> Op:
    return Op(one_plus, weight=0.1 * torch.randn(n))


def conditioned() -> tuple[Tensor, Tensor]:
    return torch.randn(40, 48), torch.randn(40, 16)


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("one_plus_rounded_twice", "16-mixed", R, lambda: behind(48, 160, near_one(160)),
         swap(one_plus_rounded), normal(40, 48), "liger rms"),
    pair("modulated_fused", "bf16-mixed", R, Modulated, swap(modulated_fused), conditioned,
         "liger layer norm"),
    pair("gated_norm_unfused", "bf16-true", R, lambda: Op(gated, weight=gain(128)), swap(gated_unfused),
         two(40, 128), "gated norm"),
    pair("instance_norm_merged", "16-true", R, lambda: affine(instances, 6), swap(instances_merged),
         normal(3, 6, 8, 16), "torch"),
    pair("lengths_by_hand", "bf16-mixed", R, lambda: behind(64, 80, Op(lengths)), swap(lengths_by_hand),
         normal(40, 64), "vllm layer norm"),
    pair("layer_norm_without_mean_gradient", "16-mixed", B, lambda: behind(32, 64, affine(layer, 64)),
         swap(partial(layer_by_hand, mean_term=0)), normal(56, 32), "apex"),
    pair("layer_norm_last_row_left_out", "bf16-true", B, lambda: affine(layer, 64),
         swap(partial(layer_by_hand, rows=-1)), normal(96, 64), "liger layer norm"),
    pair("gate_after_norm", "bf16-true", B, lambda: Op(gated, weight=gain(128)), swap(gated_late),
         two(40, 128), "gated norm"),
    pair("one_plus_other_eps", "bf16-mixed", B, lambda: behind(64, 96, near_one(96)),
         swap(partial(one_plus, eps=1e-5)), normal(40, 64, std=2e-2), "liger rms"),
    pair("lengths_in_half", "16-mixed", L, lambda: behind(16, 1024, Op(lengths)), swap(lengths_in_half),
         normal(24, 16), "vllm layer norm", factor=5),
    pair("batch_statistics_in_half", "bf16-true", L, lambda: Op(over_rows, weight=gain(24)),
         swap(over_rows_in_half), normal(768, 24), "gated norm", factor=48),
]  # fmt: skip
