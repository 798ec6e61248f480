"""Faults in the forward pass of a conv or linear layer: halves, groups, borders, strides, factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import Halves, adopt, recast, rows_of
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


@case("bug", "bias forgotten in one half", autoencoder, module="down2", passes="forward")
def half_conv_without_bias(model):
    """The second conv of the split is made without a bias."""
    halves = Halves(model.down2)
    halves.second.bias = None
    return replace(model, "down2", halves)


@case("bug", "bias forgotten in one half", transformer, module="blocks.1.up", passes="forward")
def half_linear_without_bias(model):
    """The first linear layer of the split is made without a bias."""
    halves = Halves(model.blocks[1].up)
    halves.first.bias = None
    return replace(model, "blocks.1.up", halves)


class SecondHalfFirst(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.second(x), self.first(x)], self.dim)


@case("bug", "halves in the wrong order", mlp, module="fc2", passes="forward")
def linear_halves_swapped(model):
    """The halves are joined second half first."""
    return replace(model, "fc2", SecondHalfFirst(model.fc2))


@case("bug", "halves in the wrong order", resnet, module="layer2.1.conv2", passes="forward")
def conv_halves_swapped(model):
    """The halves are joined second half first."""
    return replace(model, "layer2.1.conv2", SecondHalfFirst(model.layer2[1].conv2))


class InputHalvesSwapped(nn.Module):
    """A conv as the sum of two over half of the input channels; each is fed the other's channels."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        first, second = conv.weight.detach().chunk(2, 1)
        self.first, self.second, self.bias = (
            nn.Parameter(first.clone()),
            nn.Parameter(second.clone()),
            conv.bias,
        )
        self.stride, self.padding = conv.stride, conv.padding

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, 1)
        y = F.conv2d(right, self.first, self.bias, self.stride, self.padding)
        return y + F.conv2d(left, self.second, None, self.stride, self.padding)


@case("bug", "halves in the wrong order", autoencoder, module="down2", passes="forward")
def input_halves_swapped(model):
    """An input-channel split that gives each half the other's channels."""
    return replace(model, "down2", InputHalvesSwapped(model.down2))


class TwoGroups(nn.Module):
    """A conv of two groups as two convs."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        middle = conv.out_channels // 2
        self.convs = nn.ModuleList([rows_of(conv, 0, middle), rows_of(conv, middle, None)])
        for part in self.convs:
            part.groups, part.in_channels = 1, conv.in_channels // 2


class GroupsReadInterleaved(TwoGroups):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x[:, g::2]) for g, conv in enumerate(self.convs)], 1)


class GroupsWrittenInterleaved(TwoGroups):
    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [conv(part) for conv, part in zip(self.convs, x.chunk(2, 1), strict=True)], 2
        ).flatten(1, 2)


@case("bug", "wrong group assignment", cnn, module="conv3", passes="forward")
def groups_read_every_other_channel(model):
    """Group g reads the channels g, g + 2, ... in place of its half."""
    return replace(model, "conv3", GroupsReadInterleaved(model.conv3))


@case("bug", "wrong group assignment", cnn, module="conv3", passes="forward")
def groups_write_every_other_channel(model):
    """The outputs of the groups are joined channel by channel."""
    return replace(model, "conv3", GroupsWrittenInterleaved(model.conv3))


@case("bug", "padding mode", two_inputs, module="conv", passes="forward")
def signal_padded_by_reflection(model):
    """The border of the signal is reflected, not zero."""
    return replace(model, "conv", adopt(nn.Conv1d(2, 6, 5, padding=2, padding_mode="reflect"), model.conv))


@case("bug", "padding mode", resnet, module="layer4.1.conv2", passes="forward")
def image_padded_by_replication(model):
    """The border of one late conv is replicated, not zero."""
    conv = nn.Conv2d(64, 64, 3, padding=1, padding_mode="replicate", bias=False)
    return replace(model, "layer4.1.conv2", adopt(conv, model.layer4[1].conv2))


class PaddedLikeTensorFlow(nn.Conv2d):
    """A 3x3 conv of stride 2 and TensorFlow's "same" padding at even sizes: right and bottom only."""

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, stride=2)


@case("bug", "stride off by one", autoencoder, module="down2", passes="forward")
def strided_conv_padded_on_one_side(model):
    """The same shape, but the windows lie one pixel off."""
    return recast(model, "down2", PaddedLikeTensorFlow)


class DenseThenOddPixels(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=self.padding)[..., 1::2, 1::2]


@case("bug", "stride off by one", cnn, module="conv2", passes="forward")
def dense_conv_sampled_at_odd_pixels(model):
    """Stride 2 as a dense conv of which the odd pixels are kept."""
    return recast(model, "conv2", DenseThenOddPixels)


@case("bug", "stride off by one", resnet, module="layer3.0.shortcut.0", passes="forward")
def shortcut_sampled_at_odd_pixels(model):
    """The strided 1x1 conv of a shortcut takes the odd pixels."""
    return recast(model, "layer3.0.shortcut.0", DenseThenOddPixels)


@case("bug", "dilation", two_inputs, module="conv", passes="forward")
def signal_conv_dilated(model):
    """The same shapes with a kernel spread by two."""
    return replace(model, "conv", adopt(nn.Conv1d(2, 6, 5, padding=4, dilation=2), model.conv))


class StuffedTransposedConv(nn.ConvTranspose2d):
    """A transposed conv as a conv over the input with zeros between its pixels; the kernel is not flipped."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        stuffed = x.new_zeros(n, c, 2 * h - 1, 2 * w - 1)
        stuffed[..., ::2, ::2] = x
        return F.conv2d(stuffed, self.weight.transpose(0, 1), self.bias, padding=2)


@case("bug", "kernel not flipped", autoencoder, module="up2", passes="forward")
def transposed_conv_without_flip(model):
    """A transposed conv by zero stuffing that forgets to turn the kernel round."""
    return recast(model, "up2", StuffedTransposedConv)


class TransposedWeight(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


@case("bug", "square weight transposed", transformer, module="blocks.1.attention.out", passes="forward")
def square_weight_multiplied_transposed(model):
    """x W for x W^T, which no shape gives away."""
    return recast(model, "blocks.1.attention.out", TransposedWeight)
