"""True rewrites of BatchNorm, with its running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME, rewritten
from experiments.calibration.tasks import cnn, resnet


def _fill(norm: nn.Module, source: nn.BatchNorm2d) -> nn.Module:
    """``norm`` with the weights and running statistics of ``source``."""
    norm.load_state_dict(source.state_dict())
    return norm


class HandBatchNorm(nn.Module):
    """BatchNorm written out; the variance in two passes."""

    def __init__(self, channels: int, eps: float = 1e-5, momentum: float = 0.1):
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(channels))
        self.bias = nn.Parameter(torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0))

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean((0, 2, 3))
        return mean, (x - mean[:, None, None]).square().mean((0, 2, 3))

    @torch.no_grad()
    def track(self, mean: Tensor, var: Tensor, count: int) -> None:
        """Move the running statistics; the running variance is the unbiased one."""
        self.num_batches_tracked += 1
        self.running_mean.mul_(1 - self.momentum).add_(mean, alpha=self.momentum)
        self.running_var.mul_(1 - self.momentum).add_(var, alpha=self.momentum * count / (count - 1))

    def normalise(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        standard = (x - mean[:, None, None]) / torch.sqrt(var + self.eps)[:, None, None]
        return self.weight[:, None, None] * standard + self.bias[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return self.normalise(x, self.running_mean, self.running_var)
        mean, var = self.moments(x)
        self.track(mean, var, x.numel() // x.shape[1])
        return self.normalise(x, mean, var)


class OnePassBatchNorm(HandBatchNorm):
    """The variance as E[x^2] - E[x]^2."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean((0, 2, 3))
        return mean, (x * x).mean((0, 2, 3)) - mean * mean


class ScaleAndShift(HandBatchNorm):
    """Weight, bias and moments are first made into one scale and one shift a channel."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        var, mean = torch.var_mean(x, (0, 2, 3), correction=0)
        return mean, var

    def normalise(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        scale = self.weight * torch.rsqrt(var + self.eps)
        return x * scale[:, None, None] + (self.bias - mean * scale)[:, None, None]


class _Standardise(torch.autograd.Function):
    """Zero mean and unit variance over all but the channels, with the backward from the paper."""

    @staticmethod
    def forward(ctx, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> Tensor:
        inverse = torch.rsqrt(var + eps)[:, None, None]
        standard = (x - mean[:, None, None]) * inverse
        ctx.save_for_backward(standard, inverse)
        return standard

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        standard, inverse = ctx.saved_tensors
        over = (0, 2, 3)
        along = (gradient * standard).mean(over, keepdim=True)
        centred = gradient - gradient.mean(over, keepdim=True) - standard * along
        return centred * inverse, None, None, None


class OwnBackwardBatchNorm(HandBatchNorm):
    def normalise(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if not self.training:
            return super().normalise(x, mean, var)
        standard = _Standardise.apply(x, mean.detach(), var.detach(), self.eps)
        return self.weight[:, None, None] * standard + self.bias[:, None, None]


class AffineApart(nn.Module):
    """BatchNorm without weights, then the weights."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        self.norm = nn.BatchNorm2d(norm.num_features, affine=False)
        self.norm.load_state_dict(dict(norm.named_buffers()))
        self.scale, self.shift = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift[:, None, None], self.norm(x), self.scale[:, None, None])


class AsOneDimension(nn.BatchNorm1d):
    """BatchNorm1d on the pixels in a row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2)).view_as(x)


@case(SAME, "BatchNorm by hand", on=cnn)
def batch_norm_two_pass(model: nn.Module) -> nn.Module:
    """Mean, then the mean of squared differences; running statistics by hand."""
    return rewritten(model, "bn1", lambda norm: _fill(HandBatchNorm(12), norm))


@case(SAME, "BatchNorm by hand", on=resnet)
def batch_norm_one_pass(model: nn.Module) -> nn.Module:
    """The variance as E[x^2] - E[x]^2."""
    return rewritten(model, "layer1.0.bn2", lambda norm: _fill(OnePassBatchNorm(8), norm))


@case(SAME, "BatchNorm by hand", on=cnn)
def batch_norm_scale_and_shift(model: nn.Module) -> nn.Module:
    """One scale and one shift a channel, as at inference."""
    return rewritten(model, "bn2", lambda norm: _fill(ScaleAndShift(16), norm))


@case(SAME, "BatchNorm with its own backward", on=resnet)
def batch_norm_with_own_backward(model: nn.Module) -> nn.Module:
    """An ``autograd.Function`` with the gradient through mean and variance written out."""
    return rewritten(model, "layer2.0.bn1", lambda norm: _fill(OwnBackwardBatchNorm(16), norm))


@case(SAME, "BatchNorm, weights apart", on=cnn)
def batch_norm_affine_apart(model: nn.Module) -> nn.Module:
    """``BatchNorm2d(affine=False)``, then scale and shift by ``addcmul``."""
    return rewritten(model, "bn1", AffineApart)


@case(SAME, "BatchNorm in another dimension", on=resnet)
def batch_norm_2d_as_1d(model: nn.Module) -> nn.Module:
    """``BatchNorm1d`` on flattened pixels."""
    return rewritten(model, "bn1", lambda norm: _fill(AsOneDimension(8), norm))


@case(SAME, "BatchNorm by hand", on=cnn)
def batch_norm_all_by_hand(model: nn.Module) -> nn.Module:
    """Both BatchNorms of the network written out, one in each way."""
    rewritten(model, "bn1", lambda norm: _fill(OnePassBatchNorm(12), norm))
    return rewritten(model, "bn2", lambda norm: _fill(HandBatchNorm(16), norm))
