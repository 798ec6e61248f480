"""A small ResNet-D: a deep stem, grouped bottlenecks with squeezed gates, blurred and averaged strides."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 36, 52, 7, 3
STEM, PLANES, BLOCKS, CARDINALITY, BASE_WIDTH = (6, 8, 10), (4, 6, 8), (2, 2, 2), 3, 96


def make_divisible(v: float, divisor: int) -> int:
    return max(divisor, int(v + divisor / 2) // divisor * divisor)


class BlurPool2d(nn.Module):
    """Binomial smoothing of each channel before its pixels are left out."""

    def __init__(self, channels: int, filt_size: int = 3, stride: int = 2):
        super().__init__()
        self.channels, self.stride, self.padding = channels, stride, [(filt_size - 1) // 2] * 4
        row = torch.tensor([math.comb(filt_size - 1, k) for k in range(filt_size)]) / 2 ** (filt_size - 1)
        filt = (row[:, None] * row)[None, None].repeat(channels, 1, 1, 1)
        self.register_buffer("filt", filt, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, self.padding, mode="reflect")
        return F.conv2d(x, self.filt, stride=self.stride, groups=self.channels)


class SEModule(nn.Module):
    def __init__(self, channels: int, rd_ratio: float = 1 / 4, rd_divisor: int = 4):
        super().__init__()
        rd_channels = make_divisible(channels * rd_ratio, rd_divisor)
        self.fc1 = nn.Conv2d(channels, rd_channels, kernel_size=1)
        self.act = nn.ReLU()
        self.fc2 = nn.Conv2d(rd_channels, channels, kernel_size=1)
        self.gate = nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x_se = x.mean((2, 3), keepdim=True)
        x_se = self.fc2(self.act(self.fc1(x_se)))
        return x * self.gate(x_se)


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, inplanes: int, planes: int, stride: int = 1, downsample: nn.Module | None = None):
        super().__init__()
        width = int(math.floor(planes * (BASE_WIDTH / 64)) * CARDINALITY)
        outplanes = planes * self.expansion
        self.conv1 = nn.Conv2d(inplanes, width, kernel_size=1, bias=False)
        self.bn1, self.act1 = nn.BatchNorm2d(width), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, kernel_size=3, padding=1, groups=CARDINALITY, bias=False)
        self.bn2, self.act2 = nn.BatchNorm2d(width), nn.ReLU()
        self.aa = BlurPool2d(width, stride=stride) if stride == 2 else nn.Identity()
        self.conv3 = nn.Conv2d(width, outplanes, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(outplanes)
        self.se = SEModule(outplanes)
        self.act3 = nn.ReLU()
        self.downsample = downsample

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.aa(self.act2(self.bn2(self.conv2(x))))
        x = self.se(self.bn3(self.conv3(x)))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        return self.act3(x + shortcut)


def downsample_avg(in_channels: int, out_channels: int, stride: int) -> nn.Sequential:
    pool = nn.AvgPool2d(2, stride, ceil_mode=True, count_include_pad=False) if stride > 1 else nn.Identity()
    conv = nn.Conv2d(in_channels, out_channels, 1, bias=False)
    return nn.Sequential(pool, conv, nn.BatchNorm2d(out_channels))


class SelectAdaptivePool2d(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.flatten = nn.AdaptiveAvgPool2d(1), nn.Flatten(1)

    def forward(self, x: Tensor) -> Tensor:
        return self.flatten(self.pool(x))


class ResNet(nn.Module):
    """[N, 3, H, W] -> [N, 7]."""

    def __init__(self):
        super().__init__()
        one, two, inplanes = STEM
        self.conv1 = nn.Sequential(
            nn.Conv2d(CHANNELS, one, 3, stride=2, padding=1, bias=False),
            nn.BatchNorm2d(one),
            nn.ReLU(),
            nn.Conv2d(one, two, 3, stride=1, padding=1, bias=False),
            nn.BatchNorm2d(two),
            nn.ReLU(),
            nn.Conv2d(two, inplanes, 3, stride=1, padding=1, bias=False),
        )
        self.bn1, self.act1 = nn.BatchNorm2d(inplanes), nn.ReLU()
        self.maxpool = nn.Sequential(nn.MaxPool2d(3, stride=1, padding=1), BlurPool2d(inplanes, stride=2))
        for i, (planes, count) in enumerate(zip(PLANES, BLOCKS, strict=True)):
            blocks, stride, outplanes = [], 1 if i == 0 else 2, planes * Bottleneck.expansion
            for j in range(count):
                down = downsample_avg(inplanes, outplanes, stride) if j == 0 else None
                blocks.append(Bottleneck(inplanes, planes, stride if j == 0 else 1, down))
                inplanes = outplanes
            self.add_module(f"layer{i + 1}", nn.Sequential(*blocks))
        self.global_pool = SelectAdaptivePool2d()
        self.fc = nn.Linear(inplanes, CLASSES)
        self.apply(self.draw)

    @staticmethod
    def draw(module: nn.Module) -> None:
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=1.2 / math.sqrt(module.weight[0].numel()))
            if module.bias is not None:
                nn.init.normal_(module.bias, std=0.3)
        elif isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, std=0.2)
            nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.act1(self.bn1(self.conv1(x))))
        return self.layer3(self.layer2(self.layer1(x)))

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.global_pool(self.forward_features(x)))


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes under a spot of light, whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    middle = 12 * torch.rand(2, PICTURES, 1, 1, 1)
    spot = torch.exp(-((across - middle[0]) ** 2 + (down - middle[1]) ** 2) / 20)
    return wave + spot + 0.1 * torch.randn_like(wave), label


def smoothed(logits: Tensor, label: Tensor) -> Tensor:
    """A third of the cross entropy with a tenth of the label spread over all classes."""
    logprobs = F.log_softmax(logits, dim=-1)
    nll = -logprobs.gather(-1, label[:, None])[:, 0]
    return (0.9 * nll - 0.1 * logprobs.mean(-1)).mean() / 3
