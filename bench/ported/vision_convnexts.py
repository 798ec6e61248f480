"""ConvNeXts: channels last with matrices for convs, or the weights of several blocks in one stack."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import UNSEEN
from bench.ported._vision_convnext import BLOCKS, CHANNEL_NORMS, ChannelsLast, Stacked, convnext


@case(SAME, "ported to channels last", convnext)
def convnext_with_channels_last(model: nn.Module) -> nn.Module:
    return ChannelsLast(model)


@case(SAME, "layers stacked", convnext)
def convnext_with_stacked_blocks(model: nn.Module) -> nn.Module:
    return Stacked(model)


@case("bug", "epsilon", convnext, module=CHANNEL_NORMS)
def convnext_with_the_default_epsilon(model: nn.Module, right: bool = False) -> nn.Module:
    """LayerNorm's epsilon is left at PyTorch's 1e-5, where the reference has 1e-6."""
    return ChannelsLast(model, eps=1e-6 if right else 1e-5)


@case("bug", "parameter made a buffer", convnext, module=BLOCKS, passes=UNSEEN)
def convnext_whose_scale_does_not_learn(model: nn.Module, right: bool = False) -> nn.Module:
    """The layer scale is a buffer, so that it is not trained."""
    return ChannelsLast(model, frozen=not right)
