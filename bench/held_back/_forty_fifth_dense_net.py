"""A small DenseNet-BC: three dense blocks, of which the second ends in squeeze and excitation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, HIGH, WIDE, CLASSES, PICTURES = 3, 40, 52, 7, 5
GROWTH, BLOCKS, FIRST, BN_SIZE, SQUEEZE = 6, (3, 2, 3), 10, 3, 5


def batch_norm(num_features: int) -> nn.BatchNorm2d:
    norm = nn.BatchNorm2d(num_features)
    nn.init.uniform_(norm.weight, 0.6, 1.4), nn.init.normal_(norm.bias, std=0.2)
    nn.init.normal_(norm.running_mean, std=0.1), nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return norm


def conv(ins: int, outs: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    layer = nn.Conv2d(ins, outs, kernel_size, stride, kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight)
    return layer


class _DenseLayer(nn.Module):
    def __init__(self, num_input_features: int):
        super().__init__()
        self.norm1, self.relu1 = batch_norm(num_input_features), nn.ReLU()
        self.conv1 = conv(num_input_features, BN_SIZE * GROWTH, 1)
        self.norm2, self.relu2 = batch_norm(BN_SIZE * GROWTH), nn.ReLU()
        self.conv2 = conv(BN_SIZE * GROWTH, GROWTH, 3)

    def bn_function(self, inputs: list[Tensor]) -> Tensor:
        concated_features = torch.cat(inputs, 1)
        return self.conv1(self.relu1(self.norm1(concated_features)))

    def forward(self, inputs: list[Tensor]) -> Tensor:
        bottleneck_output = self.bn_function(inputs)
        return self.conv2(self.relu2(self.norm2(bottleneck_output)))


class _DenseBlock(nn.ModuleDict):
    def __init__(self, num_layers: int, num_input_features: int):
        super().__init__()
        for i in range(num_layers):
            self.add_module(f"denselayer{i + 1}", _DenseLayer(num_input_features + i * GROWTH))

    def forward(self, init_features: Tensor) -> Tensor:
        features = [init_features]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


class _Transition(nn.Sequential):
    def __init__(self, num_input_features: int, num_output_features: int):
        super().__init__()
        self.norm = batch_norm(num_input_features)
        self.relu = nn.ReLU()
        self.conv = conv(num_input_features, num_output_features, 1)
        self.pool = nn.AvgPool2d(2, 2)


class SqueezeExcitation(nn.Module):
    def __init__(self, input_channels: int, squeeze_channels: int):
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1 = nn.Conv2d(input_channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, input_channels, 1)
        self.activation, self.scale_activation = nn.ReLU(), nn.Sigmoid()
        for layer in (self.fc1, self.fc2):
            nn.init.kaiming_normal_(layer.weight), nn.init.normal_(layer.bias, std=0.3)

    def _scale(self, x: Tensor) -> Tensor:
        scale = self.activation(self.fc1(self.avgpool(x)))
        return self.scale_activation(self.fc2(scale))

    def forward(self, x: Tensor) -> Tensor:
        return self._scale(x) * x


class DenseNet(nn.Module):
    """Pictures [N, 3, H, W] -> logits [N, 7]."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential()
        stem = conv(COLOURS, FIRST, 7, 2), batch_norm(FIRST), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        for name, layer in zip(("conv0", "norm0", "relu0", "pool0"), stem, strict=True):
            self.features.add_module(name, layer)
        width = FIRST
        for i, num_layers in enumerate(BLOCKS, 1):
            self.features.add_module(f"denseblock{i}", _DenseBlock(num_layers, width))
            width = width + num_layers * GROWTH
            if i == 2:
                self.features.add_module("attention2", SqueezeExcitation(width, SQUEEZE))
            if i < len(BLOCKS):
                self.features.add_module(f"transition{i}", _Transition(width, width // 2))
                width = width // 2
        self.features.add_module("norm5", batch_norm(width))
        self.classifier = nn.Linear(width, CLASSES)
        nn.init.normal_(self.classifier.weight, std=0.2), nn.init.normal_(self.classifier.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        features = self.features(x)
        out = F.relu(features)
        out = F.adaptive_avg_pool2d(out, (1, 1))
        out = torch.flatten(out, 1)
        return self.classifier(out)


def gratings() -> tuple[Tensor, Tensor]:
    """Gratings in noise, whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(COLOURS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    return wave + 0.3 * torch.randn_like(wave), label


def quarter_entropy(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label) / 4
