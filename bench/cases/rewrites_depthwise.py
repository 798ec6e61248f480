"""True rewrites in a network of depthwise-separable convs with LeakyReLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, ConvWeights, rewritten
from bench.tasks import _classes, _task


class Separable(nn.Module):
    """[N, 3, 14, 14] -> [N, 5]: a depthwise 3x3 and a pointwise conv between a stem and a linear layer."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 10, 3, stride=2, padding=1)
        self.act1 = nn.LeakyReLU(0.1)
        self.depthwise = nn.Conv2d(10, 10, 3, padding=1, groups=10, bias=False)
        self.norm = nn.BatchNorm2d(10)
        self.act2 = nn.LeakyReLU(0.1)
        self.pointwise = nn.Conv2d(10, 14, 1)
        self.fc = nn.Linear(14, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act2(self.norm(self.depthwise(self.act1(self.stem(x)))))
        return self.fc(self.pointwise(x).mean((2, 3)))


separable = _task("separable", Separable, lambda: (torch.randn(12, 3, 14, 14), _classes(12, 5)))


class LeakyFormula(nn.Module):
    def __init__(self, slope: float):
        super().__init__()
        self.slope = slope

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


@in_place_of("depthwise", SAME, "depthwise conv by shifts", separable, "depthwise_shift_and_multiply")
class ShiftAndMultiply(ConvWeights):
    """Nine shifted images times one number a channel, added up."""

    def forward(self, x: Tensor) -> Tensor:
        x, (height, width) = self.padded(x), x.shape[2:]
        return sum(
            x[:, :, i : i + height, j : j + width] * self.weight[:, 0, i, j, None, None]
            for i in range(self.kernel)
            for j in range(self.kernel)
        )


@in_place_of("depthwise", SAME, "depthwise conv by channel", separable, "depthwise_one_channel_at_a_time")
class OneChannelAtATime(ConvWeights):
    """A conv of one channel for each channel, in a loop."""

    def forward(self, x: Tensor) -> Tensor:
        pairs = zip(x.split(1, 1), self.weight.split(1), strict=True)
        return torch.cat([F.conv2d(channel, kernel, padding=self.padding) for channel, kernel in pairs], 1)


@in_place_of("depthwise", SAME, "grouped conv as a dense one", separable, "depthwise_as_dense_diagonal")
class DenseDiagonal(ConvWeights):
    """A dense conv whose kernel is zero off the diagonal of channels."""

    def forward(self, x: Tensor) -> Tensor:
        dense = torch.diag_embed(self.weight[:, 0].permute(1, 2, 0)).permute(2, 3, 0, 1)
        return F.conv2d(x, dense, padding=self.padding)


@in_place_of("pointwise", SAME, "1x1 conv as einsum", separable, "pointwise_conv_as_einsum")
class PointwiseEinsum(ConvWeights):
    """The pointwise conv as a contraction over the channels."""

    def forward(self, x: Tensor) -> Tensor:
        return self.with_bias(torch.einsum("nchw,oc->nohw", x, self.weight[:, :, 0, 0]))


@case(SAME, "activation by formula", on=separable)
def leaky_relu_by_where(model: nn.Module) -> nn.Module:
    """Both LeakyReLUs as ``where(x > 0, x, slope * x)``."""
    for name in ("act1", "act2"):
        rewritten(model, name, lambda act: LeakyFormula(act.negative_slope))
    return model
