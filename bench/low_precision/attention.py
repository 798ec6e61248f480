"""Attention, softmax and rotary embeddings."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, behind, group, normal, plain, swap, wide

pair = group(__name__, "attention")


def sdpa(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def explicit(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None, late: int = 1
) -> Tensor:
    """Scores and softmax in float32; ``late`` is how far ahead the first masked key lies."""
    with plain():
        scores = wide(q) @ wide(k).mT * (scale or q.shape[-1] ** -0.5)
        if causal:
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(late)
            scores = scores.masked_fill(mask, -torch.inf)
        return scores.softmax(-1).to(v.dtype) @ v


def online(q: Tensor, k: Tensor, v: Tensor, size: int = 16, rescaled: bool = True) -> Tensor:
    """Key blocks with a running maximum; float32 sums, divided at the end."""
    with plain():
        q = wide(q) * q.shape[-1] ** -0.5
        top = torch.full_like(q[..., :1], -torch.inf)
        total, out = torch.zeros_like(top), torch.zeros_like(q)
        for keys, values in zip(k.split(size, -2), v.split(size, -2), strict=True):
            scores = q @ wide(keys).mT
            new = torch.maximum(top, scores.amax(-1, keepdim=True))
            weights, old = torch.exp(scores - new), torch.exp(top - new)
            total = total * old + weights.sum(-1, keepdim=True)
            out = (out * old if rescaled else out) + weights @ wide(values)
            top = new
        return (out / total).to(v.dtype)


def divided_last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As FlashAttention: what is rounded for the second product is not yet divided by its sum."""
    with plain():
        scores = wide(q) @ wide(k).mT * q.shape[-1] ** -0.5
        weights = torch.exp(scores - scores.amax(-1, keepdim=True))
        out = wide(weights.to(v.dtype)) @ wide(v)
        return (out / weights.sum(-1, keepdim=True)).to(v.dtype)


def half_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores, exponentials and their sum in q's type. Scores near 16 are off by 2^-5, the weights by 3 %.

    The reference's weights are off by 2^-9: 3 to 4 bits.
    """
    scores = q @ k.mT * q.shape[-1] ** -0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    return (weights / weights.sum(-1, keepdim=True)) @ v


class SelfAttention(nn.Module):
    """Heads over a projection; the op takes q, k, v as [batch, heads, time, size]."""

    def __init__(self, op: Op, d: int, heads: int, shared: int = 1) -> None:
        super().__init__()
        self.heads, self.op = heads, op
        self.q, self.k, self.v = nn.Linear(d, d), nn.Linear(d, d // shared, False), nn.Linear(d, d // shared)

    def forward(self, x: Tensor) -> Tensor:
        size = x.shape[-1] // self.heads
        q, k, v = (f(x).unflatten(-1, (-1, size)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.op(q, k, v).transpose(1, 2).flatten(2)


def shared_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    return explicit(q, k.repeat_interleave(times, 1), v.repeat_interleave(times, 1))


def shared_by_view(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A group's queries stand below each other; nothing is copied."""
    rows = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)
    return online(rows, k, v).unflatten(2, (-1, q.shape[2])).flatten(1, 2)


def shared_wrong_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query head i reads key head i modulo their number."""
    times = q.shape[1] // k.shape[1]
    return explicit(q, k.repeat(1, times, 1, 1), v.repeat(1, times, 1, 1))


def angles(x: Tensor, first: int = 0) -> Tensor:
    """[time, size / 2], in float32."""
    kind = torch.promote_types(x.dtype, torch.float32)
    size = x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=kind) / size)
    return torch.outer(torch.arange(first, first + x.shape[-2], dtype=kind), rates)


def rope(x: Tensor, first: int = 0) -> Tensor:
    """x * cos + rotated half * sin in float32, rounded at the end."""
    a = torch.cat([angles(x, first)] * 2, -1)
    low, high = x.chunk(2, -1)
    return (wide(x) * a.cos() + wide(torch.cat([-high, low], -1)) * a.sin()).to(x.dtype)


class Rotate(torch.autograd.Function):
    """Two halves at once; the backward pass turns back."""

    @staticmethod
    def forward(ctx, x: Tensor, sign: int) -> Tensor:
        ctx.sign = sign
        a = angles(x)
        (low, high), cos, sin = wide(x).chunk(2, -1), a.cos(), sign * a.sin()
        return torch.cat([low * cos - high * sin, high * cos + low * sin], -1).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        return Rotate.forward(ctx, dy, -ctx.sign), None


def rope_half_angles(x: Tensor) -> Tensor:
    """Positions and angles in x's type: near 512 an angle is off by 1, which is as much as it says."""
    a = torch.cat([angles(x).to(x.dtype)] * 2, -1)
    low, high = x.chunk(2, -1)
    return x * a.cos() + torch.cat([-high, low], -1) * a.sin()


def heads(time: int, size: int, n: int = 3, std: float = 1.0) -> partial:
    return partial(lambda: tuple(std * torch.randn(2, 4, time, size) for _ in range(n)))


def softmax(x: Tensor) -> Tensor:
    return x.softmax(-1)


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("sdpa_explicit", "bf16-true", R, lambda: Op(sdpa), swap(explicit), heads(48, 32), "xformers"),
    pair("attention_online", "16-true", R, lambda: Op(explicit), swap(online), heads(64, 16), "vllm"),
    pair("gqa_by_view", "bf16-mixed", R, lambda: SelfAttention(Op(shared_keys), 64, 8, 4),
         swap(shared_by_view), normal(2, 32, 64), "vllm"),
    pair("rope_by_halves", "16-true", R, lambda: Op(rope), swap(lambda x: Rotate.apply(x, 1)),
         normal(2, 4, 64, 32), "liger rope"),
    pair("attention_divided_last", "bf16-true", R, lambda: Op(explicit), swap(divided_last), heads(64, 32),
         "vllm"),
    pair("mask_off_by_one", "bf16-mixed", B, lambda: SelfAttention(Op(partial(sdpa, causal=True)), 64, 4),
         swap(partial(explicit, causal=True, late=2)), normal(2, 96, 64), "xformers"),
    pair("scale_by_size", "16-true", B, lambda: Op(explicit), swap(partial(explicit, scale=1 / 32)),
         heads(32, 32), "xformers"),
    pair("gqa_wrong_heads", "bf16-mixed", B, lambda: SelfAttention(Op(shared_keys), 64, 8, 4),
         swap(shared_wrong_heads), normal(2, 32, 64), "xformers"),
    pair("rope_position_from_one", "bf16-mixed", B, lambda: behind(32, 32, Op(rope)),
         swap(partial(rope, first=1)), normal(2, 48, 32), "liger rope"),
    pair("softmax_scores_in_half", "bf16-true", L, lambda: Op(explicit), swap(half_scores),
         heads(64, 32, std=2.0), "xformers", factor=4.9),
    pair("rope_angles_in_half", "bf16-true", L, lambda: Op(rope), swap(rope_half_angles), normal(1, 512, 32),
         "liger rope", factor=89),
]  # fmt: skip
