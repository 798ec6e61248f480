"""Whole small networks: a transformer of two layers, a convolutional net with batch norm."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import group, like, plain, wide

pair = group(__name__, "network")


class Block(nn.Module):
    """Pre-norm: attention and a feed-forward layer."""

    scale: float = 1.0

    def __init__(self, d: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.out = nn.Linear(d, 3 * d, False), nn.Linear(d, d)
        self.up, self.down = nn.Linear(d, 4 * d), nn.Linear(4 * d, d)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2)) * self.scale
        return x + self.down(self.act(self.up(self.norm2(x))))


class ExplicitBlock(Block):
    """Scores by hand, in float32 up to the weights; the three projections apart."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with plain():
            scores = wide(q) @ wide(k).mT * q.shape[-1] ** -0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            return scores.masked_fill(mask, -torch.inf).softmax(-1).to(v.dtype) @ v

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm1(x)
        parts = (F.linear(h, w).unflatten(-1, (self.heads, -1)) for w in self.qkv.weight.chunk(3))
        q, k, v = (part.transpose(1, 2) for part in parts)
        x = x + self.out(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(self.act(self.up(self.norm2(x))))


class TanhBlock(Block):
    def act(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh")


class Transformer(nn.Module):
    """Of two layers, over tokens."""

    def __init__(self, words: int = 64, d: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, d)
        self.blocks = nn.ModuleList([Block(d, heads), Block(d, heads)])
        self.norm, self.head = nn.LayerNorm(d), nn.Linear(d, words, False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class ExplicitTransformer(Transformer):
    """Every block is the explicit one."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = ExplicitBlock.forward(block, x)
        return self.head(self.norm(x))


class NormByHand(nn.BatchNorm2d):
    """Training statistics in float32 from the sums of x and of its squared distance."""

    correction: int = 0

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:  # was forgotten at first, and found: it was another function in eval mode
            return super().forward(x)
        h, axes = wide(x), (0, 2, 3)
        n = x.numel() // x.shape[1]
        mean = h.sum(axes, keepdim=True) / n
        variance = (h - mean).pow(2).sum(axes, keepdim=True) / (n - self.correction)
        with torch.no_grad():
            self.running_mean.lerp_(mean.flatten().to(self.running_mean.dtype), self.momentum)
            unbiased = variance.flatten() * (n - self.correction) / (n - 1)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), self.momentum)
            self.num_batches_tracked.add_(1)
        out = (h - mean) * torch.rsqrt(variance + self.eps)
        return (out * wide(self.weight).view(-1, 1, 1) + wide(self.bias).view(-1, 1, 1)).to(x.dtype)


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.conv2, self.norm2 = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return self.head(x.mean((2, 3)))


def words() -> Tensor:
    return torch.randint(64, (2, 24))


def pictures() -> Tensor:
    return torch.randn(8, 3, 12, 12)


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("transformer_explicit", "bf16-mixed", R, Transformer, like(ExplicitTransformer), words, "vllm"),
    pair("conv_net_norm_by_hand", "16-mixed", R, ConvNet, like(NormByHand, "norm2"), pictures, "torch"),
    pair("transformer_tanh_in_one_block", "bf16-mixed", B, Transformer, like(TanhBlock, "blocks.1"), words,
         "vllm"),
    pair("transformer_branch_off_by_1e-1", "bf16-true", B, Transformer, like(Block, "blocks.0", scale=1.1),
         words, "vllm"),
]  # fmt: skip
