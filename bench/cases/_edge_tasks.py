"""Small networks that the edge cases need: inputs far from zero, and a branch that hardly counts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.tasks import _classes, _task


class Sensor(nn.Module):
    """[N, 16] readings far from zero -> [N, 4]: LayerNorm first, then two linear layers."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.fc1 = nn.Linear(16, 24)
        self.act = nn.Tanh()
        self.fc2 = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.norm(x))))


class ScaledBlock(nn.Module):
    """A ConvNeXt block: its branch is scaled by 1e-6 at the start."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.GroupNorm(1, width)
        self.up = nn.Conv2d(width, 2 * width, 1)
        self.act = nn.GELU()
        self.down = nn.Conv2d(2 * width, width, 1)
        self.scale = nn.Parameter(torch.full((width, 1, 1), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale * self.down(self.act(self.up(self.norm(self.depthwise(x)))))


class ScaledNet(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: a stem, one scaled block, the mean, a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.block = ScaledBlock(8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.block(self.stem(x)).mean((2, 3)))


sensor_30 = _task("sensor_30", Sensor, lambda: (30 + torch.randn(16, 16), _classes(16, 4)))
sensor_1000 = _task("sensor_1000", Sensor, lambda: (1000 + torch.randn(16, 16), _classes(16, 4)))
scaled = _task("scaled", ScaledNet, lambda: (torch.randn(10, 3, 12, 12), _classes(10, 4)))
