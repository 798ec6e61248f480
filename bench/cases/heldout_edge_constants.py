"""Right, but suspicious: constants in float32, more precision than before, statistics got another way."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of, method_of
from bench.cases._heldout_images import transfer
from bench.cases._heldout_sequences import MaskedEncoder, Temporal, masked_encoder, temporal
from bench.cases._heldout_tasks import InvertedResidual, mobile, preact
from bench.cases._rewritten import SAME
from bench.surgery import recast

ROUNDED = ("round_off", "reduced_precision")


@method_of(("block1.excite", "block2.excite"), ROUNDED, "constant in float32", mobile)
def hard_sigmoid_by_relu6(self, x: Tensor) -> Tensor:
    """Exact in both dtypes; it is the library's own hard sigmoid whose backward takes 1/6 in float32."""
    weights = self.expand(F.relu(self.reduce(x.mean((2, 3), keepdim=True))))
    return x * (F.relu6(weights + 3) / 6)


@in_place_of("backbone", ROUNDED, "BatchNorm folded into the conv", transfer, "frozen_norms_folded_once")
class _FoldedOnce(nn.Module):
    """The library folds the frozen norms into the convs for good, in the dtype in which they were loaded."""

    def __init__(self, backbone: nn.Sequential):
        super().__init__()
        pairs = [(backbone[0], backbone[1]), (backbone[3], backbone[4])]
        self.convs = nn.ModuleList(torch.nn.utils.fuse_conv_bn_eval(c.eval(), b.eval()) for c, b in pairs)
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.convs[1](F.relu(self.convs[0](x), inplace=True)), inplace=True)


@case(ROUNDED, "table in another dtype", on=masked_encoder)
def positions_computed_in_the_dtype_of_the_network(model: nn.Module) -> nn.Module:
    """The table of positions is computed in the dtype of the embeddings, where a float32 one was loaded."""

    class Computed(MaskedEncoder):
        @property
        def position(self) -> Tensor:
            places = torch.arange(20).to(self.embed.weight)
            rates = torch.exp(torch.arange(0, 16, 2).to(places) * (-math.log(10000.0) / 16))
            angles = places[:, None] * rates
            return torch.stack([angles.sin(), angles.cos()], -1).reshape(20, 16)

    del model.position
    return recast(model, "", Computed)


@case(ROUNDED, "constant in float32", on=temporal)
def counts_as_float32_reciprocals(model: nn.Module) -> nn.Module:
    """The division by the count is a multiplication by a table of reciprocals, made in float32."""

    class Reciprocal(Temporal):
        def past(self, x: Tensor) -> Tensor:
            return torch.cumsum(x, -1) * self.shares[: x.shape[2]]

    model.register_buffer("shares", 1 / torch.arange(1, 65), persistent=False)
    return recast(model, "", Reciprocal)


@method_of("", SAME, "more precision than before", preact)
def mean_in_float64(self, x: Tensor) -> Tensor:
    """The mean over pixels and the last layer are computed in float64, whatever the network's dtype."""
    y = F.relu(self.norm(self.block2(self.block1(self.stem(x)))))
    mean = y.double().mean((2, 3))
    return F.linear(mean, self.fc.weight.double(), self.fc.bias.double()).to(x.dtype)


@in_place_of(
    ("block1", "block2"),
    "round_off",
    "statistics without the result",
    mobile,
    "statistics_from_the_inputs_covariance",
)
class StatisticsFromTheInputsCovariance(InvertedResidual):
    """Mean and variance behind a 1x1 conv come from the mean and covariance of what goes into it."""

    def expanded(self, x: Tensor) -> Tensor:
        bn, weight = self.bn1, self.expand.weight.flatten(1)
        if not self.training:
            return bn(self.expand(x))
        rows = x.permute(0, 2, 3, 1).flatten(0, 2)
        center = rows.mean(0)
        covariance = (rows - center).T @ (rows - center) / len(rows)
        mean, variance = weight @ center, torch.einsum("oi,ij,oj->o", weight, covariance, weight)
        with torch.no_grad():
            bn.running_mean.lerp_(mean, bn.momentum)
            bn.running_var.lerp_(variance * (len(rows) / (len(rows) - 1)), bn.momentum)
            bn.num_batches_tracked += 1
        scale = bn.weight * (variance + bn.eps).rsqrt()
        kernel = (scale[:, None] * weight)[..., None, None]
        return F.conv2d(x, kernel, bn.bias - scale * mean)

    def forward(self, x: Tensor) -> Tensor:
        y = self.excite(self.act2(self.bn2(self.depthwise(self.act1(self.expanded(x))))))
        y = self.bn3(self.project(y))
        return x + y if self.residual else y
