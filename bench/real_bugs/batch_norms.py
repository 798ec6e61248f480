"""Batch norms: their momentum, and how they count where a batch lies on several devices."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.autograd import Function

from bench.real_bugs import real_bug
from bench.tasks import cnn


@real_bug(
    "batch_norm_with_the_momentum_of_tensorflow",
    "https://github.com/pytorch/vision/issues/8250",
    "torchvision 0.16 (MaxViT)",
    at=("bn1", "bn2"),
    on=cnn,
    passes=("buffer", "eval"),
)
def momentum(norm: nn.BatchNorm2d, mended: bool) -> nn.Module:
    """TensorFlow's momentum, 1 - m, was handed to torch, which wants m."""
    twin = nn.BatchNorm2d(norm.num_features, momentum=1 - 0.9 if mended else 0.9)
    twin.load_state_dict(norm.state_dict())
    return twin


class Shards(nn.BatchNorm2d):
    """The batch lies in parts of five and the rest, as on two devices."""

    def moments(self, x: Tensor, weighted: bool) -> tuple[Tensor, Tensor]:
        parts = [part.transpose(0, 1).flatten(1) for part in (x[:5], x[5:]) if len(part)]
        counts = [part.shape[1] if weighted else 1 for part in parts]
        means = sum(c * p.mean(1) for c, p in zip(counts, parts, strict=True)) / sum(counts)
        squares = sum(c * p.square().mean(1) for c, p in zip(counts, parts, strict=True)) / sum(counts)
        return means, squares - means.square()

    def track(self, mean: Tensor, var: Tensor, count: int) -> None:
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(var * count / (count - 1), self.momentum)


@real_bug(
    "mean_of_the_means_of_unequal_shards",
    "https://github.com/PaddlePaddle/Paddle/issues/32464",
    "Paddle before April 2021 (sync_batch_norm)",
    at=("bn1", "bn2"),
    on=cnn,
)
def sync_means(norm: nn.BatchNorm2d, mended: bool) -> nn.Module:
    """Synchronised batch norm averages the devices' means as if all had equally many samples."""
    norm.__class__ = type("SyncMeans", (SyncMeans,), {"mended": mended})
    return norm


class SyncMeans(Shards):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        mean, var = self.moments(x, self.mended)
        self.track(mean, var, x.numel() // x.shape[1])
        scale = self.weight * (var + self.eps).rsqrt()
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class SyncNorm(Function):
    """Right forward; the backward pass averages the parts' means of the gradient, by counts or not."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, mean: Tensor, var: Tensor, mended: bool) -> Tensor:
        scale = (var + 1e-5).rsqrt()
        normed = (x - mean[:, None, None]) * scale[:, None, None]
        ctx.save_for_backward(normed, weight, scale)
        ctx.mended = mended
        return normed * weight[:, None, None]

    @staticmethod
    def backward(ctx, gradient: Tensor):
        normed, weight, scale = ctx.saved_tensors
        parts = [p for p in (slice(0, 5), slice(5, None)) if len(gradient[p])]
        share = [len(gradient[p]) / len(gradient) if ctx.mended else 1 / len(parts) for p in parts]

        def over(values: Tensor) -> Tensor:
            return sum(s * values[p].mean((0, 2, 3)) for s, p in zip(share, parts, strict=True))[
                :, None, None
            ]

        for_x = gradient - over(gradient) - normed * over(gradient * normed)
        return for_x * (weight * scale)[:, None, None], (gradient * normed).sum((0, 2, 3)), None, None, None


@real_bug(
    "gradient_means_of_unequal_shards",
    "https://github.com/pytorch/pytorch/pull/36382",
    "torch 1.5 release candidates (SyncBatchNorm)",
    at=("bn1", "bn2"),
    on=cnn,
    passes=("input gradient", "weight gradient"),
)
class SyncBackward(Shards):
    """The statistics count each device's samples, the backward pass's means of the gradient do not."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        with torch.no_grad():
            mean, var = self.moments(x, True)
        self.track(mean, var, x.numel() // x.shape[1])
        return SyncNorm.apply(x, self.weight, mean, var, self.mended) + self.bias[:, None, None]
