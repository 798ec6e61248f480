"""Images: padding, pooling, resizing, the order of channels, and what lies on the shortcut."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from bench.real_bugs import real_bug
from bench.real_bugs._vision import Gate, PostResidual, Residual, ToRows, vision
from bench.tasks import cnn


@real_bug(
    "same_padding_of_stride_two",
    "https://github.com/taehoonlee/tensornets/issues/25",
    "ports between TensorFlow's SAME and torch, Caffe",
    at="conv2",
    on=cnn,
)
def same_padding(conv: nn.Conv2d, mended: bool) -> nn.Module:
    """SAME pads an even image below and to the right alone; the other library pads all around."""
    return Padded(conv, (1, 1, 1, 1) if mended else (0, 1, 0, 1))


class Padded(nn.Module):
    def __init__(self, conv: nn.Conv2d, border: tuple[int, ...]):
        super().__init__()
        self.weight, self.border = nn.Parameter(conv.weight.detach().clone()), border

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(F.pad(x, self.border), self.weight, stride=2)


@real_bug(
    "average_counts_the_padding",
    "https://github.com/neo-ai/tvm/issues/32",
    "neo-ai TVM before July 2019 (TensorRT); the same between torch's and TensorFlow's Inception",
    at="pool",
    on=vision,
)
def counted(pool: nn.AvgPool2d, mended: bool) -> nn.Module:
    """Zeros of the border are counted in the average on one side and not on the other."""
    return Averaged(mended)


class Averaged(nn.Module):
    """Three by three, as a sum over a sum."""

    def __init__(self, mended: bool):
        super().__init__()
        self.mended = mended

    def forward(self, x: Tensor) -> Tensor:
        sums = F.avg_pool2d(x, 3, 1, 1, divisor_override=1)
        return sums / (F.avg_pool2d(torch.ones_like(x), 3, 1, 1, divisor_override=1) if self.mended else 9)


@real_bug(
    "corners_aligned",
    "https://github.com/pytorch/pytorch/pull/5927",
    "between torch before and since 0.4, whose default changed",
    at="up",
    on=vision,
)
class Aligned(nn.Upsample):
    """The corners' pixels are put on each other, which was the default, instead of the corners' edges."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.mended:
            return F.interpolate(x, self.size, mode="bilinear", align_corners=True)
        rows, columns = (matrix(n, m, x) for n, m in zip(self.size, x.shape[2:], strict=True))
        return rows @ x @ columns.T


def matrix(new: int, old: int, like: Tensor) -> Tensor:
    """[new, old]: linear interpolation at the centres of the pixels."""
    to, out = (torch.arange(n, device=like.device, dtype=like.dtype) for n in (new, old))
    at = ((to + 0.5) * old / new - 0.5).clamp(0, old - 1)
    return (1 - (at[:, None] - out).abs()).clamp(min=0)


@real_bug(
    "depth_to_space_in_the_other_order",
    "https://github.com/PINTO0309/onnx2tf/issues/91",
    "onnx2tf 1.3.14",
    at="shuffle",
    on=vision,
)
class OtherOrder(nn.PixelShuffle):
    """The channels hold the block's places first and the new channel last, not the other way round."""

    def forward(self, x: Tensor) -> Tensor:
        n, c, h, w = x.shape
        if self.mended:
            return x.view(n, c // 4, 2, 2, h, w).permute(0, 1, 4, 2, 5, 3).reshape(n, c // 4, 2 * h, 2 * w)
        return x.view(n, 2, 2, c // 4, h, w).permute(0, 3, 4, 1, 5, 2).reshape(n, c // 4, 2 * h, 2 * w)


@real_bug(
    "rows_of_channels_last",
    "https://github.com/microsoft/MMdnn/issues/250",
    "MMdnn of June 2018 (TensorFlow to Caffe)",
    at="rows",
    on=vision,
    module=("rows", "fc"),
)
class ChannelsLast(ToRows):
    """The features are flattened with the channels last; the weights expect them first."""

    def forward(self, x: Tensor) -> Tensor:
        if self.mended:
            return torch.cat([channel.flatten(1) for channel in x.unbind(1)], 1)
        return x.permute(0, 2, 3, 1).flatten(1)


class HardSigmoid(Function):
    @staticmethod
    def forward(ctx, x: Tensor, mended: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.mended = mended
        return ((x + 3) / 6).clamp(0, 1)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        (x,) = ctx.saved_tensors
        return gradient / 6 * ((x > -3) & (x < 3)) if ctx.mended else gradient / 6, None


@real_bug(
    "gradient_of_a_shut_gate",
    "https://github.com/pytorch/pytorch/issues/51408",
    "torch 1.5 (hardsigmoid_backward, as reported)",
    at="gate",
    on=vision,
    passes=("input gradient", "weight gradient"),
)
class ShutGate(Gate):
    """The hard sigmoid's gradient is 1/6 also where it is flat."""

    def hard(self, x: Tensor) -> Tensor:
        return HardSigmoid.apply(x, self.mended)


@real_bug(
    "shortcut_activated_in_place",
    "https://github.com/rosinality/vq-vae-2-pytorch/issues/60",
    "vq-vae-2-pytorch before January 2021",
    at="residual",
    on=vision,
)
class InPlace(Residual):
    """The first ReLU works in place, so that the shortcut carries what it left."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(F.relu(x, inplace=not self.mended)), inplace=True))
        y += x
        return y


@real_bug(
    "activation_before_the_sum",
    "https://github.com/kuangliu/pytorch-cifar/issues/4",
    "pytorch-cifar before May 2017",
    at="post",
    on=vision,
)
class BeforeTheSum(PostResidual):
    """What is added to the shortcut is activated already."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(self.conv1(x).clamp(min=0))
        return torch.relu(x + (y if self.mended else y.relu()))
