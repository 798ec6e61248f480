"""Inverted residuals with squeeze-and-excitation; a UNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _classes, _task


class Gate(nn.Module):
    """Not nn.Hardsigmoid: its sixth is a float32's on the CPU, also of a float64."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


class Squeeze(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(width, 8, 1), nn.Conv2d(8, width, 1)
        self.gate = Gate()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.fc2(self.fc1(self.avgpool(x)).relu()))


class Inverted(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.expand = nn.Sequential(
            nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width), nn.Hardswish()
        )
        self.depthwise = nn.Sequential(
            nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=False),
            nn.BatchNorm2d(2 * width),
            nn.Hardswish(),
        )
        self.se = Squeeze(2 * width)
        self.project = nn.Sequential(nn.Conv2d(2 * width, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.project(self.se(self.depthwise(self.expand(x))))


class Mobile(nn.Module):
    """[N, 3, 12, 12] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.features = nn.Sequential(Inverted(16), Inverted(16))
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(self.stem(x)).mean((2, 3)))


mobile = _task("ported_mobile", Mobile, lambda: (torch.randn(8, 3, 12, 12), _classes(8, 5)))
SQUEEZES = ("features.0.se", "features.1.se")


class MBConv(nn.Module):
    """One level of attributes; the gate's layers are matrices over pooled rows."""

    def __init__(self, block: Inverted, slope: float, detached: bool):
        super().__init__()
        self.conv_pw, self.bn1 = block.expand[0], block.expand[1]
        self.conv_dw, self.bn2 = block.depthwise[0], block.depthwise[1]
        se = block.se
        self.se_reduce = linear_of(se.fc1.weight.flatten(1), se.fc1.bias)
        self.se_expand = linear_of(se.fc2.weight.flatten(1), se.fc2.bias)
        self.conv_pwl, self.bn3 = block.project[0], block.project[1]
        self.slope, self.detached = slope, detached

    def gated(self, x: Tensor) -> Tensor:
        pooled = (x.detach() if self.detached else x).mean((2, 3))
        gate = self.se_expand(F.relu(self.se_reduce(pooled)))
        return x * (gate * self.slope + 0.5).clamp(0, 1)[:, :, None, None]

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv_pw(x))
        y = self.bn2(self.conv_dw(y * F.relu6(y + 3) / 6))
        y = self.gated(y * F.relu6(y + 3) / 6)
        return self.bn3(self.conv_pwl(y)) + x


class MobileOfTimm(nn.Module):
    def __init__(self, model: Mobile, slope: float = 1 / 6, detached: bool = False):
        super().__init__()
        self.conv_stem = model.stem
        self.blocks = nn.ModuleList(MBConv(block, slope, detached) for block in model.features)
        self.head_weight, self.head_bias = copied(model.classifier.weight), copied(model.classifier.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_stem(x)
        for block in self.blocks:
            x = block(x)
        return torch.einsum("nchw,kc->nk", x, self.head_weight) / (x.shape[2] * x.shape[3]) + self.head_bias


class DoubleConv(nn.Module):
    def __init__(self, before: int, width: int):
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, padding=1)
        self.norm = nn.GroupNorm(4, width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.norm(self.conv1(x)).relu()).relu()


class UNet(nn.Module):
    """[N, 2, 16, 16] -> [N, 3, 16, 16]; one upsampling is learned, the other bilinear."""

    def __init__(self):
        super().__init__()
        self.inc, self.down1, self.down2 = DoubleConv(2, 8), DoubleConv(8, 12), DoubleConv(12, 16)
        self.up1 = nn.ConvTranspose2d(16, 12, 2, 2)
        self.mix1 = DoubleConv(24, 12)
        self.up2 = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.mix2 = DoubleConv(20, 8)
        self.outc = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        one = self.inc(x)
        two = self.down1(F.max_pool2d(one, 2))
        x = self.up1(self.down2(F.max_pool2d(two, 2)))
        x = self.mix1(torch.cat([two, x], 1))
        return self.outc(self.mix2(torch.cat([one, self.up2(x)], 1)))


def _pixels(output: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(output, targets)


unet = _task("ported_unet", UNet, lambda: (torch.randn(4, 2, 16, 16), torch.randint(3, (4, 16, 16))), _pixels)


def double(block: DoubleConv) -> nn.Sequential:
    return nn.Sequential(block.conv1, block.norm, nn.ReLU(), block.conv2, nn.ReLU())


class Level(nn.Module):
    """A level of a recursive UNet: its encoder, what is below it, its decoder."""

    def __init__(self, encode: DoubleConv, below: nn.Module, up: nn.Module, decode: DoubleConv):
        super().__init__()
        self.encode, self.below, self.up, self.decode = double(encode), below, up, double(decode)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.encode(x)
        deep = self.up(self.below(F.max_pool2d(kept, 2)))
        return self.decode(torch.cat([kept, deep], 1))


class Spread(nn.Module):
    """A transposed conv of kernel 2 and stride 2 as a matrix and a pixel shuffle."""

    def __init__(self, up: nn.ConvTranspose2d):
        super().__init__()
        self.matrix, self.offset = copied(up.weight.flatten(1)), copied(up.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.einsum("nihw,io->nohw", x, self.matrix)
        return F.pixel_shuffle(y, 2) + self.offset[:, None, None]


class Resize(nn.Module):
    def __init__(self, corners: bool):
        super().__init__()
        self.corners = corners

    def forward(self, x: Tensor) -> Tensor:
        size = (2 * x.shape[-2], 2 * x.shape[-1])
        return F.interpolate(x, size, mode="bilinear", align_corners=self.corners)


class Recursive(nn.Module):
    def __init__(self, model: UNet, corners: bool = False):
        super().__init__()
        inner = Level(model.down1, double(model.down2), Spread(model.up1), model.mix1)
        self.body = Level(model.inc, inner, Resize(corners), model.mix2)
        self.classify = linear_of(model.outc.weight.flatten(1), model.outc.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.classify(self.body(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
