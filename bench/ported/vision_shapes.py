"""Ports that turn on the order of elements."""

from __future__ import annotations

from torch import nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.ported._vision_shapes import ConvMixer, DepthToSpace, KerasVGG, mixer, upscaler, vgg


@case(SAME, "flattened channels last", vgg)
def vgg_in_keras(model: nn.Module) -> nn.Module:
    return KerasVGG(model)


@case("bug", "flattened in another order", vgg, module=("flatten", "classifier.0", ""))
def vgg_flattened_with_the_old_order(model: nn.Module, right: bool = False) -> nn.Module:
    """The map is flattened channels last; the dense weights still want channels first."""
    return KerasVGG(model, reordered=right)


@case(SAME, "channels reordered", upscaler)
def upscaler_by_depth_to_space(model: nn.Module) -> nn.Module:
    return DepthToSpace(model)


@case("bug", "order of channels", upscaler, module=("shuffle", "conv2"))
def upscaler_with_the_channels_as_they_were(model: nn.Module, right: bool = False) -> nn.Module:
    """Depth-to-space reads the colour last; the conv's channels have it first."""
    return DepthToSpace(model, reordered=right)


@case(SAME, "convs for matrices", mixer)
def mixer_of_convs(model: nn.Module) -> nn.Module:
    return ConvMixer(model)
