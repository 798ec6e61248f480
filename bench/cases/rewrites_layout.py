"""True rewrites of how numbers lie: memory formats, permuted channels, transposed images."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, copied
from bench.tasks import autoencoder, cnn, mlp, resnet, transformer


def _shuffled(n: int) -> Tensor:
    return torch.randperm(n, generator=torch.Generator().manual_seed(5))


@torch.no_grad()
def _permute(tensors: list[Tensor], order: Tensor, dim: int = 0) -> None:
    for tensor in tensors:
        tensor.copy_(tensor.index_select(dim, order))


@case(SAME, "channels last", on=cnn)
def channels_last_weights(model: nn.Module) -> nn.Module:
    """``model.to(memory_format=channels_last)``; the inputs are as they come."""
    return model.to(memory_format=torch.channels_last)


@in_place_of("", SAME, "channels last", resnet, "channels_last_weights_and_inputs")
class ChannelsLast(nn.Module):
    """Weights and inputs channels-last, the network one module deeper."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x.contiguous(memory_format=torch.channels_last))


@case(SAME, "hidden units permuted", on=mlp)
def hidden_units_permuted(model: nn.Module) -> nn.Module:
    """The units of both hidden layers in another order, the next layer's columns with them."""
    for layer, following in ((model.fc1, model.fc2), (model.fc2, model.fc3)):
        order = _shuffled(layer.out_features)
        _permute([layer.weight, layer.bias], order)
        _permute([following.weight], order, dim=1)
    return model


@case(SAME, "hidden units permuted", on=cnn)
def hidden_channels_permuted(model: nn.Module) -> nn.Module:
    """The channels of conv1 in another order, with its BatchNorm and the inputs of conv2."""
    order, norm = _shuffled(12), model.bn1
    _permute([model.conv1.weight, model.conv1.bias, norm.weight, norm.bias], order)
    _permute([norm.running_mean, norm.running_var], order)
    _permute([model.conv2.weight], order, dim=1)
    return model


@case(SAME, "hidden units permuted", on=transformer)
def mlp_units_permuted(model: nn.Module) -> nn.Module:
    """The hidden units of one block's MLP in another order."""
    block, order = model.blocks[0], _shuffled(48)
    _permute([block.up.weight, block.up.bias], order)
    _permute([block.down.weight], order, dim=1)
    return model


@case(SAME, "hidden units permuted", on=transformer)
def heads_permuted(model: nn.Module) -> nn.Module:
    """The three heads of one block in another order, the columns of the output projection with them."""
    attention, order = model.blocks[1].attention, torch.arange(24).view(3, 8).roll(1, 0).flatten()
    rows = torch.cat([order, order + 24, order + 48])
    _permute([attention.qkv.weight, attention.qkv.bias], rows)
    _permute([attention.out.weight], order, dim=1)
    return model


@in_place_of("down2", SAME, "image transposed", autoencoder, "conv_on_transposed_image")
class TransposedImage(nn.Module):
    """Rows and columns exchanged before and after the conv, its kernel stored transposed."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.conv = conv
        self.conv.weight = copied(conv.weight.mT)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x.mT.contiguous()).mT
