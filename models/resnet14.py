"""ResNet14 for 32x32 images: the CIFAR network of 6n + 2 layers with n = 2, its shortcuts without convs."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class PaddedShortcut(nn.Module):
    """[N, C, H, W] -> [N, 2 C, H / 2, W / 2]: every second pixel, normalised; the new channels are zero."""

    def __init__(self, channels: int):
        super().__init__()
        self.bn = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        kept = self.bn(x[:, :, ::2, ::2])
        return torch.cat([kept, torch.zeros_like(kept)], dim=1)


class PlainBlock(nn.Module):
    """Two 3x3 convs around a shortcut: [N, inputs, H, W] -> [N, outputs, H / stride, W / stride].

    Where the scale of ``bn2`` starts at 0, the block starts as its shortcut.
    """

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.act1 = nn.ReLU()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else PaddedShortcut(inputs)
        self.act2 = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        residual = self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x)))))
        return self.act2(residual + self.shortcut(x))


class ResNet14(nn.Module):
    """ResNet14: images [N, 3, H, W] -> logits [N, classes].

    He et al., "Deep residual learning" (CVPR 2016), section 4.2, with n = 2, as Summers and Dinneen,
    "Nondeterminism and instability in neural network optimization" (ICML 2021), train it: a BatchNorm in the
    two shortcuts that halve the image, and the last scale of every block 0 at first (Goyal et al.,
    "Accurate, large minibatch SGD", 2017). Convs start as ``kaiming_normal_`` of their fan-out, the linear
    layer as torch's default. 172,602 parameters at width 16 with 10 classes.

    With these scales 0, the channels that a shortcut adds are 0 in front of a ReLU, whose derivative torch
    takes as 0 there: no gradient ever reaches them, and they stay 0 through training. Between the blocks
    ``width`` channels are alive in every stage, and a weight that reads one of the others does nothing.

    Args:
        width: channels of the stem and the first stage; the stages have width x (1, 2, 4).
        classes: length of the logits.
        zero_scale: whether the last scale of every block starts at 0, or at 1 as every other.

    Raises:
        ValueError: for a size below one.
    """

    def __init__(self, width: int = 16, classes: int = 10, zero_scale: bool = True):
        super().__init__()
        if min(width, classes) < 1:
            raise ValueError(f"ResNet14: width={width}, classes={classes} must both be 1 or more")
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act1 = nn.ReLU()
        self.layer1 = nn.Sequential(PlainBlock(width, width), PlainBlock(width, width))
        self.layer2 = nn.Sequential(PlainBlock(width, 2 * width), PlainBlock(2 * width, 2 * width))
        self.layer3 = nn.Sequential(PlainBlock(2 * width, 4 * width), PlainBlock(4 * width, 4 * width))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        self._start(zero_scale)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act1(self.bn1(self.conv1(x)))
        return self.fc(self.avgpool(self.layer3(self.layer2(self.layer1(x)))).flatten(1))

    def _start(self, zero_scale: bool) -> None:
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, PlainBlock) and zero_scale:
                nn.init.zeros_(module.bn2.weight)
