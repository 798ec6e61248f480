"""Rewrites of the GPT's attention: weights together or apart, the softmax written out, other pairs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from models.gpt import GPT, Attention
from models.rewrites.swap import RewriteError


def _each(
    model: nn.Module, kind: type[Attention], change: Callable[[Attention], None] | None = None
) -> nn.Module:
    """``model`` with each attention of this kind, in place."""
    found = [m for m in model.modules() if isinstance(m, Attention)]
    if not found:
        raise RewriteError(
            f"{kind.__name__}: {type(model).__name__} has no models.gpt.Attention: write model=gpt"
        )
    for attention in found:
        attention.__class__ = kind
        if change:
            change(attention)
    return model


class FusedProjection(Attention):
    """Query, key and value from one layer of three times the width."""

    def fuse(self) -> None:
        parts = self.query, self.key, self.value
        del self.query, self.key, self.value
        self.fused = nn.Linear(parts[0].in_features, 3 * parts[0].out_features)
        with torch.no_grad():
            self.fused.weight.copy_(torch.cat([p.weight for p in parts]))
            self.fused.bias.copy_(torch.cat([p.bias for p in parts]))

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = self.fused(x).chunk(3, dim=-1)
        return q, k, v


def fused_qkv(model: GPT) -> nn.Module:
    """Query, key and value by one matrix product, in place."""
    return _each(model, FusedProjection, FusedProjection.fuse)


class Heads(nn.Module):
    """A linear layer as one layer a head, side by side."""

    def __init__(self, linear: nn.Linear, heads: int):
        super().__init__()
        size = linear.out_features // heads
        self.heads = nn.ModuleList(nn.Linear(linear.in_features, size) for _ in range(heads))
        with torch.no_grad():
            for i, head in enumerate(self.heads):
                head.weight.copy_(linear.weight[i * size : (i + 1) * size])
                head.bias.copy_(linear.bias[i * size : (i + 1) * size])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([head(x) for head in self.heads], dim=-1)


def heads_apart(model: GPT) -> nn.Module:
    """Each head's query, key and value by a layer of its own, in place."""

    def take_apart(attention: Attention) -> None:
        for name in ("query", "key", "value"):
            setattr(attention, name, Heads(getattr(attention, name), attention.heads))

    return _each(model, Attention, take_apart)


class ExplicitSoftmax(Attention):
    """The attention written out: scores, mask, softmax, mean of the values."""

    ahead = 0  # how many positions a position sees behind itself

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1 + self.ahead)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v


def explicit_softmax(model: GPT) -> nn.Module:
    """``scaled_dot_product_attention`` written out, in place."""
    return _each(model, ExplicitSoftmax)


class SeesTheNext(ExplicitSoftmax):
    """Wrong on purpose."""

    ahead = 1


def mask_off_by_one(model: GPT) -> nn.Module:
    """``explicit_softmax`` with a mask that begins one position too late: each token sees the next one."""
    return _each(model, SeesTheNext)


class Interleaved(Attention):
    """Channels 2i and 2i + 1 are turned together, in the place of i and size / 2 + i."""

    def interleave(self) -> None:
        order = _interleaved(self.heads, self.query.out_features)
        with torch.no_grad():
            for layer in (self.query, self.key):
                layer.weight.copy_(layer.weight[order])
                layer.bias.copy_(layer.bias[order])

    def turn(self, x: Tensor) -> Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = self.cos[: x.shape[2]], self.sin[: x.shape[2]]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def _interleaved(heads: int, width: int) -> Tensor:
    """Which channel of the halves stands at each place of the pairs: 0, s/2, 1, s/2 + 1, ... of each head."""
    return torch.arange(width).view(heads, 2, -1).transpose(1, 2).flatten()


def interleaved_rope(model: GPT) -> nn.Module:
    """Rotary positions on neighbouring channels, the rows of queries and keys in that order, in place."""
    model = _each(model, Interleaved, Interleaved.interleave)
    orders = {
        f"{name}.{layer}.{kind}": _interleaved(part.heads, part.query.out_features).argsort()
        for name, part in model.named_modules()
        if isinstance(part, Interleaved)
        for layer in ("query", "key")
        for kind in ("weight", "bias")
    }

    def fold(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {n: t[orders[n].to(t.device)] if n in orders else t for n, t in tensors.items()}

    model.fold = fold
    return model
