"""Right, but suspicious: tables kept outside the state, caches, merged weights, other exponentials."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_images import unet
from bench.cases._heldout_sequences import Temporal, seq2seq, temporal
from bench.cases._heldout_tasks import ConvNextBlock, convnext
from bench.cases._rewritten import SAME
from bench.cases.heldout_rewrites_dense import _interpolation
from bench.surgery import recast


@in_place_of("upsample", SAME, "table outside the network's state", unet, "upsampling_by_a_loose_table")
class Loose(nn.Module):
    """The interpolation's weights, quarters all, are a plain tensor that no cast of the module meets."""

    def __init__(self, _: nn.Upsample):
        super().__init__()
        self.rows = _interpolation(6)

    def forward(self, x: Tensor) -> Tensor:
        rows = self.rows.type_as(x)
        return torch.einsum("ih,nchw,jw->ncij", rows, x, rows)


@case(SAME, "table cached by shape", on=temporal)
def triangles_cached_by_length_and_dtype(model: nn.Module) -> nn.Module:
    """The triangle that averages the past is made at first use and kept for each length and dtype."""

    class Cached(Temporal):
        def past(self, x: Tensor) -> Tensor:
            key = (x.shape[2], x.dtype, x.device)
            if key not in self.triangles:
                ones = torch.ones(x.shape[2], x.shape[2], dtype=x.dtype, device=x.device).triu()
                self.triangles[key] = ones / ones.sum(0)
            return x @ self.triangles[key]

    return recast(model, "", Cached, triangles={})


@in_place_of(
    ("blocks.0", "blocks.1"),
    SAME,
    "weights merged for inference",
    convnext,
    "merged_weight_cached_without_a_graph",
)
class MergedWeightCachedWithoutAGraph(ConvNextBlock):
    """Without a graph the scaled weight is kept until one of its parts changes; with one it is made anew."""

    def merged(self) -> tuple[Tensor, Tensor]:
        parts = (self.gamma, self.down.weight, self.down.bias)
        if torch.is_grad_enabled():
            return self.gamma[:, None] * self.down.weight, self.gamma * self.down.bias
        version = [(id(part), part.data_ptr(), part.dtype, part._version) for part in parts]
        if self.__dict__.get("version") != version:
            self.version = version
            self.cache = (self.gamma[:, None] * self.down.weight, self.gamma * self.down.bias)
        return self.cache

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.up(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))
        return x + F.linear(y, *self.merged()).permute(0, 3, 1, 2)


@method_of("", SAME, "powers of two for exponentials", seq2seq)
def softmax_to_the_base_two(self, source: Tensor, tokens: Tensor) -> Tensor:
    """Queries are scaled by log2(e) besides, and powers of two taken, as fast attention kernels do."""
    memory, last = self.encoder(source)
    states, _ = self.decoder(self.embed(tokens), last)
    weights, biases = (p.chunk(3) for p in (self.attention.in_proj_weight, self.attention.in_proj_bias))
    q, k, v = (
        F.linear(x, weight, bias).unflatten(2, (3, 4)).transpose(1, 2)
        for x, weight, bias in zip((states, memory, memory), weights, biases, strict=True)
    )
    scores = (q * (math.log2(math.e) / 2)) @ k.mT
    powers = torch.exp2(scores - scores.amax(3, keepdim=True))
    mixed = (powers @ v / powers.sum(3, keepdim=True)).transpose(1, 2).flatten(2)
    context = self.attention.out_proj(mixed)
    return self.out(torch.cat([states, context], 2)).transpose(1, 2)
