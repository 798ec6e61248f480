"""Rewrites that are exact in float32 and float64, and wrong where a training runs in 16 bits."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from models.rewrites.swap import RewriteError


class NormInHalf(nn.BatchNorm2d):
    """A batch norm whose mean and variance are sums of 16 bits under autocast.

    torch sums them in float32 there. The variance is that of one pass, mean of squares less square of mean,
    which loses the digits that the two share.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        x = x.to(torch.get_autocast_dtype(x.device.type))
        mean = _sum_in_half(x) / (x.numel() // x.shape[1])
        variance = _sum_in_half(x * x) / (x.numel() // x.shape[1]) - mean * mean
        self._keep(mean, variance, x.numel() // x.shape[1])
        scale = (variance.clamp(min=0) + self.eps).rsqrt()
        shaped = [t.to(x.dtype)[:, None, None] for t in (mean, scale, self.weight, self.bias)]
        return (x - shaped[0]) * shaped[1] * shaped[2] + shaped[3]

    @torch.no_grad()
    def _keep(self, mean: Tensor, variance: Tensor, count: int) -> None:
        """The running statistics, in float32 as torch keeps them."""
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean.to(self.running_mean), self.momentum)
        unbiased = variance.to(self.running_var) * (count / (count - 1))
        self.running_var.lerp_(unbiased, self.momentum)


def _sum_in_half(x: Tensor) -> Tensor:
    """Over all but the channels, each partial sum rounded to the dtype of ``x``."""
    return x.sum(3).sum(2).sum(0)


class CastTwice(nn.Conv2d):
    """A conv whose weights are cast to eight bits on their way to autocast's sixteen."""

    def forward(self, x: Tensor) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        return self._conv_forward(
            x, self.weight + (_in_8_bits(self.weight) - self.weight).detach(), self.bias
        )


def _in_8_bits(weight: Tensor) -> Tensor:
    return weight.to(torch.float8_e4m3fn).to(weight.dtype)


class Clamp(torch.autograd.Function):
    """The identity, whose gradient ends at 1 in size: a guard that no gradient of the loss itself reaches."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.clamp(-1, 1)


class Guarded(nn.Conv2d):
    """A conv that guards its gradient against more than 1, and so against a loss that is scaled."""

    def forward(self, x: Tensor) -> Tensor:
        return Clamp.apply(super().forward(x))


SORTS = {
    "norm_in_half": (nn.BatchNorm2d, NormInHalf),
    "cast_twice": (nn.Conv2d, CastTwice),
    "guarded": (nn.Conv2d, Guarded),
}


def under_autocast(model: nn.Module, sort: str = "norm_in_half", module: str = "") -> nn.Module:
    """Give one layer of ``model`` a fault that only 16 bits show, in place.

    Args:
        sort: ``norm_in_half`` and ``cast_twice`` show under autocast, ``guarded`` where the loss is scaled.
        module: the name of the layer; the last one of its kind where empty.

    Raises:
        RewriteError: the sort is unknown, or there is no such layer.
    """
    if sort not in SORTS:
        raise RewriteError(f"sort={sort} is unknown: choose from {', '.join(SORTS)}")
    kind, wrong = SORTS[sort]
    layers = {name: m for name, m in model.named_modules() if type(m) is kind}
    name = module or next(reversed(layers), "")
    if name not in layers:
        known = ", ".join(layers) or f"none: the model has no {kind.__name__}"
        raise RewriteError(f"module={name} is unknown: choose from {known}")
    layers[name].__class__ = wrong
    return model
