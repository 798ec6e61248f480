"""True rewrites of activations and of pooling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


class Elementwise(nn.Module):
    """A function without weights as a module."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def _gelu_by_erf(x: Tensor) -> Tensor:
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


def _gelu_by_normal(x: Tensor) -> Tensor:
    return x * torch.special.ndtr(x)


def _silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def _tanh(x: Tensor) -> Tensor:
    return 2 * torch.sigmoid(2 * x) - 1


def _relu(x: Tensor) -> Tensor:
    return x * (x > 0)


def _mean_of_pixels(x: Tensor) -> Tensor:
    return x.flatten(2).sum(2)[..., None, None] / (x.shape[2] * x.shape[3])


def _pool_by_reshape(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).amax((3, 5))


def _pool_by_unfold(x: Tensor) -> Tensor:
    windows = F.unfold(x, 2, stride=2).unflatten(1, (x.shape[1], 4))
    return windows.max(2).values.unflatten(2, (x.shape[2] // 2, -1))


class _MeanBySum(nn.Module):
    """``TwoInputs`` with the mean over the signal as sum / length."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.conv, self.table, self.act, self.joint = model.conv, model.table, model.act, model.joint

    def forward(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
        signal = self.act(self.conv(signal))
        pooled = signal.sum(2) / signal.shape[2]
        features = torch.cat([pooled, self.act(self.table(table))], 1)
        return {"logits": self.joint(features), "features": features}


@case(SAME, "activation by formula", on=cnn)
def gelu_by_erf(model: nn.Module) -> nn.Module:
    """x / 2 (1 + erf(x / sqrt 2))."""
    return replace(model, "act3", Elementwise(_gelu_by_erf))


@case(SAME, "activation by formula", on=transformer)
def gelu_by_normal_distribution(model: nn.Module) -> nn.Module:
    """x times the normal distribution function, in both blocks."""
    for block in model.blocks:
        block.act = Elementwise(_gelu_by_normal)
    return model


@case(SAME, "activation by formula", on=autoencoder)
def silu_by_sigmoid(model: nn.Module) -> nn.Module:
    """x sigmoid(x) in all three places."""
    for name in ("act1", "act2", "act3"):
        replace(model, name, Elementwise(_silu))
    return model


@case(SAME, "activation by formula", on=two_inputs)
def tanh_by_sigmoid(model: nn.Module) -> nn.Module:
    """2 sigmoid(2x) - 1; the module is used twice in a step."""
    return replace(model, "act", Elementwise(_tanh))


@case(SAME, "activation by formula", on=mlp)
def relu_by_mask(model: nn.Module) -> nn.Module:
    """x times (x > 0)."""
    return replace(model, "act1", Elementwise(_relu))


@case(SAME, "max-pool by reshape", on=cnn)
def max_pool_before_relu_by_reshape(model: nn.Module) -> nn.Module:
    """The ReLU after the pooling, which commutes; the maximum of 2x2 blocks by ``amax``."""
    model.act1, model.pool = Elementwise(_pool_by_reshape), nn.ReLU()
    return model


@case(SAME, "max-pool by reshape", on=cnn)
def max_pool_by_reshape(model: nn.Module) -> nn.Module:
    """``amax`` shares the gradient of equal maxima: of zeros only, where the ReLU before lets none pass."""
    return replace(model, "pool", Elementwise(_pool_by_reshape))


@case(SAME, "max-pool by unfold", on=cnn)
def max_pool_by_unfold(model: nn.Module) -> nn.Module:
    """``F.unfold`` into 2x2 windows, then ``max``."""
    return replace(model, "pool", Elementwise(_pool_by_unfold))


@case(SAME, "mean as sum over count", on=resnet)
def average_pool_as_sum_over_count(model: nn.Module) -> nn.Module:
    """The mean of all pixels as their sum divided by how many they are."""
    return replace(model, "avgpool", Elementwise(_mean_of_pixels))


@case(SAME, "mean as sum over count", on=two_inputs)
def mean_of_signal_as_sum_over_count(model: nn.Module) -> nn.Module:
    """The functional mean in the network's own forward as a sum and a division."""
    return _MeanBySum(model)
