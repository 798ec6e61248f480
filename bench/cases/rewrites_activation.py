"""True rewrites of activations and of pooling."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._rewritten import SAME
from bench.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


def _pool_by_reshape(x: Tensor) -> Tensor:
    n, c, h, w = x.shape
    return x.view(n, c, h // 2, 2, w // 2, 2).amax((3, 5))


@method_of("act3", SAME, "activation by formula", cnn, base=nn.Module)
def gelu_by_erf(self, x: Tensor) -> Tensor:
    """x / 2 (1 + erf(x / sqrt 2))."""
    return x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0)))


@method_of(("blocks.0.act", "blocks.1.act"), SAME, "activation by formula", transformer, base=nn.Module)
def gelu_by_normal_distribution(self, x: Tensor) -> Tensor:
    """x times the normal distribution function, in both blocks."""
    return x * torch.special.ndtr(x)


@method_of(("act1", "act2", "act3"), SAME, "activation by formula", autoencoder, base=nn.Module)
def silu_by_sigmoid(self, x: Tensor) -> Tensor:
    """x sigmoid(x) in all three places."""
    return x * torch.sigmoid(x)


@method_of("act", SAME, "activation by formula", two_inputs, base=nn.Module)
def tanh_by_sigmoid(self, x: Tensor) -> Tensor:
    """2 sigmoid(2x) - 1; the module is used twice in a step."""
    return 2 * torch.sigmoid(2 * x) - 1


@method_of("act1", SAME, "activation by formula", mlp, base=nn.Module)
def relu_by_mask(self, x: Tensor) -> Tensor:
    """x times (x > 0)."""
    return x * (x > 0)


class PoolByReshape(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return _pool_by_reshape(x)


@case(SAME, "max-pool by reshape", on=cnn)
def max_pool_before_relu_by_reshape(model: nn.Module) -> nn.Module:
    """The ReLU after the pooling, which commutes; the maximum of 2x2 blocks by ``amax``."""
    model.act1, model.pool = PoolByReshape(), nn.ReLU()
    return model


@method_of("pool", SAME, "max-pool by reshape", cnn, base=nn.Module)
def max_pool_by_reshape(self, x: Tensor) -> Tensor:
    """``amax`` shares the gradient of equal maxima: of zeros only, where the ReLU before lets none pass."""
    return _pool_by_reshape(x)


@method_of("pool", SAME, "max-pool by unfold", cnn, base=nn.Module)
def max_pool_by_unfold(self, x: Tensor) -> Tensor:
    """``F.unfold`` into 2x2 windows, then ``max``."""
    windows = F.unfold(x, 2, stride=2).unflatten(1, (x.shape[1], 4))
    return windows.max(2).values.unflatten(2, (x.shape[2] // 2, -1))


@method_of("avgpool", SAME, "mean as sum over count", resnet, base=nn.Module)
def average_pool_as_sum_over_count(self, x: Tensor) -> Tensor:
    """The mean of all pixels as their sum divided by how many they are."""
    return x.flatten(2).sum(2)[..., None, None] / (x.shape[2] * x.shape[3])


@in_place_of("", SAME, "mean as sum over count", two_inputs, "mean_of_signal_as_sum_over_count")
class _MeanBySum(nn.Module):
    """The functional mean in the network's own forward as a sum and a division."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.conv, self.table, self.act, self.joint = model.conv, model.table, model.act, model.joint

    def forward(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
        signal = self.act(self.conv(signal))
        pooled = signal.sum(2) / signal.shape[2]
        features = torch.cat([pooled, self.act(self.table(table))], 1)
        return {"logits": self.joint(features), "features": features}
