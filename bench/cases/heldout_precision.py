"""Reduced precision in the forward pass at unusual spots: streams, tables, sums, gates, single experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, method_of
from bench.cases._heldout_fault_parts import low, low_if_single
from bench.cases._heldout_fault_tasks import (
    masked,
    mixture,
    mobile,
    preact,
    recommender,
    siamese,
    tagger,
    translator,
    unet,
)
from bench.cases._heldout_fault_vision import PreActBlock
from bench.cases._heldout_inside import inside
from bench.cases._heldout_rewritten_sequence import HandLSTM, PackedEncoder
from bench.surgery import recast


@method_of("stages.2", "reduced_precision", "residual stream", preact)
def residual_stream_in_bfloat16(self, x):
    """One block hands its sum on in bfloat16; float64 keeps all its bits."""
    return low_if_single(PreActBlock.forward(self, x))


@method_of("", "reduced_precision", "positional table", masked)
def positions_read_through_float16(self, tokens, mask):
    """The positional table is cast to float16 where it is added."""
    x = self.drop(self.embed(tokens) + low(self.position, torch.float16)[: tokens.shape[1]])
    for layer in self.layers:
        x = layer(x, mask)
    real = mask[:, :, None].to(x.dtype)
    return self.fc((self.norm(x) * real).sum(1) / real.sum(1))


@method_of("head", "reduced_precision", "logits", unet, "_conv_forward")
def pixel_logits_in_bfloat16(self, x, weight, bias):
    """The logits of the pixels are stored in bfloat16, which halves the largest tensor; in float32 only."""
    return low_if_single(nn.Conv2d._conv_forward(self, x, weight, bias))


@method_of("blocks.1.se", "reduced_precision", "squeeze", mobile)
def squeeze_in_float16(self, x):
    """The mean that a gate is computed from is taken in float16; the gated maps are not touched."""
    squeezed = x.half().mean((2, 3), keepdim=True).to(x.dtype)
    return x * self.gate(self.expand(self.act(self.reduce(squeezed))))


@case("reduced_precision", "one expert", mixture, module="mixture.experts.3")
def one_expert_in_bfloat16(model):
    """One expert of four runs in bfloat16, as if it lay on another device."""

    class Expert(nn.Sequential):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16):
                y = F.linear(self.act(self.up(x.float())), self.down.weight.float(), self.down.bias.float())
            return y.to(x.dtype)

    class InSingle(Expert):
        def forward(self, x):
            return super().forward(x) if x.dtype == torch.float32 else nn.Sequential.forward(self, x)

    return recast(model, "mixture.experts.3", InSingle)


@method_of("prefix", "reduced_precision", "cumulative sum", tagger)
def prefix_sums_in_float16(self, x):
    """The sums of all steps so far are kept in float16."""
    sums = x.half().cumsum(1).to(x.dtype)
    return sums / torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype)[:, None]


def truncated(x: Tensor) -> Tensor:
    """float32 without its last 13 bits, as the operand of a TF32 product; the gradient passes as it is."""
    if x.dtype != torch.float32:
        return x
    cut = (x.detach().contiguous().view(torch.int32) & -8192).view(torch.float32)
    return x + (cut - x).detach()


@inside(
    HandLSTM, "recurrent", "lstm", "recurrent product of one direction", tagger, label="reduced_precision"
)
def backward_state_product_in_tf32(self, direction, h, steps):
    """By hand; the backward direction multiplies its state in TF32, everything else is exact."""
    layer = self.states[direction]
    if not direction:
        return layer(h)
    return F.linear(truncated(h), truncated(layer.weight), layer.bias)


@method_of("decoder.0.cross", "reduced_precision", "softmax's sum", translator)
def sum_of_the_softmax_in_bfloat16(self, x, memory, mask=None):
    """The exponentials are exact; the sum that they are divided by is bfloat16."""
    q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    powers = (scores - scores.amax(-1, keepdim=True).detach()).exp()
    total = low(powers.sum(-1, keepdim=True))
    return self.out((powers / total @ v).transpose(1, 2).flatten(2))


@method_of("fc1", "reduced_precision", "product of split operands", recommender)
def product_of_three_bfloat16_products(self, x):
    """Operands as sums of two bfloat16 numbers and three products of those: 16 bits, where float32 has 24."""
    if x.dtype != torch.float32:
        return nn.Linear.forward(self, x)
    a, b = low(x), low(self.weight)
    c, d = low(x - a), low(self.weight - b)
    return F.linear(a, b) + (F.linear(c, b) + F.linear(a, d)) + self.bias


@method_of("encoder.norm", "reduced_precision", "statistics of few channels", siamese)
def deviation_in_bfloat16(self, x):
    """A BatchNorm by hand, in training; its reciprocal deviation alone is rounded to bfloat16."""
    y = nn.BatchNorm1d.forward(self, x)
    if not self.training:
        return y
    variance, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
    scale = low_if_single(torch.rsqrt(variance + self.eps))
    return (x - mean) * scale * self.weight[:, None] + self.bias[:, None]


@case("reduced_precision", "rewritten network, one product", masked, module="layers.1.mlp.down")
def one_product_of_a_rewritten_network_in_float16(model):
    """Every layer is packed, permuted and renamed; the last product of the second one is in float16."""

    class Down(nn.Linear):
        def forward(self, x):
            if x.dtype != torch.float32:
                return super().forward(x)
            return F.linear(low(x, torch.float16), low(self.weight, torch.float16), self.bias)

    return recast(PackedEncoder(model), "stack.1.w2", Down)
