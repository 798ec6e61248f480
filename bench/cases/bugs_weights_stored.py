"""Initial weights that went through another format: fewer bits, a grid, a threshold."""

from __future__ import annotations

import torch

from bench.case import case
from bench.tasks import autoencoder, mlp, resnet, transformer


@case("bug", "weights through bfloat16", mlp, module="fc3")
@torch.no_grad()
def linear_weights_through_bfloat16(model):
    """The weights of one layer were once stored in bfloat16."""
    model.fc3.weight.copy_(model.fc3.weight.bfloat16())
    return model


@case("bug", "weights through float16", resnet, module="layer2.0.conv1")
@torch.no_grad()
def conv_weights_through_float16(model):
    """The weights of one conv were once stored in float16."""
    model.layer2[0].conv1.weight.copy_(model.layer2[0].conv1.weight.half())
    return model


@case("bug", "weights through eight bits", autoencoder, module="down2")
@torch.no_grad()
def conv_weights_through_eight_bits(model):
    """The weights were once quantised to a grid of 255 values."""
    weight = model.down2.weight
    scale = weight.abs().max() / 127
    weight.copy_((weight / scale).round() * scale)
    return model


@case("bug", "small weights set to zero", transformer, module="blocks.1.down")
@torch.no_grad()
def small_weights_pruned(model):
    """Weights below 1e-3 are zero, as in a checkpoint that was pruned."""
    weight = model.blocks[1].down.weight
    weight[weight.abs() < 1e-3] = 0
    return model
