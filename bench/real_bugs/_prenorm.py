"""A stack of layers whose residual is added in the norm, and gets the gradient of both."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.tasks import _classes, _task


class AddNorm(nn.Module):
    """(x, residual) -> the norm of their sum, and the sum."""

    def __init__(self, width: int = 16):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.1 * torch.randn(width))

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return total * torch.rsqrt(total.square().mean(-1, keepdim=True) + 1e-6) * self.weight, total


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.add, self.up, self.down = AddNorm(), nn.Linear(16, 24), nn.Linear(24, 16)
        self.act = nn.SiLU()

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        normed, total = self.add(x, residual)
        return self.down(self.act(self.up(normed))), total


class PreNorm(nn.Module):
    """[N, 12] -> [N, 4]."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.fc = nn.Linear(12, 16), nn.Linear(12, 16), nn.Linear(16, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        y, residual = self.first(x), self.second(x)
        for layer in self.layers:
            y, residual = layer(y, residual)
        return self.fc(y + residual)


prenorm = _task("prenorm", PreNorm, lambda: (torch.randn(14, 12), _classes(14, 4)))
