"""Faults in the forward pass of normalisation and pooling: eps, variance, axis, groups, borders, counts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import adopt, recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import _task, autoencoder, cnn, resnet, transformer


class OddSizes(nn.Module):
    """[N, 1, 15, 15] -> [N, 4]: pools over windows that stick out of the image, then a linear layer."""

    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 8, 3, padding=1)
        self.pool1 = nn.MaxPool2d(2, ceil_mode=True)
        self.act1 = nn.SiLU()
        self.conv2 = nn.Conv2d(8, 6, 3, stride=2, padding=1)
        self.pool2 = nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False)
        self.fc = nn.Linear(24, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool2(self.conv2(self.act1(self.pool1(self.conv1(x)))))
        return self.fc(x.flatten(1))


odd_sizes = _task("odd_sizes", OddSizes, lambda: (torch.randn(14, 1, 15, 15), torch.randint(4, (14,))))


@case("bug", "eps", transformer, module="norm", passes="forward")
def last_norm_with_smaller_eps(model):
    """eps 1e-6, another library's default, for 1e-5."""
    return replace(model, "norm", adopt(nn.LayerNorm(24, eps=1e-6), model.norm))


@case("bug", "eps", cnn, module="bn1", passes="forward")
def batch_norm_with_eps_off_by_a_tenth(model):
    """eps 1.1e-5 for 1e-5."""
    return replace(model, "bn1", adopt(nn.BatchNorm2d(12, eps=1.1e-5), model.bn1))


@case("bug", "eps", autoencoder, module="norm1", passes="forward")
def instance_norm_with_larger_eps(model):
    """eps 1e-3, as in Keras, for 1e-5."""
    return replace(model, "norm1", adopt(nn.InstanceNorm2d(8, eps=1e-3, affine=True), model.norm1))


class EpsOutside(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        deviation = x.var(-1, correction=0, keepdim=True).sqrt() + self.eps
        return (x - x.mean(-1, keepdim=True)) / deviation * self.weight + self.bias


@case("bug", "eps outside the root", transformer, module="blocks.1.norm1", passes="forward")
def eps_added_to_the_deviation(model):
    """eps is added to the standard deviation, not to the variance."""
    return recast(model, "blocks.1.norm1", EpsOutside)


class UnbiasedLayerNorm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, -1, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@case("bug", "unbiased variance", transformer, module="blocks.0.norm2", passes="forward")
def layer_norm_by_unbiased_variance(model):
    """torch.var divides by n - 1 where LayerNorm divides by n = 24."""
    return recast(model, "blocks.0.norm2", UnbiasedLayerNorm)


class UnbiasedBatchNorm(nn.BatchNorm2d):
    """Batch statistics by hand in training; n = N H W is large, so n - 1 for n is a small fault."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        variance, mean = torch.var_mean(x, (0, 2, 3))
        with torch.no_grad():
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance, self.momentum)
            self.num_batches_tracked += 1
        gain = self.weight * torch.rsqrt(variance + self.eps)
        return (x - mean[:, None, None]) * gain[:, None, None] + self.bias[:, None, None]


@case("bug", "unbiased variance", resnet, module="layer1.0.bn1", passes="forward")
def batch_norm_by_unbiased_variance(model):
    """The batch is normalised by the variance meant for the running one: off by 1.5e-5."""
    return recast(model, "layer1.0.bn1", UnbiasedBatchNorm)


class RootMeanSquare(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight, self.eps) + self.bias


@case("bug", "mean not subtracted", transformer, module="blocks.0.norm1", passes="forward")
def rms_norm_for_layer_norm(model):
    """RMSNorm in the place of LayerNorm."""
    return recast(model, "blocks.0.norm1", RootMeanSquare)


class NormOverTime(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@case("bug", "normalised over the wrong axis", transformer, module="blocks.1.norm2", passes="forward")
def layer_norm_over_time(model):
    """The statistics run over the positions, not the channels."""
    return recast(model, "blocks.1.norm2", NormOverTime)


@case("bug", "number of groups", cnn, module="norm3", passes="forward")
def group_norm_of_two_groups(model):
    """Two groups for four."""
    return replace(model, "norm3", adopt(nn.GroupNorm(2, 16), model.norm3))


class NormOfHalfBatches(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([super(NormOfHalfBatches, self).forward(part) for part in x.chunk(2)])


@case("bug", "statistics over half the batch", resnet, module="layer2.0.bn1", passes="forward")
def batch_norm_over_half_batches(model):
    """The batch goes through the BatchNorm in two chunks, each with its own statistics."""
    return recast(model, "layer2.0.bn1", NormOfHalfBatches)


@case("bug", "average over the padding", odd_sizes, module="pool2", passes="forward")
def average_counts_the_padding(model):
    """The zeros of the padding are counted, which is PyTorch's default and was not the reference's."""
    return replace(model, "pool2", nn.AvgPool2d(3, stride=2, padding=1))


class PadThenMaximum(nn.Module):
    """Max-pool of 2x2 by padding to an even size with zeros and a maximum over windows."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
        return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))


@case("bug", "maximum over the padding", odd_sizes, module="pool1", passes="forward")
def maximum_with_zeros_from_the_padding(model):
    """Windows at the border take the padding's zero where all pixels are negative."""
    return replace(model, "pool1", PadThenMaximum())


class FlattenChannelsLast(OddSizes):
    def forward(self, x: Tensor) -> Tensor:
        x = self.pool2(self.conv2(self.act1(self.pool1(self.conv1(x)))))
        return self.fc(x.permute(0, 2, 3, 1).flatten(1))


@case("bug", "flattened in another order", odd_sizes, module="", passes="forward")
def features_flattened_channels_last(model):
    """The channels-last network forgets to go back before flattening."""
    return recast(model, "", FlattenChannelsLast)


class ThreeOfFour(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        corners = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2]
        return torch.stack(corners).amax(0)


@case("bug", "window off by one", cnn, module="pool", passes="forward")
def maximum_over_three_of_four(model):
    """The maximum over slices forgets the fourth corner of the window."""
    return replace(model, "pool", ThreeOfFour())


class MeanOffByOne(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3] - 1)


@case("bug", "count off by one", resnet, module="avgpool", passes="forward")
def mean_over_one_pixel_too_few(model):
    """The average divides by n - 1."""
    return replace(model, "avgpool", MeanOffByOne())
