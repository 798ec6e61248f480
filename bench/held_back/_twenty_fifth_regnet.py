"""A small RegNetY: a stem, four stages of grouped bottlenecks with squeeze-excitation, a head."""

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 26, 34, 7, 10
STEM_WIDTH, GROUP_WIDTH, SE_RATIO = 8, 4, 0.25
DEPTHS, WIDTHS, STRIDES = (1, 2, 2, 1), (12, 20, 32, 44), (2, 2, 2, 2)


class Conv2dNormActivation(nn.Sequential):
    """A convolution without bias that keeps the size or divides it by the stride, a norm, an activation."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int = 3,
        stride: int = 1,
        groups: int = 1,
        activation_layer: Callable[..., nn.Module] | None = nn.ReLU,
    ):
        padding = (kernel_size - 1) // 2
        layers = [
            nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding, groups=groups, bias=False),
            nn.BatchNorm2d(out_channels, eps=1e-5, momentum=0.1),
        ]
        if activation_layer is not None:
            layers.append(activation_layer(inplace=True))
        super().__init__(*layers)


class SqueezeExcitation(nn.Module):
    def __init__(self, input_channels: int, squeeze_channels: int, activation: Callable[..., nn.Module]):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation = activation()
        self.scale_activation = nn.Sigmoid()

    def _scale(self, input: Tensor) -> Tensor:
        scale = self.avgpool(input)
        scale = self.fc1(scale)
        scale = self.activation(scale)
        scale = self.fc2(scale)
        return self.scale_activation(scale)

    def forward(self, input: Tensor) -> Tensor:
        return self._scale(input) * input


class SimpleStemIN(Conv2dNormActivation):
    """The simple stem for ImageNet: 3x3, BN, ReLU."""

    def __init__(self, width_in: int, width_out: int):
        super().__init__(width_in, width_out, kernel_size=3, stride=2)


class BottleneckTransform(nn.Sequential):
    """1x1, 3x3 in groups, squeeze-excitation, 1x1; the squeeze is a ratio of the block's input width."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        stride: int,
        group_width: int,
        bottleneck_multiplier: float,
        se_ratio: float,
    ):
        super().__init__()
        w_b = round(width_out * bottleneck_multiplier)
        g = w_b // group_width
        self.a = Conv2dNormActivation(width_in, w_b, kernel_size=1)
        self.b = Conv2dNormActivation(w_b, w_b, kernel_size=3, stride=stride, groups=g)
        self.se = SqueezeExcitation(w_b, round(se_ratio * width_in), activation=nn.ReLU)
        self.c = Conv2dNormActivation(w_b, width_out, kernel_size=1, activation_layer=None)


class ResBottleneckBlock(nn.Module):
    """Residual bottleneck block: x + F(x), F = bottleneck transform."""

    def __init__(
        self,
        width_in: int,
        width_out: int,
        stride: int,
        group_width: int,
        bottleneck_multiplier: float,
        se_ratio: float,
    ):
        super().__init__()
        self.proj = None
        if width_in != width_out or stride != 1:
            self.proj = Conv2dNormActivation(width_in, width_out, 1, stride, activation_layer=None)
        self.f = BottleneckTransform(
            width_in, width_out, stride, group_width, bottleneck_multiplier, se_ratio
        )
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x) + self.f(x) if self.proj is not None else x + self.f(x)
        return self.activation(x)


class AnyStage(nn.Sequential):
    """Blocks of one width, of which the first has the stride."""

    def __init__(self, width_in: int, width_out: int, stride: int, depth: int, stage_index: int):
        super().__init__()
        for i in range(depth):
            block = ResBottleneckBlock(
                width_in if i == 0 else width_out,
                width_out,
                stride if i == 0 else 1,
                GROUP_WIDTH,
                bottleneck_multiplier=1.0,
                se_ratio=SE_RATIO,
            )
            self.add_module(f"block{stage_index}-{i}", block)


class RegNet(nn.Module):
    """[N, 3, H, W] -> [N, classes]."""

    def __init__(self):
        super().__init__()
        self.stem = SimpleStemIN(CHANNELS, STEM_WIDTH)
        self.trunk_output, current_width = nn.Sequential(), STEM_WIDTH
        for i, (width_out, stride, depth) in enumerate(zip(WIDTHS, STRIDES, DEPTHS, strict=True), 1):
            stage = AnyStage(current_width, width_out, stride, depth, stage_index=i)
            self.trunk_output.add_module(f"block{i}", stage)
            current_width = width_out
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(current_width, CLASSES)
        self.apply(drawn)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.trunk_output(x)
        x = self.avgpool(x)
        x = x.flatten(start_dim=1)
        return self.fc(x)


def drawn(module: nn.Module) -> None:
    """Draw all that the module itself holds, what its norm keeps of earlier batches too."""
    if isinstance(module, nn.Conv2d) and module.bias is not None:
        nn.init.normal_(module.weight, std=1.5 / math.sqrt(module.in_channels))
        nn.init.normal_(module.bias, 0.3, 0.3)
    elif isinstance(module, nn.Conv2d):
        fan_out = module.kernel_size[0] * module.kernel_size[1] * module.out_channels // module.groups
        nn.init.normal_(module.weight, std=math.sqrt(2.0 / fan_out))
    elif isinstance(module, nn.BatchNorm2d):
        nn.init.normal_(module.weight, 0.7, 0.15), nn.init.normal_(module.bias, 0.3, 0.2)
        nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)
    elif isinstance(module, nn.Linear):
        nn.init.normal_(module.weight, std=0.08), nn.init.normal_(module.bias, std=0.1)


def gratings() -> tuple[Tensor, Tensor]:
    """Gratings with a bright spot: the class tells their direction, their colour and the spot's height."""
    label = torch.randint(CLASSES, (PICTURES,))
    part = (label / CLASSES)[:, None, None, None]
    down, across = torch.arange(HIGH)[:, None] / HIGH, torch.arange(WIDE) / WIDE
    phase, place = 6 * torch.rand(PICTURES, 1, 1, 1), torch.rand(PICTURES, 1, 1, 1)
    turn, tone = math.pi * part, 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(20 * (turn.cos() * across + turn.sin() * down) + phase) + torch.cos(2 * turn + tone)
    spot = torch.exp(-40 * ((down - 0.1 - 0.8 * part).square() + (across - place).square()))
    return 0.7 * wave + 1.5 * spot + 0.4 * torch.randn_like(wave), label
