"""Whole small networks of other kinds: Llama's two layers, a residual net, a vision net's beginning."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import gain, group, like, matrix, plain, wide

pair = group(__name__, "network")


class RMSNorm(nn.Module):
    """Rounded before the weight; ``still`` takes the length for a constant in the backward pass."""

    still: bool = False

    def __init__(self, d: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(gain(d))

    def forward(self, x: Tensor) -> Tensor:
        rstd = torch.rsqrt(wide(x).pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * (wide(x) * (rstd.detach() if self.still else rstd)).to(x.dtype)


class TorchNorm(RMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(wide(x), x.shape[-1:], wide(self.weight), 1e-6).to(x.dtype)


def turn(x: Tensor, first: int = 0) -> Tensor:
    """Rotary embedding, half the size apart, in float32."""
    kind, size = wide(x).dtype, x.shape[-1]
    rates = 10000.0 ** (-torch.arange(0, size, 2, dtype=kind) / size)
    a = torch.outer(torch.arange(first, first + x.shape[-2], dtype=kind), rates)
    low, high = wide(x).chunk(2, -1)
    return torch.cat([low * a.cos() - high * a.sin(), high * a.cos() + low * a.sin()], -1).to(x.dtype)


class Attention(nn.Module):
    """Four heads of queries over two of keys, causal."""

    late: int = 0

    def __init__(self, d: int) -> None:
        super().__init__()
        self.q, self.kv, self.o = (nn.Linear(*shape, bias=False) for shape in ((d, d), (d, d), (d, d)))

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q = self.q(x).unflatten(-1, (4, -1)).transpose(1, 2)
        k, v = self.kv(x).unflatten(-1, (2, 2, -1)).permute(2, 0, 3, 1, 4)
        return turn(q), turn(k, self.late), v

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(out.transpose(1, 2).flatten(2))


class ExplicitAttention(Attention):
    """Scores by hand, a group's keys not copied; the weights are divided by their sum last."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.parts(x)
        with plain():
            scores = wide(q).unflatten(1, (2, 2)) @ wide(k).unsqueeze(2).mT * q.shape[-1] ** -0.5
            mask = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
            scores = scores.masked_fill(mask, -torch.inf)
            weights = torch.exp(scores - scores.amax(-1, keepdim=True))
            out = wide(weights.to(v.dtype)) @ wide(v).unsqueeze(2) / weights.sum(-1, keepdim=True)
        return self.o(out.to(v.dtype).flatten(1, 2).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, d: int) -> None:
        super().__init__()
        self.norm1, self.norm2, self.attention = RMSNorm(d), RMSNorm(d), Attention(d)
        self.gate, self.up = nn.Linear(d, 3 * d, False), nn.Linear(d, 3 * d, False)
        self.down = nn.Linear(3 * d, d, False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Llama(nn.Module):
    def __init__(self, words: int = 48, d: int = 64) -> None:
        super().__init__()
        self.embed, self.layers = nn.Embedding(words, d), nn.ModuleList([Layer(d), Layer(d)])
        self.norm, self.head = RMSNorm(d), nn.Linear(d, words, False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class Residual(nn.Module):
    """Two convolutions with group norm beside a shortcut."""

    scale: float = 1.0

    def __init__(self, n: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(n, n, 3, padding=1), nn.Conv2d(n, n, 3, padding=1)
        self.norm1, self.norm2 = nn.GroupNorm(4, n), nn.GroupNorm(4, n)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.relu(self.norm1(self.conv1(x))))
        return F.relu(self.norm2(h) + x * self.scale)


class LaidOut(Residual):
    """Channels last, and each norm over float32 with its weight after."""

    def forward(self, x: Tensor) -> Tensor:
        def norm(module: nn.GroupNorm, h: Tensor) -> Tensor:
            unit = F.group_norm(wide(h), 4, eps=module.eps)
            return (unit * wide(module.weight).view(-1, 1, 1) + wide(module.bias).view(-1, 1, 1)).to(h.dtype)

        h = self.conv1(x.contiguous(memory_format=torch.channels_last))
        h = norm(self.norm2, self.conv2(F.relu(norm(self.norm1, h))))
        return F.relu(h + x)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block1, self.block2 = nn.Conv2d(3, 16, 3, padding=1), Residual(16), Residual(16)
        self.head = nn.Linear(16, 40)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.block2(self.block1(self.stem(x))).mean((2, 3)))


class Patches(nn.Module):
    """Patches by a convolution with a stride, learnt places, a norm and a linear layer."""

    def __init__(self, d: int = 48) -> None:
        super().__init__()
        self.patch, self.places = nn.Conv2d(3, d, 4, stride=4), nn.Parameter(0.1 * matrix(16, d))
        self.norm, self.out = nn.LayerNorm(d), nn.Linear(d, d)

    def embed(self, x: Tensor) -> Tensor:
        return self.patch(x).flatten(2).mT

    def forward(self, x: Tensor) -> Tensor:
        return self.out(F.gelu(self.norm(self.embed(x) + self.places)))


class UnfoldedPatches(Patches):
    def embed(self, x: Tensor) -> Tensor:
        rows = F.unfold(x, 4, stride=4).mT
        return rows @ self.patch.weight.flatten(1).mT + self.patch.bias


def words() -> Tensor:
    return torch.randint(48, (2, 20))


def pictures() -> Tensor:
    return torch.randn(8, 3, 16, 16)


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("llama_explicit_attention", "bf16-mixed", R, Llama, like(ExplicitAttention, "layers.1.attention"),
         words, "vllm"),
    pair("llama_norm_of_torch", "bf16-true", R, Llama, like(TorchNorm, "layers.0.norm2"), words, "liger rms"),
    pair("resnet_laid_out", "16-mixed", R, ResNet, like(LaidOut, "block2"), pictures, "torch"),
    pair("patches_unfolded", "16-true", R, Patches, like(UnfoldedPatches), pictures, "torch"),
    pair("llama_keys_a_place_late", "bf16-mixed", B, Llama, like(Attention, "layers.1.attention", late=1),
         words, "vllm"),
    pair("llama_norm_held_still", "bf16-true", B, Llama, like(RMSNorm, "layers.1.norm1", still=True), words,
         "liger rms"),
    pair("resnet_shortcut_off_by_1e-2", "16-mixed", B, ResNet, like(Residual, "block1", scale=1.01), pictures,
         "torch"),
]  # fmt: skip
