"""Rewrites that look right and are wrong: faults that hide where little depends on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.calibration.case import case
from experiments.calibration.cases._edge_tasks import scaled
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.cases._same import ChannelwiseConv2d, HalvedLinear
from experiments.calibration.tasks import (
    SelfAttention,
    TransformerBlock,
    autoencoder,
    cnn,
    dropout_transformer,
    mlp,
    resnet,
    transformer,
)

PARTS = ("", "fc1", "fc2", "fc3")


@case("bug", "nearly dead branch", scaled, module="block.depthwise", passes="forward")
def wrong_padding_in_a_scaled_branch(model):
    """The depthwise conv of a branch scaled by 1e-6 pads by repeating the edge instead of by zeros."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight, bias, groups=self.groups)

    return recast(model, "block.depthwise", Conv)


@case("bug", "nearly dead branch", scaled, module="block.act", passes="forward")
def approximate_gelu_in_a_scaled_branch(model):
    """The branch scaled by 1e-6 uses GELU's tanh approximation."""
    model.block.act = nn.GELU(approximate="tanh")
    return model


@case(
    "bug",
    "nearly dead branch",
    scaled,
    module="block.down",
    passes="input gradient",
)
def detached_input_in_a_scaled_branch(model):
    """The branch's last conv sees half of its channels detached."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            half = self.in_channels // 2
            x = torch.cat([x[:, :half], x[:, half:].detach()], 1)
            return super()._conv_forward(x, weight, bias)

    return recast(model, "block.down", Conv)


@case(
    "bug",
    "bias left out",
    transformer,
    module=("blocks.0.attention", "blocks.0.attention.qkv"),
    passes="forward",
)
def value_bias_left_out(model):
    """The values' bias is left out as if it cancelled like the keys'."""

    class Attention(SelfAttention):
        def forward(self, x):
            n, t, d = x.shape
            bias = torch.cat([self.qkv.bias[: 2 * d], x.new_zeros(d)])
            qkv = F.linear(x, self.qkv.weight, bias).view(n, t, 3, self.heads, d // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(n, t, d))

    return recast(model, "blocks.0.attention", Attention)


@case(
    "bug",
    "bias left out",
    cnn,
    module=("conv1", "bn1"),
    passes=("forward", "buffer", "eval"),
)
def conv_bias_left_out_before_batch_norm(model):
    """The conv's bias is left out because BatchNorm cancels it: in training, but not in the running mean."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight, None)

    return recast(model, "conv1", Conv)


@case(
    "bug",
    "setting with little effect",
    mlp,
    module=PARTS,
    passes="update",
    optimizer=lambda params: torch.optim.SGD(params, lr=1e-6, momentum=0.9),
    candidate_optimizer=lambda net: torch.optim.SGD(
        net.parameters(), lr=1e-6, momentum=0.9, weight_decay=0.1
    ),
)
def weight_decay_at_a_tiny_rate(model):
    """A right rewrite, but weight decay was switched on; the rate of 1e-6 nearly hides it."""
    return recast(model, "fc1", HalvedLinear)


@case(
    "bug",
    "fault in a blow-up",
    autoencoder,
    module="down2",
    passes=("input gradient", "weight gradient"),
    optimizer=lambda params: torch.optim.SGD(params, lr=2.0, momentum=0.9),
)
def wrong_gradient_in_an_exploding_run(model):
    """The training explodes by itself; besides, a conv's output gradient is one per cent too large."""

    class Conv(nn.Conv2d):
        def forward(self, x):
            y = super().forward(x)
            return y.detach() + 1.01 * (y - y.detach())

    return recast(model, "down2", Conv)


@case(
    "bug",
    "fault in a blow-up",
    resnet,
    module="layer2.0.conv1",
    passes="forward",
    optimizer=lambda params: torch.optim.SGD(params, lr=60.0, momentum=0.9),
)
def missing_channel_in_an_exploding_run(model):
    """The training explodes by itself; besides, a conv split in halves forgets one channel."""

    class Conv(ChannelwiseConv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x[:, :-1], weight[:, :-1], bias)

    return recast(model, "layer2.0.conv1", Conv)


@case(
    "bug",
    "checkpoint",
    dropout_transformer,
    module=("blocks.0", "blocks.0.drop"),
    passes=("input gradient", "weight gradient"),
)
def checkpoint_with_another_mask(model):
    """A block is computed again in the backward pass with a new dropout mask."""

    class Block(TransformerBlock):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False, preserve_rng_state=False)

    return recast(model, "blocks.0", Block)


@case("bug", "constant cut short", transformer, module="blocks.0.act", passes="forward")
def gelu_with_a_short_constant(model):
    """GELU by ``erf`` with the root of two written to four decimals."""

    class GELU(nn.GELU):
        def forward(self, x):
            return 0.5 * x * (1 + torch.erf(x / 1.4142))

    return recast(model, "blocks.0.act", GELU)
