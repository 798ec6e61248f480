"""Candidates that compute the same function of their weights but start from other weights or buffers."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.case import case
from bench.cases._bug_parts import Halves, ManualAttention, rows_of
from bench.surgery import replace
from bench.tasks import SelfAttention, autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


@case("bug", "one half initialised anew", mlp, module="fc2")
def second_linear_half_initialised_anew(model):
    """Only the first half gets the weights of the reference."""
    halves = Halves(model.fc2)
    halves.second.reset_parameters()
    return replace(model, "fc2", halves)


@case("bug", "one half initialised anew", resnet, module="layer3.0.conv2")
def second_conv_half_initialised_anew(model):
    """Only the first half gets the weights of the reference."""
    halves = Halves(model.layer3[0].conv2)
    halves.second.reset_parameters()
    return replace(model, "layer3.0.conv2", halves)


@torch.no_grad()
def _element(weight: Tensor, index: tuple[int, ...], value: float) -> None:
    """One element of ``weight`` gets ``value``."""
    weight[index] = value


@case("bug", "one weight off", autoencoder, module="up1")
def one_weight_off_by_a_millionth(model):
    """One element is 1e-6 too large: some hundred ulps."""
    _element(model.up1.weight, (5, 4, 1, 2), model.up1.weight[5, 4, 1, 2].item() + 1e-6)
    return model


@case("bug", "one weight off", mlp, module="fc3")
def one_bias_printed_to_four_digits(model):
    """The weights went through a text file; one bias was rounded to four digits."""
    _element(model.fc3.bias, (2,), round(model.fc3.bias[2].item(), 4))
    return model


@case("bug", "sign of one weight", transformer, module="blocks.0.up")
def sign_of_one_linear_weight(model):
    """One of 1,152 weights has the other sign."""
    _element(model.blocks[0].up.weight, (7, 11), -model.blocks[0].up.weight[7, 11].item())
    return model


@case("bug", "sign of one weight", resnet, module="layer4.1.conv1")
def sign_of_one_conv_weight(model):
    """One of 36,864 weights has the other sign."""
    _element(model.layer4[1].conv1.weight, (8, 9, 0, 1), -model.layer4[1].conv1.weight[8, 9, 0, 1].item())
    return model


@case("bug", "bias not copied", two_inputs, module="conv")
def bias_left_at_zero(model):
    """The new conv starts with a bias of zeros."""
    nn.init.zeros_(model.conv.bias)
    return model


@case("bug", "square weight copied transposed", transformer, module="blocks.1.attention.out")
@torch.no_grad()
def square_weight_copied_transposed(model):
    """The weight came from a library that stores its transpose."""
    weight = model.blocks[1].attention.out.weight
    weight.copy_(weight.T.clone())
    return model


@case("bug", "gate bias of another library", recurrent, module="lstm")
@torch.no_grad()
def forget_gate_bias_of_one(model):
    """The bias of the forget gate starts one higher, as in Keras."""
    model.lstm.bias_ih_l0[14:28] += 1
    return model


@case("bug", "gates copied in another order", recurrent, module="cell")
@torch.no_grad()
def gru_gates_copied_in_another_order(model):
    """The rows of the reset and update gates are exchanged in the recurrent weight only."""
    reset, update, new = model.cell.weight_hh.chunk(3)
    model.cell.weight_hh.copy_(torch.cat([update, reset, new]))
    return model


class SeparateProjections(ManualAttention):
    """Attention with a linear layer each for q, k and v, made from the fused one in the ``order`` given."""

    def __init__(self, fused: SelfAttention, order: tuple[int, int, int]):
        width = fused.out.in_features
        super().__init__(width, fused.heads)
        parts = [rows_of(fused.qkv, i * width, (i + 1) * width) for i in order]
        self.qkv, self.out = nn.ModuleList(parts), fused.out

    def project(self, x: Tensor) -> list[Tensor]:
        return [part(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv]


@case(
    "bug",
    "slices of a fused weight mixed up",
    transformer,
    module=("blocks.0.attention", "blocks.0.attention.qkv"),
)
def values_and_keys_exchanged_in_the_split(model):
    """The fused projection is cut into q, v, k."""
    return replace(model, "blocks.0.attention", SeparateProjections(model.blocks[0].attention, (0, 2, 1)))


@case("bug", "permutation not carried on", mlp, module="fc1")
@torch.no_grad()
def hidden_units_sorted_in_one_layer(model):
    """The hidden units are sorted by norm in the first layer; the second still reads the old order."""
    order = model.fc1.weight.norm(dim=1).argsort()
    model.fc1.weight.copy_(model.fc1.weight[order])
    model.fc1.bias.copy_(model.fc1.bias[order])
    return model


@case("bug", "two layers exchanged", resnet, module=("layer4.1.conv1", "layer4.1.conv2"))
def two_convs_exchanged(model):
    """Two convs of one shape got each other's weights."""
    block = model.layer4[1]
    block.conv1, block.conv2 = block.conv2, block.conv1
    return model


@case("bug", "initial buffer", cnn, module="bn2", passes=("buffer", "eval"))
def running_variance_starts_at_zero(model):
    """A BatchNorm by hand that makes both running statistics with torch.zeros."""
    model.bn2.running_var.zero_()
    return model


@case("bug", "initial buffer", resnet, module="layer4.0.shortcut.1", passes=("buffer", "eval"))
def running_mean_shifted(model):
    """One of 128 running statistics starts 1e-4 off."""
    model.layer4[0].shortcut[1].running_mean[5] += 1e-4
    return model


@case("bug", "parameter initialised anew", transformer, module="")
def positions_initialised_anew(model):
    """The position embedding is drawn again."""
    nn.init.normal_(model.position, std=0.1)
    return model
