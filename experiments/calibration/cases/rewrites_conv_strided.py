"""True rewrites of strided and of transposed convs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME, ConvWeights, rewritten
from experiments.calibration.tasks import autoencoder, resnet


class SpaceToDepth(ConvWeights):
    def forward(self, x: Tensor) -> Tensor:
        pixels = F.pixel_unshuffle(self.padded(x), self.stride)
        return F.conv2d(pixels, F.pixel_unshuffle(self.weight, self.stride), self.bias)


class Subsampled(ConvWeights):
    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.weight, self.bias, padding=self.padding)
        return y[:, :, :: self.stride, :: self.stride]


class ZerosBetween(ConvWeights):
    def forward(self, x: Tensor) -> Tensor:
        sides = [(side - 1) * self.stride + 1 for side in x.shape[2:]]
        spread = x.new_zeros(*x.shape[:2], *sides)
        spread[:, :, :: self.stride, :: self.stride] = x
        flipped = self.weight.flip(2, 3).transpose(0, 1)
        return F.conv2d(spread, flipped, self.bias, padding=self.kernel - 1 - self.padding)


class MatmulFold(ConvWeights):
    def forward(self, x: Tensor) -> Tensor:
        columns = self.weight.flatten(1).T @ x.flatten(2)
        sides = [(side - 1) * self.stride - 2 * self.padding + self.kernel for side in x.shape[2:]]
        folded = F.fold(columns, sides, self.kernel, padding=self.padding, stride=self.stride)
        return self.with_bias(folded)


class SubPixel(ConvWeights):
    """For kernel 4, stride 2, padding 1: each of the four phases of the output is a 2x2 conv."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        phases = []
        for i in (0, 1):
            for j in (0, 1):
                kernel = self.weight[:, :, 1 - i :: 2, 1 - j :: 2].flip(2, 3).transpose(0, 1)
                phases.append(F.conv2d(x, kernel, padding=1)[:, :, i : i + height, j : j + width])
        return self.with_bias(F.pixel_shuffle(torch.stack(phases, 2).flatten(1, 2), 2))


@case(SAME, "strided conv on rearranged pixels", on=autoencoder)
def strided_conv_space_to_depth(model: nn.Module) -> nn.Module:
    """Blocks of 2x2 pixels become channels; a 4x4 conv of stride 2 becomes a 2x2 conv of stride 1."""
    return rewritten(model, "down1", SpaceToDepth)


@case(SAME, "strided conv thinned out", on=resnet)
def strided_conv_subsampled(model: nn.Module) -> nn.Module:
    """The conv at every pixel, of which every second is kept."""
    return rewritten(model, "layer4.0.conv1", Subsampled)


@case(SAME, "transposed conv as a conv", on=autoencoder)
def transposed_conv_as_conv(model: nn.Module) -> nn.Module:
    """Zeros between the pixels, then a conv with the flipped kernel."""
    return rewritten(model, "up1", ZerosBetween)


@case(SAME, "transposed conv by fold", on=autoencoder)
def transposed_conv_by_fold(model: nn.Module) -> nn.Module:
    """A matrix product and ``F.fold`` (col2im)."""
    return rewritten(model, "up2", MatmulFold)


@case(SAME, "transposed conv by pixel shuffle", on=autoencoder)
def transposed_conv_by_pixel_shuffle(model: nn.Module) -> nn.Module:
    """Four small convs, one for each phase of the output, then ``F.pixel_shuffle``."""
    return rewritten(model, "up1", SubPixel)
