"""Reduced precision in the forward pass of one layer: operands, weights or the result in fewer bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of, method_of
from bench.cases._lowbits import cast_if_float32, cut_to_tf32, round_to_bits
from bench.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


@in_place_of("conv2", "reduced_precision", "bfloat16 operands", cnn, "bfloat16_strided_conv")
class BFloat16Conv2d(nn.Conv2d):
    """Input and weight of the strided conv in bfloat16, in either dtype."""

    def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        bias = None if bias is None else bias.bfloat16()
        return super()._conv_forward(x.bfloat16(), weight.bfloat16(), bias).to(x.dtype)


@method_of("layer3.0.conv1", "reduced_precision", "bfloat16 operands", resnet, "_conv_forward")
def bfloat16_resnet_conv_in_float32_only(self, x, weight, bias):
    """One conv deep in the network casts to bfloat16 where it gets float32; float64 keeps all its bits."""
    low, kernel = cast_if_float32(x, torch.bfloat16), cast_if_float32(weight, torch.bfloat16)
    return nn.Conv2d._conv_forward(self, low, kernel, bias).to(x.dtype)


@method_of("fc2", "reduced_precision", "bfloat16 operands", mlp)
def bfloat16_linear(self, x):
    """The middle linear layer multiplies in bfloat16 and adds its bias afterwards."""
    return F.linear(x.bfloat16(), self.weight.bfloat16()).to(x.dtype) + self.bias


@method_of("lstm", "reduced_precision", "bfloat16 operands", recurrent)
def bfloat16_lstm(self, x: Tensor, state=None):
    """The whole LSTM in bfloat16."""
    weights = [self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0]
    zero = torch.zeros(1, x.shape[0], self.hidden_size, dtype=torch.bfloat16, device=x.device)
    weights = [w.bfloat16() for w in weights]
    y, h, c = torch.lstm(x.bfloat16(), (zero, zero), weights, True, 1, 0.0, self.training, False, True)
    return y.to(x.dtype), (h.to(x.dtype), c.to(x.dtype))


@method_of("joint", "reduced_precision", "float16 operands", two_inputs)
def float16_joint_linear(self, x):
    """The joint linear layer in float16."""
    return F.linear(x.half(), self.weight.half(), self.bias.half()).to(x.dtype)


@method_of("down2", "reduced_precision", "float16 operands", autoencoder, "_conv_forward")
def float16_conv_in_float32_only(self, x, weight, bias):
    """The second conv casts float32 to float16."""
    low = [cast_if_float32(t, torch.float16) for t in (x, weight, bias)]
    return nn.Conv2d._conv_forward(self, *low).to(x.dtype)


@method_of("cell", "reduced_precision", "float16 operands", recurrent, passes=("forward", "input gradient"))
def float16_recurrent_product(self, x: Tensor, h: Tensor) -> Tensor:
    """Written out, the product with the state in float16; the first state is zero, so exact."""
    xr, xz, xn = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, 1)
    hr, hz, hn = (F.linear(h.half(), self.weight_hh.half()).to(x.dtype) + self.bias_hh).chunk(3, 1)
    r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
    return (1 - z) * torch.tanh(xn + r * hn) + z * h


@method_of("layer2.1.conv2", "reduced_precision", "emulated TF32", resnet, "_conv_forward")
def tf32_conv_by_masking(self, x, weight, bias):
    """Both operands of one conv lose their last 13 bits."""
    return nn.Conv2d._conv_forward(self, cut_to_tf32(x), cut_to_tf32(weight), bias)


@method_of("up1", "reduced_precision", "emulated TF32", autoencoder)
def tf32_transposed_conv_by_rounding(self, x):
    """Both operands of a transposed conv rounded to 11 bits, in either dtype."""
    x, weight = round_to_bits(x, 11), round_to_bits(self.weight, 11)
    return F.conv_transpose2d(x, weight, self.bias, self.stride, self.padding)


@method_of("blocks.0.down", "reduced_precision", "emulated TF32", transformer)
def tf32_linear_input_alone(self, x):
    """Only the activations of one linear layer are cut to TF32; its weight keeps all bits."""
    return F.linear(cut_to_tf32(x), self.weight, self.bias)


@in_place_of(
    "layer1.0.conv2", "reduced_precision", "split, one half low", resnet, "split_conv_with_a_bfloat16_half"
)
class SplitConv2d(nn.Module):
    """A conv split along its output channels; the second half runs in bfloat16."""

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


@method_of("embed", "reduced_precision", "bfloat16 table", transformer)
def embedding_read_through_bfloat16(self, tokens):
    """Rows are looked up in a bfloat16 copy of the table; the tied head uses the table itself."""
    return F.embedding(tokens, self.weight.bfloat16()).to(self.weight.dtype)
