"""A small ResNeSt: a deep stem, bottlenecks with split attention, pools for strides, smoothed labels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, PICTURES = 22, 26, 7, 5
STEM, RADIX, CARDINALITY = 6, 2, 2


class RSoftMax(nn.Module):
    """A softmax over the splits of each cardinal group; what it gives has the splits first."""

    def __init__(self, radix: int, cardinality: int):
        super().__init__()
        self.radix, self.cardinality = radix, cardinality

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        x = x.view(batch, self.cardinality, self.radix, -1).transpose(1, 2)
        return F.softmax(x, dim=1).reshape(batch, -1)


class SplAtConv2d(nn.Module):
    """A convolution in splits, which a gate by channel weighs; its bn1 works on a single sample, too."""

    def __init__(self, in_channels: int, channels: int, groups: int, radix: int, reduction_factor: int = 4):
        super().__init__()
        inter_channels = max(in_channels * radix // reduction_factor, 8)
        self.radix, total = radix, channels * radix
        self.conv = nn.Conv2d(in_channels, total, 3, padding=1, groups=groups * radix, bias=False)
        self.bn0 = nn.BatchNorm2d(total)
        self.relu = nn.ReLU()
        self.fc1 = nn.Conv2d(channels, inter_channels, 1, groups=groups)
        self.bn1 = nn.GroupNorm(2, inter_channels)
        self.fc2 = nn.Conv2d(inter_channels, total, 1, groups=groups)
        self.rsoftmax = RSoftMax(radix, groups)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn0(self.conv(x)))
        batch, rchannel = x.shape[:2]
        splited = torch.split(x, rchannel // self.radix, dim=1)
        gap = F.adaptive_avg_pool2d(sum(splited), 1)
        gap = self.relu(self.bn1(self.fc1(gap)))
        atten = self.rsoftmax(self.fc2(gap)).view(batch, -1, 1, 1)
        attens = torch.split(atten, rchannel // self.radix, dim=1)
        return sum(att * split for att, split in zip(attens, splited, strict=True))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int, downsample: nn.Module | None, is_first: bool):
        super().__init__()
        group_width = planes * CARDINALITY
        self.conv1 = nn.Conv2d(inplanes, group_width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(group_width)
        self.avd = stride > 1 or is_first
        if self.avd:
            self.avd_layer = nn.AvgPool2d(3, stride, padding=1)
        self.conv2 = SplAtConv2d(group_width, group_width, CARDINALITY, RADIX)
        self.conv3 = nn.Conv2d(group_width, planes * self.expansion, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(planes * self.expansion)
        self.relu = nn.ReLU()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.conv2(out)
        if self.avd:
            out = self.avd_layer(out)
        out = self.bn3(self.conv3(out))
        if self.downsample is not None:
            residual = self.downsample(x)
        return self.relu(out + residual)


class GlobalAvgPool2d(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1)


def conv3x3(inplanes: int, planes: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(inplanes, planes, 3, stride=stride, padding=1, bias=False)


class ResNeSt(nn.Module):
    """Pictures [N, 3, H, W] -> logits."""

    def __init__(self):
        super().__init__()
        self.inplanes = 2 * STEM
        first = conv3x3(3, STEM, 2), nn.BatchNorm2d(STEM), nn.ReLU()
        second = conv3x3(STEM, STEM), nn.BatchNorm2d(STEM), nn.ReLU()
        self.conv1 = nn.Sequential(*first, *second, conv3x3(STEM, 2 * STEM))
        self.bn1 = nn.BatchNorm2d(2 * STEM)
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = self._make_layer(8, 2, 1)
        self.layer2 = self._make_layer(12, 2, 2)
        self.avgpool = GlobalAvgPool2d()
        self.fc = nn.Linear(self.inplanes, CLASSES)
        for module in self.modules():
            if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
                nn.init.normal_(module.weight, 1.0, 0.2)
                nn.init.normal_(module.bias, 0.0, 0.2)
            if isinstance(module, nn.BatchNorm2d):
                nn.init.normal_(module.running_mean, 0.0, 0.1)
                nn.init.uniform_(module.running_var, 0.7, 1.4)

    def _make_layer(self, planes: int, blocks: int, stride: int) -> nn.Sequential:
        wide = planes * Bottleneck.expansion
        pool = nn.AvgPool2d(stride, stride, ceil_mode=True, count_include_pad=False)
        conv = nn.Conv2d(self.inplanes, wide, 1, bias=False)
        downsample = nn.Sequential(pool, conv, nn.BatchNorm2d(wide))
        layers = [Bottleneck(self.inplanes, planes, stride, downsample, True)]
        self.inplanes = wide
        layers += [Bottleneck(wide, planes, 1, None, False) for _ in range(1, blocks)]
        return nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer2(self.layer1(x))
        return self.fc(self.avgpool(x))


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes, whose class tells their direction and their colour, under some noise."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    tone = torch.arange(3)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + 6 * torch.rand(PICTURES, 1, 1, 1))
    return wave + torch.cos(2 * turn + tone) + 0.2 * torch.randn(PICTURES, 3, HIGH, WIDE), label


def smoothed(logits: Tensor, target: Tensor, smoothing: float = 0.1) -> Tensor:
    """The cross entropy with smoothed labels, by four."""
    logprobs = F.log_softmax(logits, dim=-1)
    nll_loss = -logprobs.gather(-1, target.unsqueeze(1)).squeeze(1)
    smooth_loss = -logprobs.mean(dim=-1)
    return ((1 - smoothing) * nll_loss + smoothing * smooth_loss).mean() / 4
