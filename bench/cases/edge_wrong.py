"""Rewrites that look right and are wrong: faults that hide where little depends on them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.case import GRADIENTS, case, method_of
from bench.cases._edge_tasks import scaled
from bench.cases._same import ChannelwiseConv2d, HalvedLinear
from bench.optimizers import of, sgd
from bench.surgery import recast
from bench.tasks import TransformerBlock, autoencoder, cnn, dropout_transformer, mlp, resnet, transformer


@method_of("block.depthwise", "bug", "nearly dead branch", scaled, "_conv_forward")
def wrong_padding_in_a_scaled_branch(self, x, weight, bias):
    """The depthwise conv of a branch scaled by 1e-6 pads by repeating the edge instead of by zeros."""
    return F.conv2d(F.pad(x, (1, 1, 1, 1), mode="replicate"), weight, bias, groups=self.groups)


@case("bug", "nearly dead branch", scaled, module="block.act")
def approximate_gelu_in_a_scaled_branch(model):
    """The branch scaled by 1e-6 uses GELU's tanh approximation."""
    model.block.act = nn.GELU(approximate="tanh")
    return model


@method_of("block.down", "bug", "nearly dead branch", scaled, "_conv_forward", passes="input gradient")
def detached_input_in_a_scaled_branch(self, x, weight, bias):
    """The branch's last conv sees half of its channels detached."""
    half = self.in_channels // 2
    x = torch.cat([x[:, :half], x[:, half:].detach()], 1)
    return nn.Conv2d._conv_forward(self, x, weight, bias)


VALUES = ("blocks.0.attention", "blocks.0.attention.qkv")


@method_of("blocks.0.attention", "bug", "bias left out", transformer, "project", module=VALUES)
def value_bias_left_out(self, x):
    """The values' bias is left out as if it cancelled like the keys'."""
    q, k, v = self.qkv.bias.chunk(3)
    return self.by_head(F.linear(x, self.qkv.weight, torch.cat([q, k, torch.zeros_like(v)])))


WHERE = {"module": ("conv1", "bn1"), "passes": ("forward", "buffer", "eval")}


@method_of("conv1", "bug", "bias left out", cnn, "_conv_forward", **WHERE)
def conv_bias_left_out_before_batch_norm(self, x, weight, bias):
    """The conv's bias is left out because BatchNorm cancels it: in training, but not in the running mean."""
    return nn.Conv2d._conv_forward(self, x, weight, None)


TINY = {"optimizer": sgd(1e-6), "candidate_optimizer": of(sgd(1e-6), weight_decay=0.1)}


@case("bug", "setting with little effect", mlp, module=("", "fc1", "fc2", "fc3"), passes="update", **TINY)
def weight_decay_at_a_tiny_rate(model):
    """A right rewrite, but weight decay was switched on; the rate of 1e-6 nearly hides it."""
    return recast(model, "fc1", HalvedLinear)


@method_of("down2", "bug", "fault in a blow-up", autoencoder, passes=GRADIENTS, optimizer=sgd(2.0))
def wrong_gradient_in_an_exploding_run(self, x):
    """The training explodes by itself; besides, a conv's output gradient is one per cent too large."""
    y = nn.Conv2d.forward(self, x)
    return y.detach() + 1.01 * (y - y.detach())


FAST = {"base": ChannelwiseConv2d, "optimizer": sgd(60.0)}


@method_of("layer2.0.conv1", "bug", "fault in a blow-up", resnet, "_conv_forward", **FAST)
def missing_channel_in_an_exploding_run(self, x, weight, bias):
    """The training explodes by itself; besides, a conv split in halves forgets one channel."""
    return ChannelwiseConv2d._conv_forward(self, x[:, :-1], weight[:, :-1], bias)


BLOCK = ("blocks.0", "blocks.0.drop")


@method_of("blocks.0", "bug", "checkpoint", dropout_transformer, module=BLOCK, passes=GRADIENTS)
def checkpoint_with_another_mask(self, x):
    """A block is computed again in the backward pass with a new dropout mask."""
    return checkpoint(TransformerBlock.forward, self, x, use_reentrant=False, preserve_rng_state=False)


@method_of("blocks.0.act", "bug", "constant cut short", transformer)
def gelu_with_a_short_constant(self, x):
    """GELU by ``erf`` with the root of two written to four decimals."""
    return 0.5 * x * (1 + torch.erf(x / 1.4142))
