"""Two networks that label pixels: a U with skip connections, and a pyramid of dilated convolutions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import parts
from bench.tasks import _task


class Twice(nn.Module):
    """Two convolutions, each with an instance norm and a leaky ReLU."""

    def __init__(self, before: int, after: int):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, after, 3, padding=1), nn.InstanceNorm2d(after, affine=True)
        self.act1 = nn.LeakyReLU(0.01)
        self.conv2, self.norm2 = nn.Conv2d(after, after, 3, padding=1), nn.InstanceNorm2d(after, affine=True)
        self.act2 = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        return self.act2(self.norm2(self.conv2(self.act1(self.norm1(self.conv1(x))))))


class Up(nn.Module):
    def __init__(self, before: int, after: int):
        super().__init__()
        self.up = nn.ConvTranspose2d(before, after, 2, 2)
        self.twice = Twice(2 * after, after)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.twice(torch.cat([skip, self.up(x)], 1))


class UNet(nn.Module):
    """[N, 1, 16, 16] -> logits of three classes, at the full and at half the size."""

    def __init__(self):
        super().__init__()
        self.downs = nn.ModuleList([Twice(1, 6), Twice(6, 10)])
        self.pool = nn.MaxPool2d(2)
        self.bottom = Twice(10, 14)
        self.ups = nn.ModuleList([Up(14, 10), Up(10, 6)])
        self.coarse, self.fine = nn.Conv2d(10, 3, 1), nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        skips = []
        for down in self.downs:
            skips.append(down(x))
            x = self.pool(skips[-1])
        small = self.ups[0](self.bottom(x), skips[1])
        return self.fine(self.ups[1](small, skips[0])), self.coarse(small)


def _deep(outputs: tuple | dict, targets: Tensor) -> Tensor:
    full, half = sorted(parts(outputs), key=lambda logits: -logits.shape[-1])
    return F.cross_entropy(full, targets) + 0.5 * F.cross_entropy(half, targets[:, ::2, ::2])


def _scene(size: int, channels: int, count: int, classes: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(count, channels, size, size)
    smooth = F.avg_pool2d(x, 3, 1, 1).sum(1) + 0.2 * torch.randn(count, size, size)
    return x, (smooth.argsort(1).argsort(1) * classes) // size


unet = _task("fifth_unet", UNet, lambda: _scene(16, 1, 4, 3), _deep)


def unit(before: int, after: int, size: int = 3, stride: int = 1, rate: int = 1) -> nn.Sequential:
    edge = rate * (size // 2)
    conv = nn.Conv2d(before, after, size, stride, edge, dilation=rate, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(after), nn.ReLU())


class Pyramid(nn.Module):
    """Branches of several dilations and one of the whole map's mean, joined by a pointwise unit."""

    def __init__(self):
        super().__init__()
        self.branches = nn.ModuleList([unit(16, 8, 1), unit(16, 8, rate=2), unit(16, 8, rate=3)])
        self.pooled = unit(16, 8, 1)
        self.project = unit(32, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        maps = [branch(x) for branch in self.branches]
        mean = self.pooled(x.mean((2, 3), keepdim=True)).expand_as(maps[0])
        return self.project(torch.cat([*maps, mean], 1))


class Atrous(nn.Module):
    """[N, 3, 14, 14] -> logits of four classes."""

    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(unit(3, 12, stride=2), unit(12, 16), unit(16, 16, rate=2))
        self.pyramid = Pyramid()
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        logits = self.head(self.pyramid(self.backbone(x)))
        return F.interpolate(logits, size=x.shape[2:], mode="bilinear", align_corners=False)


atrous = _task("fifth_atrous", Atrous, lambda: _scene(14, 3, 8, 4))
