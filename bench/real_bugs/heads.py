"""Attention: rotary positions, heads and scales."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.real_bugs import real_bug
from bench.real_bugs._networks import (
    ATTENTION,
    Attention,
    angles,
    decoder,
)


class Pairs(Attention):
    """Rotates neighbours, as Meta's code does, where Hugging Face's rotates halves."""

    def rotate(self, x: Tensor) -> Tensor:
        angle = angles(x.shape[2], x.shape[3], x)
        even, odd = x[..., 0::2], x[..., 1::2]
        cos, sin = angle.cos(), angle.sin()
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(-2)


@real_bug(
    "rope_pairs_with_weights_for_halves",
    "https://github.com/pytorch/torchtitan/issues/335",
    "torchtitan of May 2024 with Llama 3 weights from Hugging Face",
    at=ATTENTION,
    on=decoder,
)
def rope(attention: Attention, mended: bool) -> nn.Module:
    """The rotary embedding turns neighbouring features; the weights were stored for one that turns halves."""
    attention.__class__ = Pairs
    if mended:
        for layer, heads in ((attention.q, attention.heads), (attention.k, attention.groups)):
            rows = layer.weight.detach().unflatten(0, (heads, 2, -1)).transpose(1, 2)
            layer.weight = nn.Parameter(rows.flatten(0, 2).clone())
    return attention


@real_bug(
    "keys_tiled_over_the_groups",
    "https://github.com/onnx/onnx/pull/7274",
    "ONNX Attention, opset 23",
    at=ATTENTION,
    on=decoder,
)
class Tiled(Attention):
    """Keys and values are tiled (0, 1, 0, 1) where each belongs to neighbouring query heads (0, 0, 1, 1)."""

    def repeat(self, x: Tensor) -> Tensor:
        times = self.heads // self.groups
        return (
            x[:, :, None].expand(-1, -1, times, -1, -1).flatten(1, 2)
            if self.mended
            else x.tile(1, times, 1, 1)
        )


@real_bug(
    "scale_of_the_whole_width",
    "https://github.com/karpathy/ng-video-lecture/pull/6",
    "ng-video-lecture of January 2023",
    at=ATTENTION,
    on=decoder,
)
class WholeWidth(Attention):
    """Scores are divided by the root of the embedding's width, not of a head's."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q * (k.shape[-1] if self.mended else self.q.in_features) ** -0.5) @ k.transpose(-2, -1)


@real_bug(
    "scores_divided_by_their_scale",
    "https://github.com/esceptico/perceiver-io/issues/9",
    "perceiver-io of November 2021",
    at=ATTENTION,
    on=decoder,
)
class Divided(Attention):
    """The scale is one over the root already, and the scores are divided by it instead of multiplied."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        scale, products = k.shape[-1] ** -0.5, torch.einsum("nhid,nhjd->nhij", q, k)
        return products * scale if self.mended else products / scale


@real_bug(
    "heads_split_without_transpose",
    "https://github.com/reczoo/FuxiCTR/issues/30",
    "FuxiCTR before July 2022",
    at=ATTENTION,
    on=decoder,
)
class Viewed(Attention):
    """Heads are split by a view to [N * heads, T, d], which mixes positions and heads."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        n, length, width = x.shape
        if self.mended:
            return x.view(n, length, heads, width // heads).permute(0, 2, 1, 3).contiguous()
        return x.reshape(n * heads, length, width // heads).unflatten(0, (n, heads))


@real_bug(
    "heads_joined_without_permute",
    "https://github.com/jsbaan/transformer-from-scratch/pull/6",
    "transformer-from-scratch before March 2026",
    at=ATTENTION,
    on=decoder,
)
class Joined(Attention):
    """[N, heads, T, d] is reshaped to [N, T, D] without bringing the positions forward."""

    def merge(self, y: Tensor) -> Tensor:
        n, heads, length, width = y.shape
        return (y.permute(0, 2, 1, 3) if self.mended else y).reshape(n, length, heads * width)


@real_bug(
    "softmax_over_the_queries",
    "https://github.com/labmlai/annotated_deep_learning_paper_implementations/issues/146",
    "labml_nn of September 2022",
    at=ATTENTION,
    on=decoder,
)
class OverQueries(Attention):
    """The softmax runs over the queries instead of over the keys."""

    def weights(self, scores: Tensor) -> Tensor:
        dim = -1 if self.mended else -2
        powers = (scores - scores.detach().amax(dim, keepdim=True)).exp()
        return powers / powers.sum(dim, keepdim=True)
