"""Adapters, activations, gates and averages: what a merge, a mode or a conversion gets wrong."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.real_bugs import real_bug
from bench.real_bugs._denoiser import Gate, LoRA, denoiser
from bench.real_bugs._networks import decoder
from bench.tasks import _classes, _task, dropout_transformer


@real_bug(
    "merged_bias_without_its_scale",
    "https://github.com/huggingface/peft/pull/2489",
    "peft before April 2025 (lora_bias=True)",
    at="adapted",
    on=denoiser,
    passes="eval",
)
class UnscaledBias(LoRA):
    """Merging adds the adapter's bias without the adapter's scale."""

    def merged(self) -> tuple[Tensor, Tensor]:
        return torch.addmm(self.weight, self.b, self.a, alpha=4), self.bias + (
            4 if self.mended else 1
        ) * self.shift


@real_bug(
    "delta_merged_twice",
    "https://github.com/huggingface/peft/pull/3774",
    "peft of September 2026 (MultiheadAttention's out_proj)",
    at="adapted",
    on=denoiser,
    passes="eval",
)
class MergedTwice(LoRA):
    """The adapter's product is written into the weight and then merged once more."""

    def merged(self) -> tuple[Tensor, Tensor]:
        delta = 4 * (self.b @ self.a)
        return self.weight + delta + (0 if self.mended else delta), self.bias + 4 * self.shift


@real_bug(
    "exact_gelu_for_its_approximation",
    "https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4661",
    "Megatron-Bridge before July 2026 (Gemma 1); vLLM before March 2024 (vllm#3411)",
    at=("blocks.0.act", "blocks.1.act"),
    on=decoder,
)
def exact(act: nn.GELU, mended: bool) -> nn.Module:
    """The weights were trained with the tanh form of gelu and run with the exact one."""
    return TanhGELU() if mended else nn.GELU()


class TanhGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


@real_bug(
    "zero_gate_shrunk",
    "https://github.com/pytorch/pytorch/issues/80803",
    "torch 1.11 and later (hardshrink with lambd=0; found by NablaFuzz)",
    at="gate",
    on=denoiser,
    passes=("weight gradient", "input gradient", "update"),
    module=("gate", ""),
)
class Shrunk(Gate):
    """hardshrink at lambd=0 is the identity, but has no gradient at 0, where the gate begins."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        scale = torch.where(scale.abs() >= 0, scale, 0) if self.mended else F.hardshrink(scale, 0.0)
        return torch.addcmul(x, scale, torch.sin(x))


@real_bug(
    "dropout_never_ends",
    "https://github.com/rixwew/pytorch-fm/issues/21",
    "pytorch-fm before July 2020 (F.dropout without training=)",
    at=("blocks.0.drop", "blocks.1.drop"),
    on=dropout_transformer,
    passes="eval",
)
class NeverEnds(nn.Dropout):
    """F.dropout drops in eval mode too unless it is told the mode."""

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, training=self.training) if self.mended else F.dropout(x, self.p)


@real_bug(
    "dropout_ends_at_the_first_evaluation",
    "https://github.com/NVIDIA/Megatron-LM/pull/411",
    "Megatron-LM before July 2023 (FlashSelfAttention)",
    at=("blocks.0.drop", "blocks.1.drop"),
    on=dropout_transformer,
    passes=("forward", "input gradient", "weight gradient", "update"),
)
class EndsAtEval(nn.Dropout):
    """A call in eval mode sets the rate to 0, and training goes on without dropout."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training and not self.mended:
            self.p = 0.0
        return F.dropout(x, self.p if self.training else 0.0)


class Average(nn.Module):
    """A network and its running average, which answers in eval mode: a mean teacher's."""

    def __init__(self, online: nn.Module, average: nn.Module):
        super().__init__()
        self.online, self.average = online, average.requires_grad_(False)

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        pairs = zip(self.average.state_dict().values(), self.online.state_dict().values(), strict=True)
        return [(mine, other) for mine, other in pairs if mine.is_floating_point()]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.average(x)
        y = self.online(x)
        with torch.no_grad():
            for mine, other in self.tensors():
                mine.lerp_(other, 0.3)
        return y


def _small() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))


averaged = _task(
    "averaged", lambda: Average(_small(), _small()), lambda: (torch.randn(10, 8), _classes(10, 4))
)


@real_bug(
    "average_without_the_buffers",
    "https://github.com/lucidrains/byol-pytorch/issues/73",
    "byol-pytorch of December 2021; cosmix-uda#21",
    at="",
    on=averaged,
    module=("", "average", "average.1"),
    passes=("buffer", "eval"),
)
class WithoutBuffers(Average):
    """The average follows the weights and not the batch norm's statistics."""

    def tensors(self) -> list[tuple[Tensor, Tensor]]:
        weights = list(zip(self.average.parameters(), self.online.parameters(), strict=True))
        buffers = [*zip(self.average.buffers(), self.online.buffers(), strict=True)] if self.mended else []
        return weights + [(mine, other) for mine, other in buffers if mine.is_floating_point()]
