"""A small MobileNetV3: inverted residuals with squeezes, hard activations and dilated kernels at the end."""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, HIDDEN, PICTURES, DILATION = 24, 36, 7, 40, 6, 2


def _make_divisible(v: float, divisor: int) -> int:
    """The nearest multiple of the divisor that is not more than a tenth below the value."""
    new_v = max(divisor, int(v + divisor / 2) // divisor * divisor)
    return new_v + divisor if new_v < 0.9 * v else new_v


class Conv2dNormActivation(nn.Sequential):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        groups: int = 1,
        dilation: int = 1,
        norm_layer: Callable = nn.BatchNorm2d,
        activation_layer: Callable | None = nn.ReLU,
    ):
        padding = (kernel_size - 1) // 2 * dilation
        sizes = in_channels, out_channels, kernel_size, stride, padding, dilation, groups
        layers = [nn.Conv2d(*sizes, bias=False), norm_layer(out_channels)]
        if activation_layer is not None:
            layers.append(activation_layer())
        super().__init__(*layers)


class Hardsigmoid(nn.Module):
    """As torch's own, whose slope in the backward pass is a sixth in single precision only."""

    def forward(self, x: Tensor) -> Tensor:
        return F.relu6(x + 3) / 6


class SqueezeExcitation(nn.Module):
    def __init__(self, input_channels: int, squeeze_channels: int):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation, self.scale_activation = nn.ReLU(), Hardsigmoid()

    def _scale(self, input: Tensor) -> Tensor:
        scale = self.avgpool(input)
        scale = self.fc1(scale)
        scale = self.activation(scale)
        scale = self.fc2(scale)
        return self.scale_activation(scale)

    def forward(self, input: Tensor) -> Tensor:
        return self._scale(input) * input


class InvertedResidualConfig:
    def __init__(
        self,
        input_channels: int,
        kernel: int,
        expanded_channels: int,
        out_channels: int,
        use_se: bool,
        activation: str,
        stride: int,
        dilation: int,
        width_mult: float,
    ):
        self.input_channels = self.adjust_channels(input_channels, width_mult)
        self.kernel = kernel
        self.expanded_channels = self.adjust_channels(expanded_channels, width_mult)
        self.out_channels = self.adjust_channels(out_channels, width_mult)
        self.use_se, self.use_hs = use_se, activation == "HS"
        self.stride, self.dilation = stride, dilation

    @staticmethod
    def adjust_channels(channels: int, width_mult: float) -> int:
        return _make_divisible(channels * width_mult, 8)


class InvertedResidual(nn.Module):
    def __init__(self, cnf: InvertedResidualConfig, norm_layer: Callable):
        super().__init__()
        self.use_res_connect = cnf.stride == 1 and cnf.input_channels == cnf.out_channels
        act = nn.Hardswish if cnf.use_hs else nn.ReLU
        layer, layers = partial(Conv2dNormActivation, norm_layer=norm_layer), []
        width, stride = cnf.expanded_channels, 1 if cnf.dilation > 1 else cnf.stride
        if width != cnf.input_channels:
            layers.append(layer(cnf.input_channels, width, 1, activation_layer=act))
        layers.append(layer(width, width, cnf.kernel, stride, width, cnf.dilation, activation_layer=act))
        if cnf.use_se:
            layers.append(SqueezeExcitation(width, _make_divisible(width // 4, 8)))
        layers.append(layer(width, cnf.out_channels, 1, activation_layer=None))
        self.block = nn.Sequential(*layers)

    def forward(self, input: Tensor) -> Tensor:
        result = self.block(input)
        if self.use_res_connect:
            result += input
        return result


class MobileNetV3(nn.Module):
    """[N, 3, H, W] -> [N, classes]."""

    def __init__(self):
        super().__init__()
        norm_layer = partial(nn.BatchNorm2d, eps=0.001, momentum=0.01)
        layer = partial(Conv2dNormActivation, norm_layer=norm_layer, activation_layer=nn.Hardswish)
        bneck_conf = partial(InvertedResidualConfig, width_mult=0.5)
        setting = [
            bneck_conf(16, 3, 16, 16, True, "RE", 2, 1),
            bneck_conf(16, 3, 60, 32, False, "RE", 1, 1),
            bneck_conf(32, 5, 96, 32, True, "HS", 1, 1),
            bneck_conf(32, 5, 112, 48, True, "HS", 2, DILATION),
            bneck_conf(48, 5, 144, 48, True, "HS", 1, DILATION),
        ]
        last = setting[-1].out_channels
        blocks = [InvertedResidual(cnf, norm_layer) for cnf in setting]
        first = layer(3, setting[0].input_channels, 3, 2)
        self.features = nn.Sequential(first, *blocks, layer(last, 6 * last, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Sequential(
            nn.Linear(6 * last, HIDDEN), nn.Hardswish(), nn.Dropout(0.0), nn.Linear(HIDDEN, CLASSES)
        )
        for m in self.modules():
            if isinstance(m, nn.BatchNorm2d):
                nn.init.normal_(m.weight, 1.0, 0.2), nn.init.normal_(m.bias, 0.0, 0.2)
                m.running_mean.normal_(0.0, 0.2), m.running_var.uniform_(0.5, 1.5)
            elif isinstance(m, nn.Conv2d | nn.Linear):
                nn.init.normal_(m.weight, std=1.2 / math.sqrt(m.weight[0].numel()))
                if m.bias is not None:
                    nn.init.normal_(m.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.avgpool(self.features(x))
        return self.classifier(torch.flatten(x, 1))


def gratings() -> tuple[Tensor, Tensor]:
    """Coloured gratings under a round window, whose class tells their direction."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None]
    down, across = torch.arange(HIGH)[:, None] - HIGH / 2, torch.arange(WIDE) - WIDE / 2
    phase, middle = 6 * torch.rand(PICTURES, 1, 1), 6 * torch.randn(PICTURES, 1, 1)
    wave = torch.sin(0.8 * (turn.cos() * across + turn.sin() * down) + phase)
    wave = wave * torch.exp(-((across - middle) ** 2 + down**2) / 150)
    colour = 0.5 + torch.rand(PICTURES, 3, 1, 1)
    return colour * wave[:, None] + 0.1 * torch.randn(PICTURES, 3, HIGH, WIDE), label


def half_entropy(logits: Tensor, label: Tensor) -> Tensor:
    return 0.5 * F.cross_entropy(logits, label)
