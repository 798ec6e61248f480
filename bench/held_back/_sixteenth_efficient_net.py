"""A thin EfficientNet as TensorFlow trained it: 'same' padding, wide depthwise blocks, gated channels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

STEM, HEAD, CLASSES, SHAPE = 12, 32, 5, (20, 14)
# of each stage: the kind of its blocks, how many, kernel, stride of the first, expansion, width
STAGES = (("ds", 1, 3, 1, 1, 8), ("ir", 2, 3, 2, 4, 12), ("ir", 1, 5, 2, 4, 16))


def varied(module: nn.Module) -> None:
    """Start with weights and statistics that let every layer, gain and shift count."""
    if isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(module.running_mean, std=0.2)
        nn.init.uniform_(module.running_var, 0.6, 1.5)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.2)
        nn.init.normal_(module.bias, std=0.2)


class Conv2dSame(nn.Conv2d):
    """As many outputs as strides begin within the input; the odd zero comes after it."""

    def forward(self, x: Tensor) -> Tensor:
        edges = []
        for size, kernel, stride in zip(x.shape[2:], self.kernel_size, self.stride, strict=True):
            missing = max((math.ceil(size / stride) - 1) * stride + kernel - size, 0)
            edges = [missing // 2, missing - missing // 2, *edges]
        return F.conv2d(F.pad(x, edges), self.weight, self.bias, self.stride, 0, self.dilation, self.groups)


def create_conv2d(inputs: int, outputs: int, kernel: int, stride: int = 1, groups: int = 1) -> nn.Conv2d:
    """Fixed edges where they are alike for every size, else edges by the size of the input."""
    if stride == 1:
        return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)
    return Conv2dSame(inputs, outputs, kernel, stride, groups=groups, bias=False)


class BatchNormAct2d(nn.BatchNorm2d):
    """The norm, with TensorFlow's settings, and what bends its output."""

    def __init__(self, channels: int, apply_act: bool = True):
        super().__init__(channels, eps=1e-3, momentum=0.01)
        self.act = nn.SiLU() if apply_act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(super().forward(x))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int, reduced: int):
        super().__init__()
        self.conv_reduce, self.act1 = nn.Conv2d(channels, reduced, 1), nn.SiLU()
        self.conv_expand, self.gate = nn.Conv2d(reduced, channels, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        squeezed = x.mean((2, 3), keepdim=True)
        return x * self.gate(self.conv_expand(self.act1(self.conv_reduce(squeezed))))


class DepthwiseSeparableConv(nn.Module):
    """Each channel filtered, gated, then mixed; nothing bends the mixture."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, ratio: int):
        super().__init__()
        self.has_skip = stride == 1 and inputs == outputs
        self.conv_dw = create_conv2d(inputs, inputs, kernel, stride, inputs)
        self.bn1 = BatchNormAct2d(inputs)
        self.se = SqueezeExcite(inputs, round(inputs / 4))
        self.conv_pw = create_conv2d(inputs, outputs, 1)
        self.bn2 = BatchNormAct2d(outputs, apply_act=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.se(self.bn1(self.conv_dw(x)))
        y = self.bn2(self.conv_pw(y))
        return y + x if self.has_skip else y


class InvertedResidual(nn.Module):
    """Widen, filter each channel, gate, narrow; the gate is as thin as the block's input asks for."""

    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, ratio: int):
        super().__init__()
        self.has_skip, wide = stride == 1 and inputs == outputs, ratio * inputs
        self.conv_pw = create_conv2d(inputs, wide, 1)
        self.bn1 = BatchNormAct2d(wide)
        self.conv_dw = create_conv2d(wide, wide, kernel, stride, wide)
        self.bn2 = BatchNormAct2d(wide)
        self.se = SqueezeExcite(wide, round(inputs / 4))
        self.conv_pwl = create_conv2d(wide, outputs, 1)
        self.bn3 = BatchNormAct2d(outputs, apply_act=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv_pw(x))
        y = self.se(self.bn2(self.conv_dw(y)))
        y = self.bn3(self.conv_pwl(y))
        return y + x if self.has_skip else y


class EfficientNet(nn.Module):
    """Images [N, 3, H, W] -> scores of the classes, and the map that each stage ends with."""

    def __init__(self):
        super().__init__()
        self.conv_stem, self.bn1 = create_conv2d(3, STEM, 3, 2), BatchNormAct2d(STEM)
        stages, width = [], STEM
        for kind, count, kernel, stride, ratio, outputs in STAGES:
            block, blocks = DepthwiseSeparableConv if kind == "ds" else InvertedResidual, []
            for i in range(count):
                blocks.append(block(width, outputs, kernel, 1 if i else stride, ratio))
                width = outputs
            stages.append(nn.Sequential(*blocks))
        self.blocks = nn.Sequential(*stages)
        self.conv_head, self.bn2 = create_conv2d(width, HEAD, 1), BatchNormAct2d(HEAD)
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.classifier = nn.Linear(HEAD, CLASSES)
        self.apply(varied)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x = self.bn1(self.conv_stem(x))
        features = []
        for stage in self.blocks:
            x = stage(x)
            features.append(x)
        x = self.bn2(self.conv_head(x))
        return self.classifier(self.global_pool(x)), features


def images() -> tuple[Tensor, Tensor]:
    """Waves whose direction and colour tell the class, under noise."""
    labels = torch.randint(CLASSES, (4,))
    rows, columns = torch.meshgrid(*(torch.linspace(0, 3, size) for size in SHAPE), indexing="ij")
    angle = labels[:, None, None] * math.pi / CLASSES
    wave = torch.sin(2 * (rows * angle.cos() + columns * angle.sin()) + torch.rand(4, 1, 1))
    colour = torch.stack([torch.ones(4), labels / 2 - 1, 1 - labels / 4], 1)
    return colour[:, :, None, None] * wave[:, None] + 0.4 * torch.randn(4, 3, *SHAPE), labels


def classified(outputs: tuple[Tensor, list[Tensor]], labels: Tensor) -> Tensor:
    """Smoothed cross entropy, and a small price for the energy of each stage's map."""
    scores, features = outputs
    energy = sum(x.square().mean() for x in features)
    return 0.5 * F.cross_entropy(scores, labels, label_smoothing=0.1) + 0.02 * energy
