"""Reduced precision in the forward pass of one layer: operands, weights or the result in fewer bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import (
    cast_if_float32,
    cut_to_tf32,
    recast,
    round_to_bits,
)
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


class BFloat16Conv2d(nn.Conv2d):
    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.bfloat16()
        return super()._conv_forward(x.bfloat16(), weight.bfloat16(), bias).to(x.dtype)


class BFloat16LSTM(nn.LSTM):
    def forward(self, x: Tensor, state=None):
        weights = [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]
        zero = torch.zeros(1, x.shape[0], self.hidden_size, dtype=torch.bfloat16, device=x.device)
        weights = [w.bfloat16() for w in weights]
        y, h, c = torch.lstm(x.bfloat16(), (zero, zero), weights, True, 1, 0.0, self.training, False, True)
        return y.to(x.dtype), (h.to(x.dtype), c.to(x.dtype))


class HalfGRUCell(nn.GRUCell):
    """The product with the state runs in float16, everything else in the input's dtype."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xr, xz, xn = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
        hr, hz, hn = (F.linear(h.half(), self.weight_hh.half()).to(x.dtype) + self.bias_hh).chunk(3, 1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        return (1 - z) * torch.tanh(xn + r * hn) + z * h


class SplitConv2d(nn.Module):
    """A conv split along its output channels, the second half in bfloat16."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        half = conv.out_channels // 2
        size = (conv.in_channels, half, conv.kernel_size)
        how = {"stride": conv.stride, "padding": conv.padding, "bias": False}
        self.left, self.right = nn.Conv2d(*size, **how), BFloat16Conv2d(*size, **how)
        with torch.no_grad():
            self.left.weight.copy_(conv.weight[:half])
            self.right.weight.copy_(conv.weight[half:])

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(x)], 1)


@case("reduced_precision", "bfloat16 operands", cnn, module="conv2", passes="forward")
def bfloat16_strided_conv(model):
    """Input and weight of the strided conv in bfloat16, in either dtype."""
    return recast(model, "conv2", BFloat16Conv2d)


@case("reduced_precision", "bfloat16 operands", resnet, module="layer3.0.conv1", passes="forward")
def bfloat16_resnet_conv_in_float32_only(model):
    """One conv deep in the network casts to bfloat16 where it gets float32; float64 keeps all its bits."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            low, kernel = cast_if_float32(x, torch.bfloat16), cast_if_float32(weight, torch.bfloat16)
            return super()._conv_forward(low, kernel, bias).to(x.dtype)

    return recast(model, "layer3.0.conv1", Conv)


@case("reduced_precision", "bfloat16 operands", mlp, module="fc2", passes="forward")
def bfloat16_linear(model):
    """The middle linear layer multiplies in bfloat16 and adds its bias afterwards."""

    class Linear(nn.Linear):
        def forward(self, x):
            return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype) + self.bias

    return recast(model, "fc2", Linear)


@case("reduced_precision", "bfloat16 operands", recurrent, module="lstm", passes="forward")
def bfloat16_lstm(model):
    """The whole LSTM in bfloat16."""
    return recast(model, "lstm", BFloat16LSTM)


@case("reduced_precision", "float16 operands", two_inputs, module="joint", passes="forward")
def float16_joint_linear(model):
    """The joint linear layer in float16."""

    class Linear(nn.Linear):
        def forward(self, x):
            return F.linear(x.half(), self.weight.half(), self.bias.half()).to(x.dtype)

    return recast(model, "joint", Linear)


@case("reduced_precision", "float16 operands", autoencoder, module="down2", passes="forward")
def float16_conv_in_float32_only(model):
    """The second conv casts float32 to float16."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            low = [cast_if_float32(t, torch.float16) for t in (x, weight, bias)]
            return super()._conv_forward(*low).to(x.dtype)

    return recast(model, "down2", Conv)


@case(
    "reduced_precision",
    "float16 operands",
    recurrent,
    module="cell",
    passes=("forward", "input gradient"),
)
def float16_recurrent_product(model):
    """The GRU cell written out, its product with the state in float16; the first state is zero, so exact."""
    return recast(model, "cell", HalfGRUCell)


@case("reduced_precision", "emulated TF32", resnet, module="layer2.1.conv2", passes="forward")
def tf32_conv_by_masking(model):
    """Both operands of one conv lose their last 13 bits."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(cut_to_tf32(x), cut_to_tf32(weight), bias)

    return recast(model, "layer2.1.conv2", Conv)


@case("reduced_precision", "emulated TF32", autoencoder, module="up1", passes="forward")
def tf32_transposed_conv_by_rounding(model):
    """Both operands of a transposed conv rounded to 11 bits, in either dtype."""

    class Conv(nn.ConvTranspose2d):
        def forward(self, x):
            x, weight = round_to_bits(x, 11), round_to_bits(self.weight, 11)
            return F.conv_transpose2d(x, weight, self.bias, self.stride, self.padding)

    return recast(model, "up1", Conv)


@case("reduced_precision", "emulated TF32", transformer, module="blocks.0.down", passes="forward")
def tf32_linear_input_alone(model):
    """Only the activations of one linear layer are cut to TF32; its weight keeps all bits."""

    class Linear(nn.Linear):
        def forward(self, x):
            return F.linear(cut_to_tf32(x), self.weight, self.bias)

    return recast(model, "blocks.0.down", Linear)


@case("reduced_precision", "split, one half low", resnet, module="layer1.0.conv2", passes="forward")
def split_conv_with_a_bfloat16_half(model):
    """A conv split along its output channels; the second half runs in bfloat16."""
    return replace(model, "layer1.0.conv2", SplitConv2d(model.layer1[0].conv2))


@case("reduced_precision", "bfloat16 table", transformer, module="embed", passes="forward")
def embedding_read_through_bfloat16(model):
    """Rows are looked up in a bfloat16 copy of the table; the tied head uses the table itself."""

    class Embedding(nn.Embedding):
        def forward(self, tokens):
            return F.embedding(tokens, self.weight.bfloat16()).to(self.weight.dtype)

    return recast(model, "embed", Embedding)
