"""Reduced precision around layers: autocast, normalisation statistics, attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import cast_if_float32, recast
from experiments.calibration.tasks import (
    SelfAttention,
    Transformer,
    TransformerBlock,
    cnn,
    resnet,
    transformer,
)
from models.resnet import BasicBlock


class Autocast(nn.Module):
    """``net`` under bfloat16 autocast, its result cast back."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.net(x)
        return y.to(next(self.net.parameters()).dtype)


class HandAttention(SelfAttention):
    """Attention written out; a subclass says what happens to q, k and v (``inner``) and in the softmax."""

    def inner(self, x: Tensor) -> Tensor:
        return x

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def forward(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        qkv = self.inner(self.qkv(x).view(n, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4))
        q, k, v = qkv
        future = torch.ones(t, t, dtype=torch.bool, device=x.device).triu(1)
        scores = (q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5).masked_fill(future, float("-inf"))
        mixed = (self.softmax(scores) @ v).to(x.dtype)
        return self.out(mixed.transpose(1, 2).reshape(n, t, d))


@case("reduced_precision", "autocast", cnn, module=("", "conv1", "conv2", "conv3", "fc"), passes="forward")
def autocast_around_the_cnn(model):
    """The whole network under bfloat16 autocast (which leaves float64 alone)."""
    return Autocast(model)


ATTENTION = tuple(f"blocks.0.attention{part}" for part in ("", ".qkv", ".out"))


@case(
    "reduced_precision",
    "autocast",
    transformer,
    module=("", "blocks.0", *ATTENTION, "blocks.0.up", "blocks.0.down", "head"),
    passes="forward",
)
def autocast_inside_the_transformer(model):
    """The network's own forward opens the autocast region; tokens come in, full logits go out."""

    class AutocastTransformer(Transformer):
        def forward(self, tokens):
            with torch.autocast(tokens.device.type, torch.bfloat16):
                logits = super().forward(tokens)
            return logits.to(self.embed.weight.dtype)

    return recast(model, "", AutocastTransformer)


BLOCK = ("layer2.0", "layer2.0.conv1", "layer2.0.conv2", "layer2.0.shortcut", "layer2.0.shortcut.0")


@case("reduced_precision", "autocast", resnet, module=BLOCK, passes="forward")
def autocast_around_one_residual_block(model):
    """One strided residual block under bfloat16 autocast."""

    class Block(BasicBlock):
        def forward(self, x):
            with torch.autocast(x.device.type, torch.bfloat16):
                y = super().forward(x)
            return y.to(x.dtype)

    return recast(model, "layer2.0", Block)


@case(
    "reduced_precision",
    "autocast",
    transformer,
    module=("blocks.1", "blocks.1.up", "blocks.1.act", "blocks.1.down"),
    passes="forward",
)
def autocast_around_the_feed_forward_half(model):
    """The second block's feed-forward half alone under autocast."""

    class Block(TransformerBlock):
        def forward(self, x):
            x = x + self.attention(self.norm1(x))
            with torch.autocast(x.device.type, torch.bfloat16):
                y = self.down(self.act(self.up(self.norm2(x))))
            return x + self.drop(y.to(x.dtype))

    return recast(model, "blocks.1", Block)


@case("reduced_precision", "half statistics", cnn, module="norm3", passes="forward")
def group_statistics_in_float16(model):
    """GroupNorm's mean and variance come from a float16 copy of its input."""

    class Norm(nn.GroupNorm):
        def forward(self, x):
            groups = x.reshape(x.shape[0], self.num_groups, -1)
            variance, mean = torch.var_mean(groups.half(), -1, correction=0, keepdim=True)
            y = (groups - mean.to(x.dtype)) * torch.rsqrt(variance.to(x.dtype) + self.eps)
            return y.view_as(x) * self.weight[:, None, None] + self.bias[:, None, None]

    return recast(model, "norm3", Norm)


@case("reduced_precision", "half statistics", resnet, module="layer1.1.bn2", passes=("forward", "buffer"))
def batch_statistics_in_bfloat16(model):
    """BatchNorm's statistics, the running ones too, come from a bfloat16 copy of its input."""

    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            if not self.training:
                return super().forward(x)
            variance, mean = torch.var_mean(x.bfloat16(), (0, 2, 3), correction=0)
            variance, mean = variance.to(x.dtype), mean.to(x.dtype)
            with torch.no_grad():
                n = x.numel() / x.shape[1]
                self.running_mean.lerp_(mean, self.momentum)
                self.running_var.lerp_(variance * n / (n - 1), self.momentum)
                self.num_batches_tracked += 1
            scale = self.weight * torch.rsqrt(variance + self.eps)
            return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]

    return recast(model, "layer1.1.bn2", Norm)


@case("reduced_precision", "half statistics", transformer, module="norm", passes="forward")
def layer_statistics_in_bfloat16_in_float32_only(model):
    """The last LayerNorm takes its statistics in bfloat16 where its input is float32."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            low = cast_if_float32(x, torch.bfloat16)
            variance, mean = torch.var_mean(low, -1, correction=0, keepdim=True)
            y = (x - mean.to(x.dtype)) * torch.rsqrt(variance.to(x.dtype) + self.eps)
            return y * self.weight + self.bias

    return recast(model, "norm", Norm)


@case("reduced_precision", "half softmax", transformer, module="blocks.0.attention", passes="forward")
def softmax_in_bfloat16(model):
    """Attention written out, its softmax in bfloat16."""

    class Attention(HandAttention):
        def softmax(self, scores):
            return scores.bfloat16().softmax(-1).to(scores.dtype)

    return recast(model, "blocks.0.attention", Attention)


@case("reduced_precision", "half attention", transformer, module="blocks.1.attention", passes="forward")
def attention_core_in_bfloat16(model):
    """Queries, keys and values in bfloat16 through scores, softmax and mixing; the projections in full."""

    class Attention(HandAttention):
        def inner(self, x):
            return x.bfloat16()

    return recast(model, "blocks.1.attention", Attention)
