"""Inverted residuals on one level of names; a UNet as a nest of levels."""

from __future__ import annotations

from torch import nn

from bench.case import GRADIENTS, case
from bench.cases._rewritten import SAME
from bench.ported._vision_mobile import SQUEEZES, MobileOfTimm, Recursive, mobile, unet

POOLED = (*SQUEEZES, *(f"{name}.avgpool" for name in SQUEEZES))


@case(SAME, "blocks flattened", mobile)
def mobile_of_flat_blocks(model: nn.Module) -> nn.Module:
    return MobileOfTimm(model)


@case("bug", "activation", mobile, module=tuple(f"{name}.gate" for name in SQUEEZES))
def mobile_with_the_hard_sigmoid_of_keras(model: nn.Module, right: bool = False) -> nn.Module:
    """The gate is 0.2 x + 0.5, Keras's old hard sigmoid, for x / 6 + 0.5."""
    return MobileOfTimm(model, slope=1 / 6 if right else 0.2)


@case("bug", "detached branch", mobile, module=POOLED, passes=GRADIENTS)
def mobile_whose_gate_is_detached(model: nn.Module, right: bool = False) -> nn.Module:
    """The squeeze pools detached features: no gradient goes through the gate."""
    return MobileOfTimm(model, detached=not right)


@case(SAME, "nested levels", unet)
def unet_of_levels(model: nn.Module) -> nn.Module:
    return Recursive(model)


@case("bug", "aligned corners", unet, module="up2")
def unet_with_aligned_corners(model: nn.Module, right: bool = False) -> nn.Module:
    """The bilinear upsampling aligns the corners."""
    return Recursive(model, corners=not right)
