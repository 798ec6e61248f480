"""Networks of the same names in which one module computes otherwise."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import pair, squares
from bench.optimizers import UNSEEN
from bench.tasks import _classes, _task


class SoftPool(nn.Module):
    """Means over the pixels, weighted by a softmax of the values themselves."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)
        return (x * x.softmax(2)).sum(2)


class HandNorm(nn.BatchNorm2d):
    """Batch norm written out; the fault: the running variance is the one of the batch, not of its source."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            count = x[:, 0].numel()
            kept = var if self.fault else var * count / (count - 1)
            with torch.no_grad():
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(kept, self.momentum)
                self.num_batches_tracked += 1
        else:
            mean, var = self.running_mean, self.running_var
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class UnfoldedMax(nn.MaxPool2d):
    """Maxima of unfolded windows; the fault: zeros around the image, not minus infinity."""

    def forward(self, x: Tensor) -> Tensor:
        around = F.pad(x, (1, 1, 1, 1), value=0.0 if self.fault else -torch.inf)
        return around.unfold(2, 3, 2).unfold(3, 3, 2).flatten(4).max(4).values


class _GroupedByHand(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, mean: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.mean = mean
        return F.conv2d(x, weight, bias, padding=1, groups=2)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        back = F.conv_transpose2d(gradient, weight, padding=1, groups=2)
        patches = F.unfold(x, 3, padding=1).unflatten(1, (2, -1))
        of_weight = torch.einsum("ngop,ngip->goi", gradient.flatten(2).unflatten(1, (2, -1)), patches)
        of_bias = gradient.mean((0, 2, 3)) if ctx.mean else gradient.sum((0, 2, 3))
        return back, of_weight.reshape(weight.shape), of_bias, None


class OwnBackward(nn.Conv2d):
    """A custom function with its own backward; the fault: the bias takes the mean of its gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return _GroupedByHand.apply(x, self.weight, self.bias, self.fault)


class BorrowedNorm(nn.GroupNorm):
    """A batch norm over a batch of one; the fault: the scale no longer trains."""

    def forward(self, x: Tensor) -> Tensor:
        groups = x.reshape(1, len(x) * self.num_groups, -1)
        plain = F.batch_norm(groups, None, None, training=True, eps=self.eps).reshape(x.shape)
        scale = self.weight.data if self.fault else self.weight
        return torch.addcmul(self.bias[:, None, None], plain, scale[:, None, None])


class ConvolvedMean(nn.AvgPool2d):
    """Sums over windows divided by counts; the fault: the border counts."""

    def forward(self, x: Tensor) -> Tensor:
        ones = x.new_ones(x.shape[1], 1, 3, 3)
        sums = F.conv2d(x, ones, stride=2, padding=1, groups=x.shape[1])
        counts = F.conv2d(torch.ones_like(x[:1, :1]), ones[:1], stride=2, padding=1)
        return sums / (9 if self.fault else counts)


class ExponentialPool(SoftPool):
    """Weights from their logarithms; the fault: they pass through bfloat16."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(2)
        weights = (x - x.logsumexp(2, keepdim=True)).exp()
        weights = weights.bfloat16().to(x.dtype) if self.fault else weights
        return torch.einsum("ncp,ncp->nc", x, weights)


class Rep(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.wide, self.point = nn.Conv2d(width, width, 3, padding=1), nn.Conv2d(width, width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.wide(x) + self.point(x) + x)


class MergedRep(Rep):
    """All branches in one kernel, made at each call; the fault: the small one sits beside the middle."""

    def forward(self, x: Tensor) -> Tensor:
        unit = torch.eye(x.shape[1], dtype=x.dtype, device=x.device)[..., None, None]
        left = 2 if self.fault else 1
        kernel = self.wide.weight + F.pad(self.point.weight, (left, 2 - left, 1, 1))
        kernel = kernel + F.pad(unit, (1, 1, 1, 1))
        return F.conv2d(x, kernel, self.wide.bias + self.point.bias, padding=1).relu()


class StuffedUp(nn.ConvTranspose2d):
    """Zeros between the pixels and a plain convolution; the fault: its kernel is flipped one way only."""

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[2:]
        sparse = x.new_zeros(*x.shape[:2], 2 * height - 1, 2 * width - 1)
        sparse[:, :, ::2, ::2] = x
        kernel = self.weight.transpose(0, 1).flip((2,) if self.fault else (2, 3))
        return F.conv2d(sparse, kernel, self.bias, padding=2)


class DepthToSpace(nn.PixelShuffle):
    """Axes permuted by hand; the fault: the channels come last in the split, as in TensorFlow."""

    def forward(self, x: Tensor) -> Tensor:
        n, channels, height, width = x.shape
        if self.fault:
            parts = x.view(n, 2, 2, channels // 4, height, width).permute(0, 3, 4, 1, 5, 2)
        else:
            parts = x.view(n, channels // 4, 2, 2, height, width).permute(0, 1, 4, 2, 5, 3)
        return parts.reshape(n, channels // 4, 2 * height, 2 * width)


def _pooled() -> nn.Sequential:
    first = nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.LeakyReLU(0.3), nn.MaxPool2d(3, 2, 1)
    second = nn.Conv2d(12, 16, 3, padding=1, groups=2), nn.GroupNorm(4, 16), nn.GELU()
    last = nn.AvgPool2d(3, 2, 1, count_include_pad=False), SoftPool(), nn.Linear(16, 5)
    return nn.Sequential(*first, *second, *last)


def _enlarger() -> nn.Sequential:
    up = nn.ConvTranspose2d(8, 12, 4, stride=2, padding=1), nn.Tanh(), nn.PixelShuffle(2)
    return nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), Rep(8), *up, nn.Conv2d(3, 1, 3, padding=1))


pooled = _task("second_pooled", _pooled, lambda: (torch.randn(8, 3, 12, 12), _classes(8, 5)))
larger = _task("second_up", _enlarger, lambda: (torch.randn(4, 1, 6, 6), torch.randn(4, 1, 24, 24)), squares)
pair(pooled, HandNorm, "batch_norm_written_out", "running_variance_of_the_batch", "1", "buffer", at="1")
pair(pooled, UnfoldedMax, "maxima_of_unfolded_windows", "zeros_around_a_maximum", "3", at="3")
pair(pooled, OwnBackward, "grouped_with_own_backward", "bias_takes_a_mean", "4", "weight gradient", at="4")
pair(pooled, BorrowedNorm, "group_norm_by_batch_norm", "scale_no_longer_trains", "5", UNSEEN, at="5")
pair(pooled, ConvolvedMean, "average_by_convolution", "border_counts_in_the_average", "7", at="7")
NARROW = ("reduced_precision", "bug")
pair(
    pooled,
    ExponentialPool,
    "softmax_from_logarithms",
    "weights_pass_through_bfloat16",
    "8",
    at="8",
    bug=NARROW,
)
pair(larger, MergedRep, "branches_in_one_kernel", "small_kernel_beside_the_middle", ("1", "1.point"), at="1")
pair(larger, StuffedUp, "zeros_between_the_pixels", "kernel_flipped_one_way", "2", at="2")
pair(larger, DepthToSpace, "shuffle_by_permuted_axes", "shuffle_with_channels_last", "4", at="4")
