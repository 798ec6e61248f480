"""ResNets: kernels [H, W, in, out] and channels last, or functions of a flat dict of weights."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._vision_resnet import NORMS, Flat, Flax, resnet


@case(SAME, "ported to channels last", resnet)
def resnet_in_flax(model: nn.Module) -> nn.Module:
    return Flax(model)


@case(SAME, "ported to functions", resnet)
def resnet_of_a_flat_dict(model: nn.Module) -> nn.Module:
    return Flat(model)


@case("bug", "same padding", resnet, module="layer2.0.conv1")
def resnet_padded_as_tensorflow_pads(model: nn.Module, right: bool = False) -> nn.Module:
    """The strided conv pads 'SAME': nothing before, one after, where the weights expect one on each side."""
    return Flax(model, same=not right)


@case("bug", "momentum convention", resnet, module=NORMS, passes="buffer")
def resnet_keeping_a_tenth(model: nn.Module, right: bool = False) -> nn.Module:
    """The momentum 0.1 of PyTorch is taken for the share of the running statistics that stays."""
    return Flax(model, keep=0.9 if right else 0.1)


@case("bug", "variance in the statistics", resnet, module=NORMS, passes="buffer")
def resnet_with_biased_running_variance(model: nn.Module, right: bool = False) -> nn.Module:
    """The running variance gets the biased variance, as in Flax, where PyTorch's gets the unbiased."""
    return Flax(model, unbiased=right)
