"""Faults in the forward pass of normalisation and pooling: eps, variance, axis, groups, borders, counts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._bug_parts import adopt
from bench.surgery import replace
from bench.tasks import Task, _task, autoencoder, cnn, resnet, transformer


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


def normed(name: str, at: str, kind: str, on: Task, norm: Callable[[], nn.Module]) -> None:
    in_place_of(at, "bug", kind, on, name)(lambda old: adopt(norm(), old))


# Another library's default for 1e-5.
normed("last_norm_with_smaller_eps", "norm", "eps", transformer, lambda: nn.LayerNorm(24, eps=1e-6))
normed("batch_norm_with_eps_off_by_a_tenth", "bn1", "eps", cnn, lambda: nn.BatchNorm2d(12, eps=1.1e-5))
# As in Keras.
keras = partial(nn.InstanceNorm2d, 8, eps=1e-3, affine=True)
normed("instance_norm_with_larger_eps", "norm1", "eps", autoencoder, keras)
# Two groups for four.
normed("group_norm_of_two_groups", "norm3", "number of groups", cnn, lambda: nn.GroupNorm(2, 16))


@method_of("blocks.1.norm1", "bug", "eps outside the root", transformer)
def eps_added_to_the_deviation(self, x: Tensor) -> Tensor:
    """eps is added to the standard deviation, not to the variance."""
    deviation = x.var(-1, correction=0, keepdim=True).sqrt() + self.eps
    return (x - x.mean(-1, keepdim=True)) / deviation * self.weight + self.bias


@method_of("blocks.0.norm2", "bug", "unbiased variance", transformer)
def layer_norm_by_unbiased_variance(self, x: Tensor) -> Tensor:
    """torch.var divides by n - 1 where LayerNorm divides by n = 24."""
    variance, mean = torch.var_mean(x, -1, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@method_of("layer1.0.bn1", "bug", "unbiased variance", resnet)
def batch_norm_by_unbiased_variance(self, x: Tensor) -> Tensor:
    """In training by the variance meant for the running one: n = N H W is large, so off by 1.5e-5."""
    if not self.training:
        return nn.BatchNorm2d.forward(self, x)
    variance, mean = torch.var_mean(x, (0, 2, 3))
    with torch.no_grad():
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance, self.momentum)
        self.num_batches_tracked += 1
    gain = self.weight * torch.rsqrt(variance + self.eps)
    return (x - mean[:, None, None]) * gain[:, None, None] + self.bias[:, None, None]


@method_of("blocks.0.norm1", "bug", "mean not subtracted", transformer)
def rms_norm_for_layer_norm(self, x: Tensor) -> Tensor:
    """RMSNorm in the place of LayerNorm."""
    return F.rms_norm(x, self.normalized_shape, self.weight, self.eps) + self.bias


@method_of("blocks.1.norm2", "bug", "normalised over the wrong axis", transformer)
def layer_norm_over_time(self, x: Tensor) -> Tensor:
    """The statistics run over the positions, not the channels."""
    variance, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
    return (x - mean) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@method_of("layer2.0.bn1", "bug", "statistics over half the batch", resnet)
def batch_norm_over_half_batches(self, x: Tensor) -> Tensor:
    """The batch goes through the BatchNorm in two chunks, each with its own statistics."""
    return torch.cat([nn.BatchNorm2d.forward(self, part) for part in x.chunk(2)])


@case("bug", "average over the padding", odd_sizes, module="pool2")
def average_counts_the_padding(model):
    """The zeros of the padding are counted, which is PyTorch's default and was not the reference's."""
    return replace(model, "pool2", nn.AvgPool2d(3, stride=2, padding=1))


@method_of("pool1", "bug", "maximum over the padding", odd_sizes, base=nn.Module)
def maximum_with_zeros_from_the_padding(self, x: Tensor) -> Tensor:
    """Padded to an even size with zeros, the maximum where all pixels at the border are negative."""
    x = F.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2))
    return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))


@method_of("", "bug", "flattened in another order", odd_sizes)
def features_flattened_channels_last(self, x: Tensor) -> Tensor:
    """The channels-last network forgets to go back before flattening."""
    x = self.pool2(self.conv2(self.act1(self.pool1(self.conv1(x)))))
    return self.fc(x.permute(0, 2, 3, 1).flatten(1))


@method_of("pool", "bug", "window off by one", cnn, base=nn.Module)
def maximum_over_three_of_four(self, x: Tensor) -> Tensor:
    """The maximum over slices forgets the fourth corner of the window."""
    corners = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2]
    return torch.stack(corners).amax(0)


@method_of("avgpool", "bug", "count off by one", resnet, base=nn.Module)
def mean_over_one_pixel_too_few(self, x: Tensor) -> Tensor:
    """The average divides by n - 1."""
    return x.sum((2, 3), keepdim=True) / (x.shape[2] * x.shape[3] - 1)
