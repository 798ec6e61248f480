"""Attention with windows, biases, caps, split keys and without a softmax; rotary pairs side by side."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, behind, group, normal, plain, swap, wide

pair = group(__name__, "attention")


def weighed(scores: Tensor, v: Tensor) -> Tensor:
    """Float32 scores to values; the weights are rounded for the product."""
    return scores.softmax(-1).to(v.dtype) @ v


def products(q: Tensor, k: Tensor) -> Tensor:
    return wide(q) @ wide(k).mT * q.shape[-1] ** -0.5


def window(q: Tensor, k: Tensor, v: Tensor, length: int = 16) -> Tensor:
    """Each query sees ``length`` keys, itself the last."""
    with plain():
        seen = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).tril().triu(1 - length)
        return weighed(products(q, k).masked_fill(~seen, -torch.inf), v)


def window_in_blocks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Blocks of 16 queries over two blocks of keys."""
    with plain():
        parts = []
        for i in range(0, q.shape[-2], 16):
            first = max(i - 16, 0)
            keys, values = k[..., first : i + 16, :], v[..., first : i + 16, :]
            apart = torch.arange(i, i + 16)[:, None] - torch.arange(first, i + 16)
            hidden = (apart < 0) | (apart >= 16)
            parts.append(
                weighed(products(q[..., i : i + 16, :], keys).masked_fill(hidden, -torch.inf), values)
            )
        return torch.cat(parts, -2)


def slopes(q: Tensor, k: Tensor, last: float = 2.0**-8) -> Tensor:
    """ALiBi's distances times a power of two a head: exact in half."""
    rates = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, last], dtype=wide(q).dtype).view(-1, 1, 1)
    apart = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])
    return torch.where(apart < 0, -torch.inf, -rates * apart)


def alibi(q: Tensor, k: Tensor, v: Tensor, last: float = 2.0**-8) -> Tensor:
    with plain():
        return weighed(products(q, k) + slopes(q, k, last), v)


def alibi_by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=slopes(q, k).to(q.dtype))


def split_keys(q: Tensor, k: Tensor, v: Tensor, weighted: bool = True) -> Tensor:
    """Two halves of the keys, each with its own softmax, merged by their sums."""
    with plain():
        outs, sums = [], []
        for keys, values in zip(k.chunk(2, -2), v.chunk(2, -2), strict=True):
            scores = products(q, keys)
            outs.append(scores.softmax(-1) @ wide(values))
            sums.append(torch.logsumexp(scores, -1, keepdim=True))
        share = torch.sigmoid(sums[0] - sums[1]) if weighted else 0.5
        return (outs[1] + share * (outs[0] - outs[1])).to(v.dtype)


def full(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    with plain():
        return weighed(products(q, k), v)


class Cap(torch.autograd.Function):
    """5 tanh(x / 5); ``whole`` has its slope in the backward pass."""

    @staticmethod
    def forward(ctx, x: Tensor, whole: bool) -> Tensor:
        t = torch.tanh(x / 5)
        ctx.save_for_backward(t)
        ctx.whole = whole
        return 5 * t

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (t,) = ctx.saved_tensors
        return (dy * (1 - t * t) if ctx.whole else dy), None


def capped(q: Tensor, k: Tensor, v: Tensor, whole: bool = True) -> Tensor:
    with plain():
        return weighed(Cap.apply(products(q, k), whole), v)


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention without a softmax, all pairs at once."""
    with plain():
        return ((wide(q) @ wide(k).mT).tril() @ wide(v)).to(v.dtype)


def linear_in_chunks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A float32 state goes from chunk to chunk."""
    with plain():
        parts, state = [], 0
        for a, b, c in zip(*(wide(x).split(16, -2) for x in (q, k, v)), strict=True):
            parts.append((a @ b.mT).tril() @ c + a @ (state + torch.zeros_like(b.mT @ c)))
            state = state + b.mT @ c
        return torch.cat(parts, -2).to(v.dtype)


def linear_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key at a time; autocast makes the state half: 640 additions, about 2 bits."""
    parts = []
    state = torch.zeros(*k.shape[:-2], k.shape[-1], v.shape[-1], dtype=v.dtype)
    for a, b, c in zip(*(x.unbind(-2) for x in (q, k, v)), strict=True):
        state = state + b.unsqueeze(-1) @ c.unsqueeze(-2)
        parts.append(a.unsqueeze(-2) @ state)
    return torch.cat(parts, -2)


def online_in_half(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A key at a time; sum and output grow in q's type: 256 additions, about 3 bits."""
    scores = products(q, k)
    weights = torch.exp(scores - scores.amax(-1, keepdim=True)).to(q.dtype)
    out, total = torch.zeros_like(q), torch.zeros_like(q[..., :1])
    for i in range(k.shape[-2]):
        total = total + weights[..., i : i + 1]
        out = out + weights[..., i : i + 1] * v[..., i : i + 1, :]
    return out / total


def turned(x: Tensor, halves: bool = False) -> Tensor:
    """Rotary pairs side by side, or (GPT-NeoX's) half the size apart."""
    kind, size = wide(x).dtype, x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=kind) / size)
    a = torch.outer(torch.arange(x.shape[-2], dtype=kind), rates)
    low, high = wide(x).chunk(2, -1) if halves else (wide(x)[..., ::2], wide(x)[..., 1::2])
    pairs = low * a.cos() - high * a.sin(), high * a.cos() + low * a.sin()
    return (torch.cat(pairs, -1) if halves else torch.stack(pairs, -1).flatten(-2)).to(x.dtype)


