"""True rewrites of causal self-attention."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, copied, rewritten
from bench.tasks import dropout_transformer, transformer


class Attention(nn.Module):
    """The layers of ``SelfAttention``; subclasses mix the values of [N, heads, T, D / heads]."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        self.heads, self.qkv, self.out = attention.heads, attention.qkv, attention.out

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return tuple(y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(*self.project(x)).transpose(1, 2).flatten(2))


def _future(scores: Tensor) -> Tensor:
    """True where a token would look ahead."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)


class MinusInfinity(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.masked_fill(_future(scores), float("-inf")).softmax(-1) @ v


class MinusBillion(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = torch.einsum("nhqd,nhkd->nhqk", q, k) * q.shape[-1] ** -0.5
        weights = torch.softmax(scores + _future(scores).to(scores.dtype) * -1e9, dim=-1)
        return torch.einsum("nhqk,nhkd->nhqd", weights, v)


class ScaleAsTensor(Attention):
    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scale = torch.sqrt(torch.tensor(float(q.shape[-1])))
        scores = q @ k.transpose(-2, -1) / scale
        return scores.masked_fill(_future(scores), float("-inf")).softmax(-1) @ v


class Online(Attention):
    """Keys in pieces of four with a running maximum and sum, as FlashAttention has it."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        length, scale = q.shape[-2], q.shape[-1] ** -0.5
        future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
        top = q.new_full(q.shape[:-1], -torch.inf)[..., None]
        total, mixed = q.new_zeros(top.shape), torch.zeros_like(q)
        for start in range(0, length, 4):
            keys = slice(start, start + 4)
            scores = (q @ k[:, :, keys].mT * scale).masked_fill(future[:, keys], -torch.inf)
            new_top = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            weights, shrink = torch.exp(scores - new_top), torch.exp(top - new_top)
            total = total * shrink + weights.sum(-1, keepdim=True)
            mixed, top = mixed * shrink + weights @ v[:, :, keys], new_top
        return mixed / total


class ThreeProjections(Attention):
    def __init__(self, attention: nn.Module):
        super().__init__(attention)
        del self.qkv
        width = attention.out.in_features
        for i, name in enumerate(("query", "key", "value")):
            linear, rows = nn.Linear(width, width), slice(i * width, (i + 1) * width)
            linear.weight, linear.bias = (copied(p[rows]) for p in (attention.qkv.weight, attention.qkv.bias))
            setattr(self, name, linear)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        projected = (self.query(x), self.key(x), self.value(x))
        return tuple(y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in projected)


class HeadMajor(Attention):
    """The rows of the fused projection by head first, then by q, k, v, as in GPT-NeoX."""

    def __init__(self, attention: nn.Module):
        super().__init__(attention)
        width = attention.out.in_features
        order = torch.arange(3 * width).view(3, self.heads, -1).transpose(0, 1).flatten()
        self.qkv = nn.Linear(width, 3 * width)
        self.qkv.weight = copied(attention.qkv.weight[order])
        self.qkv.bias = copied(attention.qkv.bias[order])

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.qkv(x).unflatten(-1, (self.heads, -1)).transpose(1, 2).chunk(3, -1)


def _both(model: nn.Module, kind: type[Attention]) -> nn.Module:
    """The attention of both blocks rewritten."""
    rewritten(model, "blocks.0.attention", kind)
    return rewritten(model, "blocks.1.attention", kind)


@case(SAME, "attention by hand", on=transformer)
def attention_minus_infinity(model: nn.Module) -> nn.Module:
    """Scores, -inf above the diagonal, softmax."""
    return _both(model, MinusInfinity)


@case(SAME, "attention by hand", on=dropout_transformer)
def attention_minus_billion(model: nn.Module) -> nn.Module:
    """-1e9 is added above the diagonal; its exponential is zero in every dtype."""
    return _both(model, MinusBillion)


@in_place_of("blocks.1.attention", SAME, "attention by hand", transformer, "attention_query_scaled")
class QueryScaled(Attention):
    """The queries are scaled, not the scores."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return scores.masked_fill(_future(scores), float("-inf")).softmax(-1) @ v


@case("round_off", "scale in float32", on=transformer)
def attention_scale_as_tensor(model: nn.Module) -> nn.Module:
    """``sqrt(tensor(float(d)))``: a float32 number of no dimension, also where the network is in float64."""
    return _both(model, ScaleAsTensor)


@in_place_of("blocks.0.attention", SAME, "attention by hand", transformer, "attention_softmax_by_hand")
class SoftmaxByHand(Attention):
    """Exponentials less the maximum; the values are mixed before the division by their sum."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(_future(q @ k.mT), float("-inf"))
        weights = torch.exp(scores - scores.amax(-1, keepdim=True).detach())
        return (weights @ v) / weights.sum(-1, keepdim=True)


@case(SAME, "attention in pieces", on=transformer)
def attention_online_softmax(model: nn.Module) -> nn.Module:
    """Keys in pieces of four, what was summed so far rescaled with each new maximum."""
    return _both(model, Online)


@in_place_of(
    "blocks.0.attention", SAME, "attention in pieces", dropout_transformer, "attention_one_head_at_a_time"
)
class OneHeadAtATime(Attention):
    """A loop over the heads."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads = [Attention.mix(self, q[:, h], k[:, h], v[:, h]) for h in range(self.heads)]
        return torch.stack(heads, 1)


@in_place_of("blocks.1.attention", SAME, "attention by hand", transformer, "attention_heads_in_batch")
class HeadsInBatch(Attention):
    """``baddbmm`` on heads folded into the batch."""

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        future = q.new_full((q.shape[-2], q.shape[-2]), -torch.inf).triu(1)
        q, k, v = (y.flatten(0, 1) for y in (q, k, v))
        scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=1 / math.sqrt(q.shape[-1]))
        return torch.bmm(scores.softmax(-1), v).unflatten(0, (-1, self.heads))


@case(SAME, "fused projection taken apart", on=transformer)
def attention_three_projections(model: nn.Module) -> nn.Module:
    """A linear layer each for q, k and v."""
    return _both(model, ThreeProjections)


@case(SAME, "fused projection permuted", on=dropout_transformer)
def attention_head_major(model: nn.Module) -> nn.Module:
    """The rows of q, k and v interleaved by head."""
    return _both(model, HeadMajor)
