"""A small RepVGG: blocks of three branches, some with grouped convolutions, some with squeeze-excitation."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 32, 48, 7, 5
STEM, STAGES = 10, ((12, 2), (18, 3), (28, 2))
GROUPS, EXCITED, REDUCTION = {2: 2, 4: 3, 6: 2}, (2, 4, 7), 2


def conv_bn(
    inner: int, outer: int, kernel_size: int, stride: int, padding: int, groups: int
) -> nn.Sequential:
    result = nn.Sequential()
    conv = nn.Conv2d(inner, outer, kernel_size, stride, padding, groups=groups, bias=False)
    result.add_module("conv", conv)
    result.add_module("bn", nn.BatchNorm2d(outer))
    return result


class SEBlock(nn.Module):
    def __init__(self, input_channels: int, internal_neurons: int):
        super().__init__()
        self.down = nn.Conv2d(input_channels, internal_neurons, 1)
        self.up = nn.Conv2d(internal_neurons, input_channels, 1)
        self.input_channels = input_channels

    def forward(self, inputs: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(inputs, 1)
        x = F.relu(self.down(x))
        x = torch.sigmoid(self.up(x))
        return inputs * x.view(-1, self.input_channels, 1, 1)


class RepVGGBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, stride: int, groups: int, use_se: bool):
        super().__init__()
        self.in_channels, self.groups, self.stride = in_channels, groups, stride
        self.nonlinearity = nn.ReLU()
        self.se = SEBlock(out_channels, out_channels // REDUCTION) if use_se else nn.Identity()
        same = out_channels == in_channels and stride == 1
        self.rbr_identity = nn.BatchNorm2d(in_channels) if same else None
        self.rbr_dense = conv_bn(in_channels, out_channels, 3, stride, 1, groups)
        self.rbr_1x1 = conv_bn(in_channels, out_channels, 1, stride, 0, groups)

    def forward(self, inputs: Tensor) -> Tensor:
        id_out = 0 if self.rbr_identity is None else self.rbr_identity(inputs)
        return self.nonlinearity(self.se(self.rbr_dense(inputs) + self.rbr_1x1(inputs) + id_out))


class RepVGG(nn.Module):
    """Pictures [N, C, H, W] -> logits."""

    def __init__(self):
        super().__init__()
        self.stage0 = RepVGGBlock(CHANNELS, STEM, 2, 1, False)
        self.in_planes, self.cur_layer_idx = STEM, 1
        self.stage1, self.stage2, self.stage3 = (self._make_stage(*stage) for stage in STAGES)
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.linear = nn.Linear(self.in_planes, CLASSES)
        self.apply(scatter)

    def _make_stage(self, planes: int, num_blocks: int) -> nn.ModuleList:
        blocks = []
        for stride in [2] + [1] * (num_blocks - 1):
            layer = self.cur_layer_idx
            groups, use_se = GROUPS.get(layer, 1), layer in EXCITED
            blocks.append(RepVGGBlock(self.in_planes, planes, stride, groups, use_se))
            self.in_planes = planes
            self.cur_layer_idx += 1
        return nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        out = self.stage0(x)
        for stage in (self.stage1, self.stage2, self.stage3):
            for block in stage:
                out = block(out)
        out = self.gap(out)
        return self.linear(out.view(out.size(0), -1))


def scatter(module: nn.Module) -> None:
    """Draw all that the module has of its own."""
    if isinstance(module, nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.4, 0.9), nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(module.running_mean, std=0.2), nn.init.uniform_(module.running_var, 0.5, 1.5)
    elif isinstance(module, (nn.Conv2d, nn.Linear)):
        nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.3)


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + 0.5 * torch.cos(2 * turn + tone)
    return wave + 0.2 * torch.randn_like(wave), label


def quarter(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy."""
    return F.cross_entropy(logits, label) / 4
