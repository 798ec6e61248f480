"""Networks on images for the held-out faults: pre-activation, squeeze-excitation, a U-Net and others."""

from __future__ import annotations

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PreActBlock(nn.Module):
    """Norm and ReLU before each conv; the branch is multiplied by a learnt gain."""

    def __init__(self, inputs: int, outputs: int, stride: int, gain: float):
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride, bias=False) if stride > 1 else None
        self.gain = nn.Parameter(torch.full((), gain))

    def forward(self, x: Tensor) -> Tensor:
        active = F.relu(self.norm1(x))
        branch = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return (x if self.shortcut is None else self.shortcut(active)) + self.gain * branch


class PreActNet(nn.Module):
    """[N, 3, 12, 12] -> [N, 5]."""

    def __init__(self, gain: float = 1.0):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        shapes = [(8, 8, 1), (8, 16, 2), (16, 16, 1)]
        self.stages = nn.ModuleList(PreActBlock(*shape, gain) for shape in shapes)
        self.norm = nn.BatchNorm2d(16)
        self.fc = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return self.fc(F.relu(self.norm(x)).mean((2, 3)))


class SqueezeExcite(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.reduce = nn.Conv2d(width, width // 4, 1)
        self.act = nn.ReLU()
        self.expand = nn.Conv2d(width // 4, width, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(self.expand(self.act(self.reduce(x.mean((2, 3), keepdim=True)))))


class DropPath(nn.Module):
    """A branch left out for some samples (stochastic depth)."""

    def __init__(self, p: float):
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.p:
            return x
        keep = torch.rand(x.shape[0], 1, 1, 1, device=x.device) >= self.p
        return x * keep / (1 - self.p)


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int, drop: float):
        super().__init__()
        self.expand = nn.Conv2d(inputs, 2 * inputs, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(2 * inputs)
        self.act1 = nn.Hardswish()
        self.depthwise = nn.Conv2d(2 * inputs, 2 * inputs, 3, stride, 1, groups=2 * inputs, bias=False)
        self.norm2 = nn.BatchNorm2d(2 * inputs)
        self.act2 = nn.Hardswish()
        self.se = SqueezeExcite(2 * inputs)
        self.project = nn.Conv2d(2 * inputs, outputs, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(outputs)
        self.drop_path = DropPath(drop)
        self.residual = stride == 1 and inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.norm1(self.expand(x)))
        y = self.se(self.act2(self.norm2(self.depthwise(y))))
        y = self.norm3(self.project(y))
        return x + self.drop_path(y) if self.residual else y


class MobileNet(nn.Module):
    """[N, 3, 12, 12] -> [N, 6]."""

    def __init__(self, drop: float = 0.0):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, 1, 1)
        shapes = [(8, 8, 1), (8, 12, 2), (12, 12, 1)]
        self.blocks = nn.Sequential(*(InvertedResidual(*shape, drop) for shape in shapes))
        self.fc = nn.Linear(12, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.blocks(self.stem(x)).mean((2, 3)))


def conv_norm_act(inputs: int, outputs: int) -> nn.Sequential:
    """A stage of the U-Net."""
    conv = nn.Conv2d(inputs, outputs, 3, padding=1)
    return nn.Sequential(OrderedDict(conv=conv, norm=nn.BatchNorm2d(outputs), act=nn.ReLU()))


class UNet(nn.Module):
    """[N, 2, 12, 12] -> logits of each pixel, [N, 3, 12, 12]."""

    def __init__(self):
        super().__init__()
        self.enc1 = conv_norm_act(2, 6)
        self.pool1 = nn.MaxPool2d(2)
        self.enc2 = conv_norm_act(6, 10)
        self.pool2 = nn.MaxPool2d(2)
        self.middle = conv_norm_act(10, 10)
        self.up2 = nn.ConvTranspose2d(10, 8, 2, stride=2)
        self.dec2 = conv_norm_act(18, 8)
        self.up1 = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.dec1 = conv_norm_act(12, 6)
        self.head = nn.Conv2d(6, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        fine = self.enc1(x)
        coarse = self.enc2(self.pool1(fine))
        x = self.up2(self.middle(self.pool2(coarse)))
        x = self.up1(self.dec2(torch.cat([x, coarse], 1)))
        return self.head(self.dec1(torch.cat([x, fine], 1)))


class VGG(nn.Module):
    """[N, 2, 8, 8] -> [N, 4]; three dropout layers, the first of whole channels."""

    def __init__(self, p: float = 0.2):
        super().__init__()
        self.conv1, self.act1 = nn.Conv2d(2, 8, 3, padding=1), nn.ReLU()
        self.conv2, self.act2 = nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()
        self.pool1, self.drop1 = nn.MaxPool2d(2), nn.Dropout2d(p)
        self.conv3, self.act3 = nn.Conv2d(8, 12, 3, padding=1), nn.ReLU()
        self.pool2, self.drop2 = nn.MaxPool2d(2), nn.Dropout(p)
        self.fc1, self.act4, self.drop3 = nn.Linear(48, 20), nn.ReLU(), nn.Dropout(p)
        self.fc2 = nn.Linear(20, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.pool1(self.act2(self.conv2(self.act1(self.conv1(x))))))
        x = self.drop2(self.pool2(self.act3(self.conv3(x))).flatten(1))
        return self.fc2(self.drop3(self.act4(self.fc1(x))))


class Backbone(nn.Module):
    """Two convs with running statistics of a former training."""

    def __init__(self):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12)
        for norm in (self.norm1, self.norm2):
            norm.running_mean.normal_(0, 0.1)
            norm.running_var.uniform_(0.3, 0.6)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))).mean((2, 3))


class Frozen(nn.Module):
    """[N, 3, 12, 12] -> [N, 4]: the backbone is frozen and stays in evaluation mode; the head learns."""

    def __init__(self):
        super().__init__()
        self.backbone = Backbone().requires_grad_(False)
        self.fc1, self.act, self.fc2 = nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 4)
        self.train()

    def train(self, mode: bool = True) -> Frozen:
        super().train(mode)
        self.backbone.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(self.backbone(x))))
