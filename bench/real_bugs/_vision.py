"""A small image network with one part for each bug."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import _classes, _task


class Residual(nn.Module):
    """Pre-activation: the shortcut carries what came in, as it came."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 10, 3, padding=1), nn.Conv2d(10, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv2(F.relu(self.conv1(F.relu(x))))


class PostResidual(nn.Module):
    """As ResNet has it: the sum is activated, not what is added."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.conv2(F.relu(self.conv1(x))) + x)


class Gate(nn.Module):
    """Squeeze and excitation with a hard sigmoid."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(8, 8)
        with torch.no_grad():
            self.fc.weight.mul_(20)  # so that some gates are shut and some wide open

    def hard(self, x: Tensor) -> Tensor:
        return F.hardsigmoid(x)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.hard(self.fc(x.mean((2, 3))))[..., None, None]


class ToRows(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Vision(nn.Module):
    """[N, 3, 8, 8] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 8, 3, padding=1), nn.AvgPool2d(3, 1, 1, count_include_pad=False)
        self.residual, self.post, self.gate = Residual(), PostResidual(), Gate()
        self.shuffle, self.narrow = nn.PixelShuffle(2), nn.Conv2d(2, 4, 3, stride=4, padding=1)
        self.up, self.rows, self.fc = nn.Upsample((6, 7), mode="bilinear"), ToRows(), nn.Linear(168, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.gate(self.post(self.residual(self.pool(self.stem(x)))))
        return self.fc(self.rows(self.up(self.narrow(self.shuffle(x)))))


vision = _task("vision", Vision, lambda: (torch.randn(10, 3, 8, 8), _classes(10, 5)))
