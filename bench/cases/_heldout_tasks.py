"""Networks that classify images: pre-activation ResNet, ConvNeXt, MobileNet and VGG, a few layers each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import _classes, _task


class PreActBlock(nn.Module):
    """Norm, activation, conv, twice over; where the shape changes, the shortcut is a 1x1 conv."""

    def __init__(self, inputs: int, outputs: int, stride: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.GroupNorm(4, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = None if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        skip = x if self.shortcut is None else self.shortcut(active)
        return skip + self.conv2(F.relu(self.norm2(self.conv1(active))))


class PreActNet(nn.Module):
    """[N, 3, 12, 12] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.block1 = PreActBlock(8, 8, 1)
        self.block2 = PreActBlock(8, 16, 2)
        self.norm = nn.GroupNorm(4, 16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(self.stem(x)))
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


class ConvNextBlock(nn.Module):
    """Depthwise conv, then LayerNorm and two linear layers with the channels last; the branch is scaled."""

    def __init__(self, width: int):
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 5, padding=2, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up = nn.Linear(width, 2 * width)
        self.act = nn.GELU()
        self.down = nn.Linear(2 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.gamma * self.down(self.act(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


class ConvNext(nn.Module):
    """[N, 3, 16, 16] -> [N, 5]: patches of 2x2, two blocks, the mean, a norm and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 2, stride=2)
        self.blocks = nn.Sequential(ConvNextBlock(12), ConvNextBlock(12))
        self.norm = nn.LayerNorm(12)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.stem(x)).mean((2, 3))))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.reduce = nn.Conv2d(width, width // 4, 1)
        self.expand = nn.Conv2d(width // 4, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        weights = F.adaptive_avg_pool2d(x, 1)
        return x * F.hardsigmoid(self.expand(F.relu(self.reduce(weights))))


class InvertedResidual(nn.Module):
    """Expand, filter by channel, weigh the channels, project; added to the input where shapes allow."""

    def __init__(self, inputs: int, hidden: int, outputs: int, stride: int, act: type[nn.Module]):
        super().__init__()
        self.expand = nn.Conv2d(inputs, hidden, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(hidden)
        self.act1 = act()
        self.depthwise = nn.Conv2d(hidden, hidden, 3, stride, 1, groups=hidden, bias=False)
        self.bn2 = nn.BatchNorm2d(hidden)
        self.act2 = act()
        self.excite = SqueezeExcite(hidden)
        self.project = nn.Conv2d(hidden, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(self.expand(x)))
        y = self.excite(self.act2(self.bn2(self.depthwise(y))))
        y = self.bn3(self.project(y))
        return x + y if self.residual else y


class MobileNet(nn.Module):
    """[N, 3, 16, 16] -> [N, 5]: ReLU6 in the first block, Hardswish in the second."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.act = nn.Hardswish()
        self.block1 = InvertedResidual(8, 16, 8, 1, nn.ReLU6)
        self.block2 = InvertedResidual(8, 24, 12, 2, nn.Hardswish)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block2(self.block1(self.act(self.bn(self.stem(x)))))
        return self.fc(x.mean((2, 3)))


class VGG(nn.Module):
    """[N, 3, 16, 16] -> [N, 5]: max-pooling, dropout of whole channels and of hidden units."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
            nn.Dropout2d(0.1),
            nn.Conv2d(8, 12, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(12 * 4 * 4, 32), nn.ReLU(inplace=True), nn.Dropout(0.3), nn.Linear(32, 5)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.features(x).flatten(1))


preact = _task("preact", PreActNet, lambda: (torch.randn(10, 3, 12, 12), _classes(10, 5)))
convnext = _task("convnext", ConvNext, lambda: (torch.randn(10, 3, 16, 16), _classes(10, 5)))
mobile = _task("mobile", MobileNet, lambda: (torch.randn(12, 3, 16, 16), _classes(12, 5)))
vgg = _task("vgg", VGG, lambda: (torch.randn(12, 3, 16, 16), _classes(12, 5)))
