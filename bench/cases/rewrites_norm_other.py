"""True rewrites of LayerNorm, GroupNorm and InstanceNorm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, rewritten
from bench.tasks import autoencoder, cnn, dropout_transformer, transformer


class Affine(nn.Module):
    """The weights of a norm; subclasses normalise."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps
        self.groups = getattr(norm, "num_groups", 1)


class LayerNormByHand(Affine):
    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        var = centred.pow(2).mean(-1, keepdim=True)
        return self.weight * (centred * torch.rsqrt(var + self.eps)) + self.bias


def _group_norm(norm: nn.InstanceNorm2d) -> nn.GroupNorm:
    """As many groups as channels."""
    grouped = nn.GroupNorm(norm.num_features, norm.num_features, eps=norm.eps)
    grouped.load_state_dict(norm.state_dict())
    return grouped


@case(SAME, "LayerNorm by hand", on=transformer)
def layer_norm_by_hand(model: nn.Module) -> nn.Module:
    """All LayerNorms: centre, divide by the deviation, scale."""
    for name in ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"):
        rewritten(model, name, LayerNormByHand)
    return model


@in_place_of("blocks.1.norm2", SAME, "LayerNorm by hand", dropout_transformer, "layer_norm_one_pass")
class LayerNormOnePass(Affine):
    """The variance as E[x^2] - E[x]^2."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(-1, keepdim=True)
        var = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) / (var + self.eps).sqrt() * self.weight + self.bias


@in_place_of("blocks.0.norm1", SAME, "LayerNorm by another norm", transformer, "layer_norm_by_group_norm")
class LayerNormByGroupNorm(Affine):
    """``group_norm`` with one group on every token."""

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x.flatten(0, -2), 1, self.weight, self.bias, self.eps).view_as(x)


@in_place_of("norm", SAME, "LayerNorm, weights apart", transformer, "layer_norm_affine_apart")
class LayerNormThenAffine(Affine):
    """``layer_norm`` without weights, then scale and shift by ``addcmul``."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, F.layer_norm(x, x.shape[-1:], eps=self.eps), self.weight)


@in_place_of("norm3", SAME, "GroupNorm by hand", cnn, "group_norm_by_hand")
class GroupNormByHand(Affine):
    """``var_mean`` over each group of each image."""

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.view(x.shape[0], self.groups, -1)
        var, mean = torch.var_mean(grouped, -1, correction=0, keepdim=True)
        y = ((grouped - mean) / torch.sqrt(var + self.eps)).view_as(x)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


@in_place_of("norm3", SAME, "GroupNorm by another norm", cnn, "group_norm_by_batch_norm")
class GroupNormByBatchNorm(Affine):
    """``batch_norm`` with the groups of all images as channels."""

    def forward(self, x: Tensor) -> Tensor:
        grouped = x.reshape(1, x.shape[0] * self.groups, -1)
        y = F.batch_norm(grouped, None, None, training=True, eps=self.eps).view_as(x)
        return y * self.weight[:, None, None] + self.bias[:, None, None]


@case(SAME, "InstanceNorm by another norm", on=autoencoder)
def instance_norm_by_group_norm(model: nn.Module) -> nn.Module:
    """``GroupNorm`` with a group for each channel."""
    return rewritten(model, "norm1", _group_norm)


@in_place_of("norm1", SAME, "InstanceNorm by another norm", autoencoder, "instance_norm_by_batch_norm")
class InstanceNormByBatchNorm(Affine):
    """``batch_norm`` with the channels of all images as channels, the weights repeated."""

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        weight, bias = self.weight.repeat(n), self.bias.repeat(n)
        images = x.reshape(1, -1, *x.shape[2:])
        return F.batch_norm(images, None, None, weight, bias, training=True, eps=self.eps).view_as(x)


@in_place_of("norm1", SAME, "InstanceNorm by hand", autoencoder, "instance_norm_by_hand")
class InstanceNormByHand(Affine):
    """Centre and divide by the deviation of each image and channel."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean((2, 3), keepdim=True)
        deviation = (centred.square().mean((2, 3), keepdim=True) + self.eps).sqrt()
        return centred / deviation * self.weight.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)