def turned_as_complex(x: Tensor) -> Tensor:
    kind, size = wide(x).dtype, x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=kind) / size)
    a = torch.outer(torch.arange(x.shape[-2], dtype=kind), rates)
    h = torch.view_as_complex(wide(x).unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(h * torch.polar(torch.ones_like(a), a)).flatten(-2).to(x.dtype)


class Heads(nn.Module):
    """Four heads over one projection with a bias."""

    def __init__(self, op: Op, d: int = 64) -> None:
        super().__init__()
        self.qkv, self.op = nn.Linear(d, 3 * d), op

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        return self.op(q, k, v).transpose(1, 2).flatten(2)


def heads(time: int, size: int, std: float = 1.0) -> partial:
    return partial(lambda: tuple(std * torch.randn(2, 4, time, size) for _ in range(3)))


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("window_in_blocks", "bf16-mixed", R, lambda: Heads(Op(window)), swap(window_in_blocks),
         normal(2, 64, 64), "vllm"),
    pair("alibi_by_sdpa", "bf16-true", R, lambda: Op(alibi), swap(alibi_by_sdpa), heads(48, 16), "xformers"),
    pair("keys_split", "16-mixed", R, lambda: Heads(Op(full)), swap(split_keys), normal(2, 64, 64), "vllm"),
    pair("linear_attention_in_chunks", "16-true", R, lambda: Op(linear), swap(linear_in_chunks),
         heads(64, 16, 0.4), "ssd"),
    pair("pairs_as_complex", "bf16-mixed", R, lambda: behind(32, 32, Op(turned)), swap(turned_as_complex),
         normal(3, 40, 32), "liger rope"),
    pair("window_one_longer", "bf16-mixed", B, lambda: Heads(Op(window)), swap(partial(window, length=17)),
         normal(2, 64, 64), "vllm"),
    pair("keys_split_unweighted", "bf16-true", B, lambda: Op(full), swap(partial(split_keys, weighted=False)),
         heads(96, 16, 0.5), "xformers"),
    pair("alibi_slope_of_last_head", "16-mixed", B, lambda: Heads(Op(alibi)),
         swap(partial(alibi, last=2.0**-9)), normal(2, 48, 64), "vllm"),
    pair("pairs_half_the_size_apart", "16-true", B, lambda: Op(turned), swap(partial(turned, halves=True)),
         normal(2, 3, 40, 32), "liger rope"),
    pair("cap_without_slope", "bf16-true", B, lambda: Op(capped), swap(partial(capped, whole=False)),
         heads(48, 32), "xformers"),
    pair("linear_attention_in_half", "bf16-mixed", L, lambda: Heads(Op(linear)), swap(linear_in_half),
         normal(1, 640, 64), "ssd", factor=5.4),
    pair("online_sums_in_half", "16-true", L, lambda: Op(full), swap(online_in_half), heads(256, 16),
         "xformers", factor=11),
]  # fmt: skip
