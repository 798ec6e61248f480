"""A small GhostNet, three ghost bottlenecks, with a unit of ShuffleNetV2 at its end."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 12, 20, 7, 6
STEM, LAST, HEAD = 20, 44, 60
# kernel, middle channels, channels out, share of squeeze-and-excitation, stride
BLOCKS = ((3, 30, 20, 0, 1), (5, 50, 33, 0.25, 2), (3, 70, 33, 0.25, 1))


def _make_divisible(v: float, divisor: int) -> int:
    new_v = max(divisor, int(v + divisor / 2) // divisor * divisor)
    return new_v + divisor if new_v < 0.9 * v else new_v


def hard_sigmoid(x: Tensor) -> Tensor:
    return F.relu6(x + 3.0) / 6.0


class SqueezeExcite(nn.Module):
    def __init__(self, in_chs: int, se_ratio: float, divisor: int = 4):
        super().__init__()
        reduced_chs = _make_divisible(in_chs * se_ratio, divisor)
        self.avg_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_reduce = nn.Conv2d(in_chs, reduced_chs, 1)
        self.act1 = nn.ReLU()
        self.conv_expand = nn.Conv2d(reduced_chs, in_chs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x_se = self.avg_pool(x)
        x_se = self.conv_expand(self.act1(self.conv_reduce(x_se)))
        return x * hard_sigmoid(x_se)


class ConvBnAct(nn.Module):
    def __init__(self, in_chs: int, out_chs: int):
        super().__init__()
        self.conv = nn.Conv2d(in_chs, out_chs, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(out_chs), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act1(self.bn1(self.conv(x)))


def depthwise(channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, channels, kernel_size, stride, kernel_size // 2, groups=channels, bias=False)


class GhostModule(nn.Module):
    """Half the channels by a convolution, the rest from those by a cheap one."""

    def __init__(self, inp: int, oup: int, relu: bool = True):
        super().__init__()
        self.oup, init = oup, math.ceil(oup / 2)
        self.primary_conv = nn.Sequential(
            nn.Conv2d(inp, init, 1, bias=False),
            nn.BatchNorm2d(init),
            nn.ReLU() if relu else nn.Sequential(),
        )
        self.cheap_operation = nn.Sequential(
            depthwise(init, 3), nn.BatchNorm2d(init), nn.ReLU() if relu else nn.Sequential()
        )

    def forward(self, x: Tensor) -> Tensor:
        x1 = self.primary_conv(x)
        x2 = self.cheap_operation(x1)
        return torch.cat([x1, x2], dim=1)[:, : self.oup]


class GhostBottleneck(nn.Module):
    def __init__(self, in_chs: int, kernel: int, mid_chs: int, out_chs: int, se_ratio: float, stride: int):
        super().__init__()
        self.stride = stride
        self.ghost1 = GhostModule(in_chs, mid_chs)
        if stride > 1:
            self.conv_dw, self.bn_dw = depthwise(mid_chs, kernel, stride), nn.BatchNorm2d(mid_chs)
        self.se = SqueezeExcite(mid_chs, se_ratio) if se_ratio else None
        self.ghost2 = GhostModule(mid_chs, out_chs, relu=False)
        self.shortcut = nn.Sequential()
        if in_chs != out_chs or stride > 1:
            self.shortcut = nn.Sequential(
                depthwise(in_chs, kernel, stride),
                nn.BatchNorm2d(in_chs),
                nn.Conv2d(in_chs, out_chs, 1, bias=False),
                nn.BatchNorm2d(out_chs),
            )

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.ghost1(x)
        if self.stride > 1:
            x = self.bn_dw(self.conv_dw(x))
        if self.se is not None:
            x = self.se(x)
        return self.ghost2(x) + self.shortcut(residual)


class ShuffleUnit(nn.Module):
    """Half the channels through a branch; then those of both halves by turns."""

    def __init__(self, channels: int):
        super().__init__()
        half = channels // 2
        first, last = nn.Conv2d(half, half, 1, bias=False), nn.Conv2d(half, half, 1, bias=False)
        norms = [nn.BatchNorm2d(half) for _ in range(3)]
        middle = depthwise(half, 3)
        self.branch2 = nn.Sequential(first, norms[0], nn.ReLU(), middle, norms[1], last, norms[2], nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        out = torch.cat((x1, self.branch2(x2)), dim=1)
        n, c, h, w = out.shape
        return out.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)


class GhostNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_stem = nn.Conv2d(CHANNELS, STEM, 3, 2, 1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(STEM), nn.ReLU()
        stages, width = [], STEM
        for kernel, middle, out, ratio, stride in BLOCKS:
            stages.append(nn.Sequential(GhostBottleneck(width, kernel, middle, out, ratio, stride)))
            width = out
        stages.append(nn.Sequential(ConvBnAct(width, LAST), ShuffleUnit(LAST)))
        self.blocks = nn.Sequential(*stages)
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.conv_head, self.act2 = nn.Conv2d(LAST, HEAD, 1), nn.ReLU()
        self.classifier = nn.Linear(HEAD, CLASSES)
        self.apply(draw)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv_stem(x)))
        x = self.global_pool(self.blocks(x))
        x = self.act2(self.conv_head(x))
        return self.classifier(x.flatten(1))


def draw(module: nn.Module) -> None:
    if isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, 0.1, 0.2)
        nn.init.normal_(module.running_mean, 0.0, 0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)
    elif isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.normal_(module.weight, std=1.2 / math.sqrt(module.weight[0].numel()))
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    return wave + 0.2 * torch.randn_like(wave), label


def third_of_cross_entropy(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label) / 3
