"""Reduced precision in the forward pass at unusual spots: streams, tables, sums, gates, single experts."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import low, low_if_single, recast
from experiments.calibration.cases._heldout_fault_sequence import Attention, MaskedEncoder, PrefixMean
from experiments.calibration.cases._heldout_fault_tasks import (
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
from experiments.calibration.cases._heldout_fault_vision import PreActBlock, SqueezeExcite
from experiments.calibration.cases._heldout_rewritten_sequence import HandLSTM, PackedEncoder, by_hand


@case("reduced_precision", "residual stream", preact, module="stages.2", passes="forward")
def residual_stream_in_bfloat16(model):
    """One block hands its sum on in bfloat16; float64 keeps all its bits."""

    class Block(PreActBlock):
        def forward(self, x):
            return low_if_single(super().forward(x))

    return recast(model, "stages.2", Block)


@case("reduced_precision", "positional table", masked, module="", passes="forward")
def positions_read_through_float16(model):
    """The positional table is cast to float16 where it is added."""

    class Net(MaskedEncoder):
        def forward(self, tokens, mask):
            x = self.drop(self.embed(tokens) + low(self.position, torch.float16)[: tokens.shape[1]])
            for layer in self.layers:
                x = layer(x, mask)
            real = mask[:, :, None].to(x.dtype)
            return self.fc((self.norm(x) * real).sum(1) / real.sum(1))

    return recast(model, "", Net)


@case("reduced_precision", "logits", unet, module="head", passes="forward")
def pixel_logits_in_bfloat16(model):
    """The logits of the pixels are stored in bfloat16, which halves the largest tensor; in float32 only."""

    class Head(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return low_if_single(super()._conv_forward(x, weight, bias))

    return recast(model, "head", Head)


@case("reduced_precision", "squeeze", mobile, module="blocks.1.se", passes="forward")
def squeeze_in_float16(model):
    """The mean that a gate is computed from is taken in float16; the gated maps are not touched."""

    class Squeeze(SqueezeExcite):
        def forward(self, x):
            squeezed = x.half().mean((2, 3), keepdim=True).to(x.dtype)
            return x * self.gate(self.expand(self.act(self.reduce(squeezed))))

    return recast(model, "blocks.1.se", Squeeze)


@case("reduced_precision", "one expert", mixture, module="mixture.experts.3", passes="forward")
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


@case("reduced_precision", "cumulative sum", tagger, module="prefix", passes="forward")
def prefix_sums_in_float16(model):
    """The sums of all steps so far are kept in float16."""

    class Prefix(PrefixMean):
        def forward(self, x):
            sums = x.half().cumsum(1).to(x.dtype)
            return sums / torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype)[:, None]

    return recast(model, "prefix", Prefix)


def truncated(x: Tensor) -> Tensor:
    """float32 without its last 13 bits, as the operand of a TF32 product; the gradient passes as it is."""
    if x.dtype != torch.float32:
        return x
    cut = (x.detach().contiguous().view(torch.int32) & -8192).view(torch.float32)
    return x + (cut - x).detach()


@case("reduced_precision", "recurrent product of one direction", tagger, module="lstm", passes="forward")
def backward_state_product_in_tf32(model):
    """By hand; the backward direction multiplies its state in TF32, everything else is exact."""

    class Hand(HandLSTM):
        def recurrent(self, direction, h, steps):
            layer = self.states[direction]
            if not direction:
                return layer(h)
            return F.linear(truncated(h), truncated(layer.weight), layer.bias)

    return by_hand(model, Hand)


@case("reduced_precision", "softmax's sum", translator, module="decoder.0.cross", passes="forward")
def sum_of_the_softmax_in_bfloat16(model):
    """The exponentials are exact; the sum that they are divided by is bfloat16."""

    class Cross(Attention):
        def forward(self, x, memory, mask=None):
            q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            powers = (scores - scores.amax(-1, keepdim=True).detach()).exp()
            total = low(powers.sum(-1, keepdim=True))
            return self.out((powers / total @ v).transpose(1, 2).flatten(2))

    return recast(model, "decoder.0.cross", Cross)


@case("reduced_precision", "product of split operands", recommender, module="fc1", passes="forward")
def product_of_three_bfloat16_products(model):
    """Operands as sums of two bfloat16 numbers and three products of those: 16 bits, where float32 has 24."""

    class Linear(nn.Linear):
        def forward(self, x):
            if x.dtype != torch.float32:
                return super().forward(x)
            a, b = low(x), low(self.weight)
            c, d = low(x - a), low(self.weight - b)
            return F.linear(a, b) + (F.linear(c, b) + F.linear(a, d)) + self.bias

    return recast(model, "fc1", Linear)


@case("reduced_precision", "statistics of few channels", siamese, module="encoder.norm", passes="forward")
def deviation_in_bfloat16(model):
    """A BatchNorm by hand, in training; its reciprocal deviation alone is rounded to bfloat16."""

    class Norm(nn.BatchNorm1d):
        def forward(self, x):
            y = super().forward(x)
            if not self.training:
                return y
            variance, mean = torch.var_mean(x, (0, 2), correction=0, keepdim=True)
            scale = low_if_single(torch.rsqrt(variance + self.eps))
            return (x - mean) * scale * self.weight[:, None] + self.bias[:, None]

    return recast(model, "encoder.norm", Norm)


@case(
    "reduced_precision",
    "rewritten network, one product",
    masked,
    module="layers.1.mlp.down",
    passes="forward",
)
def one_product_of_a_rewritten_network_in_float16(model):
    """Every layer is packed, permuted and renamed; the last product of the second one is in float16."""

    class Down(nn.Linear):
        def forward(self, x):
            if x.dtype != torch.float32:
                return super().forward(x)
            return F.linear(low(x, torch.float16), low(self.weight, torch.float16), self.bias)

    return recast(PackedEncoder(model), "stack.1.w2", Down)
