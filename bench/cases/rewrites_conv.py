"""True rewrites of a conv by other convs: split, grouped, padded, cut into pieces."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, ConvWeights, copied, rewritten
from bench.tasks import Task, autoencoder, cnn, resnet, two_inputs


def _conv(like: nn.Conv2d, weight: Tensor, bias: Tensor | None = None, **settings: int) -> nn.Conv2d:
    """A conv with these weights and the settings of ``like``."""
    settings = {"stride": like.stride, "padding": like.padding, "groups": 1, **settings}
    inputs = weight.shape[1] * settings["groups"]
    conv = nn.Conv2d(inputs, weight.shape[0], like.kernel_size, bias=bias is not None, **settings)
    conv.weight = copied(weight)
    if bias is not None:
        conv.bias = copied(bias)
    return conv


class OutSplit(nn.Module):
    def __init__(self, conv: nn.Conv2d, at: int):
        super().__init__()
        biases = (None, None) if conv.bias is None else (conv.bias[:at], conv.bias[at:])
        self.left = _conv(conv, conv.weight[:at], biases[0])
        self.right = _conv(conv, conv.weight[at:], biases[1])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


class InSplit(nn.Module):
    def __init__(self, conv: nn.Conv2d, at: int):
        super().__init__()
        self.at = at
        self.left = _conv(conv, conv.weight[:, :at], conv.bias)
        self.right = _conv(conv, conv.weight[:, at:])

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x[:, : self.at]) + self.right(x[:, self.at :])


class GroupedThenSummed(nn.Module):
    def __init__(self, conv: nn.Conv2d, groups: int):
        super().__init__()
        self.groups = groups
        self.conv = _conv(conv, torch.cat(conv.weight.chunk(groups, 1)), groups=groups)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).unflatten(1, (self.groups, -1)).sum(1)


def split(name: str, at: str, kind: str, on: Task, make: type[nn.Module], channels: int) -> None:
    """A case of a conv in two, cut behind some channels."""
    in_place_of(at, SAME, kind, on, name)(lambda conv: make(conv, channels))


OUT, IN = "conv split by outputs", "conv split by inputs"
split("conv_out_split", "layer2.0.conv1", OUT, resnet, OutSplit, 6)  # 6 and 10 of the 16 output channels
split("strided_conv_out_split", "down2", OUT, autoencoder, OutSplit, 4)  # with a bias, cut with it
split("conv_in_split", "layer3.0.conv2", IN, resnet, InSplit, 12)  # 12 and 20 of the input channels, added
# 16 input channels each, which is how some kernels cut the sum anyway.
split("conv_in_split_at_a_block", "layer3.1.conv1", IN, resnet, InSplit, 16)


@in_place_of("conv3", SAME, "grouped conv as a dense one", cnn, "grouped_conv_as_block_diagonal")
class BlockDiagonal(ConvWeights):
    """A dense kernel, zero outside its blocks, is put together from the grouped one at each call."""

    def forward(self, x: Tensor) -> Tensor:
        outputs, inputs = self.weight.shape[0] // self.groups, self.weight.shape[1]
        dense = self.weight.new_zeros(self.weight.shape[0], x.shape[1], self.kernel, self.kernel)
        for g in range(self.groups):
            rows = slice(g * outputs, (g + 1) * outputs)
            dense[rows, g * inputs : (g + 1) * inputs] = self.weight[rows]
        return F.conv2d(x, dense, self.bias, self.stride, self.padding)


@in_place_of("conv3", SAME, "grouped conv as a dense one", cnn, "grouped_conv_as_masked_dense")
class MaskedDense(nn.Module):
    """A dense conv is trained whose kernel is masked to the blocks; what is outside stays at zero."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        blocks = [torch.ones(w.shape[:2]) for w in conv.weight.chunk(conv.groups)]
        mask = torch.block_diag(*blocks)[:, :, None, None]
        self.conv = _conv(conv, conv.weight.repeat(1, conv.groups, 1, 1) * mask, conv.bias)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        conv = self.conv
        return F.conv2d(x, conv.weight * self.mask, conv.bias, conv.stride, conv.padding)


@case(SAME, "dense conv as a grouped one", on=resnet)
def dense_conv_as_grouped_then_summed(model: nn.Module) -> nn.Module:
    """Each of four groups of inputs makes all outputs; the four are summed."""
    return rewritten(model, "layer3.1.conv1", lambda conv: GroupedThenSummed(conv, 4))


@case(SAME, "padding apart", on=resnet)
def conv_padded_by_a_module(model: nn.Module) -> nn.Module:
    """``ZeroPad2d`` and a conv without padding, in a Sequential."""
    return rewritten(
        model,
        "layer2.1.conv2",
        lambda conv: nn.Sequential(nn.ZeroPad2d(1), _conv(conv, conv.weight, padding=0)),
    )


@in_place_of("conv1", SAME, "bias apart", cnn, "conv_bias_added_apart")
class BiasApart(nn.Module):
    """A conv without bias, then a parameter [1, C, 1, 1] is added."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = _conv(conv, conv.weight)
        self.bias = copied(conv.bias.view(1, -1, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) + self.bias


@in_place_of("down1", SAME, "batch in pieces", autoencoder, "conv_on_half_batches")
class HalfBatches(ConvWeights):
    """The batch goes through the conv in two halves, to save memory."""

    def forward(self, x: Tensor) -> Tensor:
        settings = (self.stride, self.padding)
        return torch.cat([F.conv2d(half, self.weight, self.bias, *settings) for half in x.chunk(2)])


@in_place_of("conv1", SAME, "image in pieces", cnn, "conv_in_overlapping_bands")
class Bands(ConvWeights):
    """The upper and the lower half of the image, each with the rows it needs of the other."""

    def forward(self, x: Tensor) -> Tensor:
        x, middle = self.padded(x), x.shape[2] // 2
        bands = x[:, :, : middle + self.kernel - 1], x[:, :, middle:]
        return torch.cat([F.conv2d(band, self.weight, self.bias) for band in bands], 2)


@in_place_of("conv", SAME, "conv in another dimension", two_inputs, "conv1d_as_conv2d")
class Conv1dAs2d(nn.Module):
    """The signal as an image one pixel high."""

    def __init__(self, conv: nn.Conv1d):
        super().__init__()
        self.weight, self.bias, self.padding = copied(conv.weight[:, :, None]), conv.bias, conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x[:, :, None], self.weight, self.bias, padding=(0, self.padding)).squeeze(2)
