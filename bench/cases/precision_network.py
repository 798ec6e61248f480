"""Reduced precision around layers: autocast, normalisation statistics, attention."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.case import in_place_of, method_of
from bench.cases._bug_parts import ManualAttention
from bench.cases._lowbits import cast_if_float32
from bench.tasks import Transformer, cnn, resnet, transformer
from models.resnet import BasicBlock

WEIGHTED = ("", "conv1", "conv2", "conv3", "fc")


@in_place_of("", "reduced_precision", "autocast", cnn, "autocast_around_the_cnn", module=WEIGHTED)
class Autocast(nn.Module):
    """The whole network under bfloat16 autocast (which leaves float64 alone), its result cast back."""

    def __init__(self, net: nn.Module):
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            y = self.net(x)
        return y.to(next(self.net.parameters()).dtype)


ATTENTION = tuple(f"blocks.0.attention{part}" for part in ("", ".qkv", ".out"))
CAST = ("", "blocks.0", *ATTENTION, "blocks.0.up", "blocks.0.down", "head")


@method_of("", "reduced_precision", "autocast", transformer, module=CAST)
def autocast_inside_the_transformer(self, tokens):
    """The network's own forward opens the autocast region; tokens come in, full logits go out."""
    with torch.autocast(tokens.device.type, torch.bfloat16):
        logits = Transformer.forward(self, tokens)
    return logits.to(self.embed.weight.dtype)


BLOCK = ("layer2.0", "layer2.0.conv1", "layer2.0.conv2", "layer2.0.shortcut", "layer2.0.shortcut.0")


@method_of("layer2.0", "reduced_precision", "autocast", resnet, module=BLOCK)
def autocast_around_one_residual_block(self, x):
    """One strided residual block under bfloat16 autocast."""
    with torch.autocast(x.device.type, torch.bfloat16):
        y = BasicBlock.forward(self, x)
    return y.to(x.dtype)


HALF = ("blocks.1", "blocks.1.up", "blocks.1.act", "blocks.1.down")


@method_of("blocks.1", "reduced_precision", "autocast", transformer, module=HALF)
def autocast_around_the_feed_forward_half(self, x):
    """The second block's feed-forward half alone under autocast."""
    x = x + self.attention(self.norm1(x))
    with torch.autocast(x.device.type, torch.bfloat16):
        y = self.down(self.act(self.up(self.norm2(x))))
    return x + self.drop(y.to(x.dtype))


@method_of("norm3", "reduced_precision", "half statistics", cnn)
def group_statistics_in_float16(self, x):
    """GroupNorm's mean and variance come from a float16 copy of its input."""
    groups = x.reshape(x.shape[0], self.num_groups, -1)
    variance, mean = torch.var_mean(groups.half(), -1, correction=0, keepdim=True)
    y = (groups - mean.to(x.dtype)) * torch.rsqrt(variance.to(x.dtype) + self.eps)
    return y.view_as(x) * self.weight[:, None, None] + self.bias[:, None, None]


@method_of("layer1.1.bn2", "reduced_precision", "half statistics", resnet, passes=("forward", "buffer"))
def batch_statistics_in_bfloat16(self, x):
    """BatchNorm's statistics, the running ones too, come from a bfloat16 copy of its input."""
    if not self.training:
        return nn.BatchNorm2d.forward(self, x)
    variance, mean = torch.var_mean(x.bfloat16(), (0, 2, 3), correction=0)
    variance, mean = variance.to(x.dtype), mean.to(x.dtype)
    with torch.no_grad():
        n = x.numel() / x.shape[1]
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(variance * n / (n - 1), self.momentum)
        self.num_batches_tracked += 1
    scale = self.weight * torch.rsqrt(variance + self.eps)
    return (x - mean[:, None, None]) * scale[:, None, None] + self.bias[:, None, None]


@method_of("norm", "reduced_precision", "half statistics", transformer)
def layer_statistics_in_bfloat16_in_float32_only(self, x):
    """The last LayerNorm takes its statistics in bfloat16 where its input is float32."""
    low = cast_if_float32(x, torch.bfloat16)
    variance, mean = torch.var_mean(low, -1, correction=0, keepdim=True)
    y = (x - mean.to(x.dtype)) * torch.rsqrt(variance.to(x.dtype) + self.eps)
    return y * self.weight + self.bias


@method_of("blocks.0.attention", "reduced_precision", "half softmax", transformer, "softmax", ManualAttention)
def softmax_in_bfloat16(self, scores):
    """Attention written out, its softmax in bfloat16."""
    return scores.bfloat16().softmax(-1).to(scores.dtype)


@in_place_of(
    "blocks.1.attention", "reduced_precision", "half attention", transformer, "attention_core_in_bfloat16"
)
class BFloat16Core(ManualAttention):
    """Queries, keys and values in bfloat16 through scores, softmax and mixing; the projections in full."""

    def project(self, x: Tensor) -> Tensor:
        return super().project(x).bfloat16()

    def merge(self, mixed: Tensor) -> Tensor:
        return super().merge(mixed).to(self.out.weight.dtype)
