"""Faults in the forward pass of a conv or linear layer: halves, groups, borders, strides, factors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._bug_parts import Halves, adopt, rows_of
from bench.surgery import recast, replace
from bench.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


@case("bug", "bias forgotten in one half", autoencoder, module="down2")
def half_conv_without_bias(model):
    """The second conv of the split is made without a bias."""
    halves = Halves(model.down2)
    halves.second.bias = None
    return replace(model, "down2", halves)


@case("bug", "bias forgotten in one half", transformer, module="blocks.1.up")
def half_linear_without_bias(model):
    """The first linear layer of the split is made without a bias."""
    halves = Halves(model.blocks[1].up)
    halves.first.bias = None
    return replace(model, "blocks.1.up", halves)


class SecondHalfFirst(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.second(x), self.first(x)], self.dim)


@case("bug", "halves in the wrong order", mlp, module="fc2")
def linear_halves_swapped(model):
    """The halves are joined second half first."""
    return replace(model, "fc2", SecondHalfFirst(model.fc2))


@case("bug", "halves in the wrong order", resnet, module="layer2.1.conv2")
def conv_halves_swapped(model):
    """The halves are joined second half first."""
    return replace(model, "layer2.1.conv2", SecondHalfFirst(model.layer2[1].conv2))


@in_place_of("down2", "bug", "halves in the wrong order", autoencoder, "input_halves_swapped")
class InputHalvesSwapped(nn.Module):
    """A conv as the sum of two, each over half of the input channels and fed the other's."""

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


class TwoGroups(nn.Module):
    """A conv of two groups as two convs."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        middle = conv.out_channels // 2
        self.convs = nn.ModuleList([rows_of(conv, 0, middle), rows_of(conv, middle, None)])
        for part in self.convs:
            part.groups, part.in_channels = 1, conv.in_channels // 2


@in_place_of("conv3", "bug", "wrong group assignment", cnn, "groups_read_every_other_channel")
class GroupsReadInterleaved(TwoGroups):
    """Group g reads the channels g, g + 2, ... in place of its half."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([conv(x[:, g::2]) for g, conv in enumerate(self.convs)], 1)


@in_place_of("conv3", "bug", "wrong group assignment", cnn, "groups_write_every_other_channel")
class GroupsWrittenInterleaved(TwoGroups):
    """The outputs of the groups are joined channel by channel."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack(
            [conv(part) for conv, part in zip(self.convs, x.chunk(2, 1), strict=True)], 2
        ).flatten(1, 2)


@case("bug", "padding mode", two_inputs, module="conv")
def signal_padded_by_reflection(model):
    """The border of the signal is reflected, not zero."""
    return replace(model, "conv", adopt(nn.Conv1d(2, 6, 5, padding=2, padding_mode="reflect"), model.conv))


@case("bug", "padding mode", resnet, module="layer4.1.conv2")
def image_padded_by_replication(model):
    """The border of one late conv is replicated, not zero."""
    conv = nn.Conv2d(64, 64, 3, padding=1, padding_mode="replicate", bias=False)
    return replace(model, "layer4.1.conv2", adopt(conv, model.layer4[1].conv2))


@method_of("down2", "bug", "stride off by one", autoencoder)
def strided_conv_padded_on_one_side(self, x: Tensor) -> Tensor:
    """The same shape, but the windows lie one pixel off.

    A 3x3 conv of stride 2 and TensorFlow's "same" padding at even sizes: right and bottom only.
    """
    return F.conv2d(F.pad(x, (0, 1, 0, 1)), self.weight, self.bias, stride=2)


class DenseThenOddPixels(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight, self.bias, padding=self.padding)[..., 1::2, 1::2]


@case("bug", "stride off by one", cnn, module="conv2")
def dense_conv_sampled_at_odd_pixels(model):
    """Stride 2 as a dense conv of which the odd pixels are kept."""
    return recast(model, "conv2", DenseThenOddPixels)


@case("bug", "stride off by one", resnet, module="layer3.0.shortcut.0")
def shortcut_sampled_at_odd_pixels(model):
    """The strided 1x1 conv of a shortcut takes the odd pixels."""
    return recast(model, "layer3.0.shortcut.0", DenseThenOddPixels)


@case("bug", "dilation", two_inputs, module="conv")
def signal_conv_dilated(model):
    """The same shapes with a kernel spread by two."""
    return replace(model, "conv", adopt(nn.Conv1d(2, 6, 5, padding=4, dilation=2), model.conv))


@method_of("up2", "bug", "kernel not flipped", autoencoder)
def transposed_conv_without_flip(self, x: Tensor) -> Tensor:
    """A conv over the input with zeros between its pixels that forgets to turn the kernel round."""
    n, c, h, w = x.shape
    stuffed = x.new_zeros(n, c, 2 * h - 1, 2 * w - 1)
    stuffed[..., ::2, ::2] = x
    return F.conv2d(stuffed, self.weight.transpose(0, 1), self.bias, padding=2)


@method_of("blocks.1.attention.out", "bug", "square weight transposed", transformer)
def square_weight_multiplied_transposed(self, x: Tensor) -> Tensor:
    """x W for x W^T, which no shape gives away."""
    return x @ self.weight + self.bias
