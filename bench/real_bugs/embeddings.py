"""Embeddings of time and place, and tables of embeddings."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from bench.real_bugs import real_bug
from bench.real_bugs._denoiser import Positions, Timestep, denoiser
from bench.real_bugs._networks import decoder
from bench.tasks import Transformer, transformer


@real_bug(
    "sines_and_cosines_exchanged",
    "https://github.com/flashinfer-ai/flashinfer/pull/3819",
    "flashinfer's Wan example before July 2026",
    at="time",
    on=denoiser,
)
class Exchanged(Timestep):
    """The halves were in the flipped order already, and are flipped."""

    def forward(self, t: Tensor) -> Tensor:
        sin, cos = (f(torch.outer(t, self.frequencies(t))) for f in (torch.sin, torch.cos))
        halves = torch.cat([sin, cos] if self.mended else [cos, sin], -1)
        return halves.roll(8, 1)


@real_bug(
    "frequencies_over_one_less",
    "https://github.com/kohya-ss/sd-scripts/pull/1187",
    "sd-scripts before March 2024 (SDXL)",
    at="time",
    on=denoiser,
)
class OverOneLess(Timestep):
    """The frequencies are spaced over half - 1 instead of half (downscale_freq_shift=1)."""

    def frequencies(self, like: Tensor) -> Tensor:
        steps = torch.arange(8, device=like.device, dtype=like.dtype) / (8 if self.mended else 7)
        return 10000**-steps


@real_bug(
    "precedence_in_the_positions",
    "https://github.com/zju3dv/LoFTR/issues/41",
    "LoFTR before August 2021",
    at="positions",
    on=denoiser,
)
class Precedence(Positions):
    """-log(10000) / d // 2 divides before it halves, and rounds to -1."""

    def frequencies(self, width: int, like: Tensor) -> Tensor:
        half = torch.arange(0, width // 2, device=like.device, dtype=like.dtype)
        return torch.exp(
            half * (-math.log(1e4) / (width // 2) if self.mended else -math.log(1e4) / width // 2)
        )


@real_bug(
    "positions_two_by_two",
    "https://github.com/shenweichen/DeepCTR/issues/379",
    "DeepCTR before 0.8.7",
    at="positions",
    on=denoiser,
)
class TwoByTwo(Positions):
    """Each feature has a frequency of its own, where a sine and its cosine share one."""

    def forward(self, x: Tensor) -> Tensor:
        feature = torch.arange(x.shape[2], device=x.device)
        exponent = (feature // 2 * 2 if self.mended else feature * 2).to(x.dtype) / x.shape[2]
        angle = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] / 10000**exponent
        return x + torch.where(feature % 2 == 0, angle.sin(), angle.cos())


@real_bug(
    "head_not_tied",
    "https://github.com/karpathy/nanoGPT/pull/21",
    "nanoGPT before January 2023, against GPT-2",
    at="",
    on=transformer,
    module=("head", "embed", ""),
    passes=("weight gradient", "update"),
)
def untied(model: Transformer, mended: bool) -> nn.Module:
    """The head starts from the embedding's weights and is trained apart from them."""
    head = nn.Linear(*reversed(model.embed.weight.shape), bias=False)
    head.weight = model.embed.weight if mended else nn.Parameter(model.embed.weight.detach().clone())
    model.head = head
    return model


@real_bug(
    "first_row_taken_for_padding",
    "https://github.com/ibalazevic/TuckER/issues/17",
    "TuckER before June 2020",
    at="embed",
    on=decoder,
    passes="weight gradient",
)
def padding_row(embed: nn.Embedding, mended: bool) -> nn.Module:
    """padding_idx=0 where the first row is an ordinary one: it never learns."""
    weight = embed.weight.detach().clone()
    return Rows(weight) if mended else nn.Embedding(*weight.shape, _weight=weight, padding_idx=0)


class Rows(nn.Module):
    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[tokens]
