"""Right, but suspicious: tables kept outside the state, caches, merged weights, other exponentials."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_images import unet
from experiments.calibration.cases._heldout_sequences import Seq2Seq, Temporal, seq2seq, temporal
from experiments.calibration.cases._heldout_tasks import ConvNextBlock, convnext
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.cases._rewritten import SAME, rewritten
from experiments.calibration.cases.heldout_rewrites_dense import _interpolation


@case(SAME, "table outside the network's state", on=unet)
def upsampling_by_a_loose_table(model: nn.Module) -> nn.Module:
    """The interpolation's weights, quarters all, are a plain tensor that no cast of the module meets."""

    class Loose(nn.Module):
        def __init__(self):
            super().__init__()
            self.rows = _interpolation(6)

        def forward(self, x: Tensor) -> Tensor:
            rows = self.rows.type_as(x)
            return torch.einsum("ih,nchw,jw->ncij", rows, x, rows)

    return rewritten(model, "upsample", lambda _: Loose())


@case(SAME, "table cached by shape", on=temporal)
def triangles_cached_by_length_and_dtype(model: nn.Module) -> nn.Module:
    """The triangle that averages the past is made at first use and kept for each length and dtype."""

    class Cached(Temporal):
        def triangle(self, x: Tensor) -> Tensor:
            key = (x.shape[2], x.dtype, x.device)
            if key not in self.triangles:
                ones = torch.ones(x.shape[2], x.shape[2], dtype=x.dtype, device=x.device).triu()
                self.triangles[key] = ones / ones.sum(0)
            return self.triangles[key]

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = torch.tanh(self.mix(block(x)))
            return self.head(x @ self.triangle(x))

    model.triangles = {}
    return recast(model, "", Cached)


@case(SAME, "weights merged for inference", on=convnext)
def merged_weight_cached_without_a_graph(model: nn.Module) -> nn.Module:
    """Without a graph the scaled weight is kept until one of its parts changes; with one it is made anew."""

    class Merged(ConvNextBlock):
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

    return recast(recast(model, "blocks.0", Merged), "blocks.1", Merged)


@case(SAME, "powers of two for exponentials", on=seq2seq)
def softmax_to_the_base_two(model: nn.Module) -> nn.Module:
    """Queries are scaled by log2(e) besides, and powers of two taken, as fast attention kernels do."""

    class BaseTwo(Seq2Seq):
        def forward(self, source: Tensor, tokens: Tensor) -> Tensor:
            memory, last = self.encoder(source)
            states, _ = self.decoder(self.embed(tokens), last)
            weights, biases = (
                p.chunk(3) for p in (self.attention.in_proj_weight, self.attention.in_proj_bias)
            )
            q, k, v = (
                F.linear(x, weight, bias).unflatten(2, (3, 4)).transpose(1, 2)
                for x, weight, bias in zip((states, memory, memory), weights, biases, strict=True)
            )
            scores = (q * (math.log2(math.e) / 2)) @ k.mT
            powers = torch.exp2(scores - scores.amax(3, keepdim=True))
            mixed = (powers @ v / powers.sum(3, keepdim=True)).transpose(1, 2).flatten(2)
            context = self.attention.out_proj(mixed)
            return self.out(torch.cat([states, context], 2)).transpose(1, 2)

    return recast(model, "", BaseTwo)
