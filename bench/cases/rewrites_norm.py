"""True rewrites of BatchNorm, with its running statistics."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, rewritten
from bench.tasks import cnn, resnet


@in_place_of("bn1", SAME, "BatchNorm by hand", cnn, "batch_norm_two_pass")
class HandBatchNorm(nn.Module):
    """BatchNorm written out; the variance in two passes."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        self.eps, self.momentum = norm.eps, norm.momentum
        self.weight, self.bias = norm.weight, norm.bias
        for name, buffer in norm.named_buffers():
            self.register_buffer(name, buffer)

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


@in_place_of("layer1.0.bn2", SAME, "BatchNorm by hand", resnet, "batch_norm_one_pass")
class OnePassBatchNorm(HandBatchNorm):
    """The variance as E[x^2] - E[x]^2."""

    def moments(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean = x.mean((0, 2, 3))
        return mean, (x * x).mean((0, 2, 3)) - mean * mean


@in_place_of("bn2", SAME, "BatchNorm by hand", cnn, "batch_norm_scale_and_shift")
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


@in_place_of("layer2.0.bn1", SAME, "BatchNorm with its own backward", resnet, "batch_norm_with_own_backward")
class OwnBackwardBatchNorm(HandBatchNorm):
    """The gradient through mean and variance written out."""

    def normalise(self, x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        if not self.training:
            return super().normalise(x, mean, var)
        standard = _Standardise.apply(x, mean.detach(), var.detach(), self.eps)
        return self.weight[:, None, None] * standard + self.bias[:, None, None]


@in_place_of("bn1", SAME, "BatchNorm in another dimension", resnet, "batch_norm_2d_as_1d")
class AsOneDimension(nn.BatchNorm1d):
    """BatchNorm1d on the pixels in a row."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__(norm.num_features)
        self.load_state_dict(norm.state_dict())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.flatten(2)).view_as(x)


@in_place_of("bn1", SAME, "BatchNorm, weights apart", cnn, "batch_norm_affine_apart")
class AffineApart(nn.Module):
    """``BatchNorm2d(affine=False)``, then scale and shift by ``addcmul``."""

    def __init__(self, norm: nn.BatchNorm2d):
        super().__init__()
        self.norm = nn.BatchNorm2d(norm.num_features, affine=False)
        self.norm.load_state_dict(dict(norm.named_buffers()))
        self.scale, self.shift = norm.weight, norm.bias

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.shift[:, None, None], self.norm(x), self.scale[:, None, None])


@case(SAME, "BatchNorm by hand", on=cnn)
def batch_norm_all_by_hand(model: nn.Module) -> nn.Module:
    """Both BatchNorms of the network written out, one in each way."""
    rewritten(model, "bn1", OnePassBatchNorm)
    return rewritten(model, "bn2", HandBatchNorm)
