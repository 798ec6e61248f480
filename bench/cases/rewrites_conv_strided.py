"""True rewrites of strided and of transposed convs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import in_place_of
from bench.cases._rewritten import SAME, ConvWeights
from bench.tasks import autoencoder, resnet


@in_place_of("down1", SAME, "strided conv on rearranged pixels", autoencoder, "strided_conv_space_to_depth")
class SpaceToDepth(ConvWeights):
    """Blocks of 2x2 pixels become channels; a 4x4 conv of stride 2 becomes a 2x2 conv of stride 1."""

    def forward(self, x: Tensor) -> Tensor:
        pixels = F.pixel_unshuffle(self.padded(x), self.stride)
        return F.conv2d(pixels, F.pixel_unshuffle(self.weight, self.stride), self.bias)


@in_place_of("layer4.0.conv1", SAME, "strided conv thinned out", resnet, "strided_conv_subsampled")
class Subsampled(ConvWeights):
    """The conv at every pixel, of which every second is kept."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv2d(x, self.weight, self.bias, padding=self.padding)
        return y[:, :, :: self.stride, :: self.stride]


@in_place_of("up1", SAME, "transposed conv as a conv", autoencoder, "transposed_conv_as_conv")
class ZerosBetween(ConvWeights):
    """Zeros between the pixels, then a conv with the flipped kernel."""

    def forward(self, x: Tensor) -> Tensor:
        sides = [(side - 1) * self.stride + 1 for side in x.shape[2:]]
        spread = x.new_zeros(*x.shape[:2], *sides)
        spread[:, :, :: self.stride, :: self.stride] = x
        flipped = self.weight.flip(2, 3).transpose(0, 1)
        return F.conv2d(spread, flipped, self.bias, padding=self.kernel - 1 - self.padding)


@in_place_of("up2", SAME, "transposed conv by fold", autoencoder, "transposed_conv_by_fold")
class MatmulFold(ConvWeights):
    """A matrix product and ``F.fold`` (col2im)."""

    def forward(self, x: Tensor) -> Tensor:
        columns = self.weight.flatten(1).T @ x.flatten(2)
        sides = [(side - 1) * self.stride - 2 * self.padding + self.kernel for side in x.shape[2:]]
        folded = F.fold(columns, sides, self.kernel, padding=self.padding, stride=self.stride)
        return self.with_bias(folded)


@in_place_of("up1", SAME, "transposed conv by pixel shuffle", autoencoder, "transposed_conv_by_pixel_shuffle")
class SubPixel(ConvWeights):
    """Each of the four phases of the output (kernel 4, stride 2) is a 2x2 conv; then ``F.pixel_shuffle``."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        phases = []
        for i in (0, 1):
            for j in (0, 1):
                kernel = self.weight[:, :, 1 - i :: 2, 1 - j :: 2].flip(2, 3).transpose(0, 1)
                phases.append(F.conv2d(x, kernel, padding=1)[:, :, i : i + height, j : j + width])
        return self.with_bias(F.pixel_shuffle(torch.stack(phases, 2).flatten(1, 2), 2))
