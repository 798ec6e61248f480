"""Noisy signals and their times: positions, an adapter, a gate."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import _classes, _task


class Timestep(nn.Module):
    """[N] -> [N, 16]: cosines, then sines (diffusers' flip_sin_to_cos, downscale_freq_shift=0)."""

    def frequencies(self, like: Tensor) -> Tensor:
        return torch.exp(-math.log(10000) * torch.arange(8, device=like.device, dtype=like.dtype) / 8)

    def forward(self, t: Tensor) -> Tensor:
        angle = t[:, None] * self.frequencies(t)
        return torch.cat([angle.cos(), angle.sin()], 1)


class Positions(nn.Module):
    """[N, T, D] with sines and cosines of the place added."""

    def frequencies(self, width: int, like: Tensor) -> Tensor:
        return torch.exp(
            torch.arange(0, width, 2, device=like.device, dtype=like.dtype) * (-math.log(1e4) / width)
        )

    def forward(self, x: Tensor) -> Tensor:
        angle = torch.arange(x.shape[1], device=x.device, dtype=x.dtype)[:, None] * self.frequencies(
            x.shape[2], x
        )
        return x + torch.stack([angle.sin(), angle.cos()], -1).flatten(1)


class LoRA(nn.Linear):
    """A frozen linear with an adapter of rank 3, scale 4 and bias, which eval mode merges into it."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__(inputs, outputs)
        self.a = nn.Parameter(0.3 * torch.randn(3, inputs))
        self.b, self.shift = (
            nn.Parameter(0.3 * torch.randn(outputs, 3)),
            nn.Parameter(0.1 * torch.randn(outputs)),
        )
        self.weight.requires_grad_(False), self.bias.requires_grad_(False)

    def merged(self) -> tuple[Tensor, Tensor]:
        return self.weight + 4 * self.b @ self.a, self.bias + 4 * self.shift

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return F.linear(x, *self.merged())
        return super().forward(x) + 4 * (F.linear(F.linear(x, self.a), self.b) + self.shift)


class Gate(nn.Module):
    """A branch whose scale begins at 0."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return x + scale * x.sin()


class Denoiser(nn.Module):
    """Noisy signals [N, 6, 8] and their times [N] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.time, self.positions, self.mix = Timestep(), Positions(), nn.Linear(16, 8)
        self.adapted, self.act, self.scale = LoRA(8, 8), nn.GELU(), nn.Parameter(torch.zeros(8))
        self.gate, self.fc = Gate(), nn.Linear(48, 5)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        x = self.positions(x) + self.mix(self.time(t))[:, None]
        x = x + self.act(self.adapted(x))
        return self.fc(self.gate(x, self.scale).flatten(1))


def _noisy() -> tuple[dict, Tensor]:
    return {"x": torch.randn(9, 6, 8), "t": torch.randint(0, 1000, (9,)).float()}, _classes(9, 5)


denoiser = _task("denoiser", Denoiser, _noisy)
