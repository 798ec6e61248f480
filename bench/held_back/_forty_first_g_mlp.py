"""A small gMLP: causal text with tiny attention and two heads, and a vision variant, side by side."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

VOCABULARY, LENGTH, TOPICS, SENTENCES = 31, 13, 4, 3
CHANNELS, HIGH, WIDE, PATCH, SHAPES = 3, 8, 12, 4, 7


class Residual(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


class PreNorm(nn.Module):
    def __init__(self, dim: int, fn: nn.Module):
        super().__init__()
        self.fn = fn
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(self.norm(x))


class Attention(nn.Module):
    """The tiny attention: one head, whose result is as wide as the gate."""

    def __init__(self, dim_in: int, dim_out: int, dim_inner: int, causal: bool = False):
        super().__init__()
        self.scale = dim_inner**-0.5
        self.causal = causal
        self.to_qkv = nn.Linear(dim_in, dim_inner * 3, bias=False)
        self.to_out = nn.Linear(dim_inner, dim_out)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        sim = einsum("b i d, b j d -> b i j", q, k) * self.scale
        if self.causal:
            mask = torch.ones(sim.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            sim = sim.masked_fill(mask[None], -torch.finfo(q.dtype).max)
        return self.to_out(einsum("b i j, b j d -> b i d", sim.softmax(dim=-1), v))


class SpatialGatingUnit(nn.Module):
    def __init__(self, dim: int, dim_seq: int, causal: bool, act: nn.Module, heads: int):
        super().__init__()
        self.heads, self.causal, self.act = heads, causal, act
        self.norm = nn.LayerNorm(dim // 2)
        self.weight = nn.Parameter(torch.zeros(heads, dim_seq, dim_seq))
        self.bias = nn.Parameter(torch.ones(heads, dim_seq))

    def forward(self, x: Tensor, gate_res: Tensor | None = None) -> Tensor:
        res, gate = x.chunk(2, dim=-1)
        gate = self.norm(gate)
        weight = self.weight
        if self.causal:
            mask = torch.ones(weight.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            weight = weight.masked_fill(mask[None], 0.0)
        gate = gate.unflatten(2, (self.heads, -1)).transpose(1, 2)
        gate = einsum("b h n d, h m n -> b h m d", gate, weight) + self.bias[None, :, :, None]
        gate = gate.transpose(1, 2).flatten(2)
        if gate_res is not None:
            gate = gate + gate_res
        return self.act(gate) * res


class GMLPBlock(nn.Module):
    def __init__(self, dim: int, dim_ff: int, seq_len: int, heads: int, attn_dim: int, causal: bool, act):
        super().__init__()
        self.attn = Attention(dim, dim_ff // 2, attn_dim, causal) if attn_dim else None
        self.proj_in = nn.Sequential(nn.Linear(dim, dim_ff), nn.GELU())
        self.sgu = SpatialGatingUnit(dim_ff, seq_len, causal, act, heads)
        self.proj_out = nn.Linear(dim_ff // 2, dim)

    def forward(self, x: Tensor) -> Tensor:
        gate_res = self.attn(x) if self.attn is not None else None
        return self.proj_out(self.sgu(self.proj_in(x), gate_res=gate_res))


class GMLP(nn.Module):
    """Tokens [N, T] and which are real -> the next tokens' logits [N, T, V], the topic's [N, K]."""

    def __init__(self, dim: int = 20, depth: int = 3, dim_ff: int = 56, heads: int = 2, attn_dim: int = 10):
        super().__init__()
        self.to_embed = nn.Embedding(VOCABULARY, dim)
        blocks = (GMLPBlock(dim, dim_ff, LENGTH, heads, attn_dim, True, nn.Identity()) for _ in range(depth))
        self.layers = nn.ModuleList(Residual(PreNorm(dim, block)) for block in blocks)
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, VOCABULARY)
        self.to_class = nn.Linear(dim, TOPICS)

    def forward(self, tokens: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        x = self.to_embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x, real = self.norm(x), mask[..., None].to(x.dtype)
        return self.to_logits(x), self.to_class((x * real).sum(1) / real.sum(1))


class Patches(nn.Module):
    """b c (h p1) (w p2) -> b (h w) (p1 p2 c)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class GMLPVision(nn.Module):
    def __init__(self, dim: int = 18, depth: int = 2, dim_ff: int = 44):
        super().__init__()
        count = HIGH * WIDE // PATCH**2
        self.to_patch_embed = nn.Sequential(Patches(), nn.Linear(CHANNELS * PATCH**2, dim))
        blocks = (GMLPBlock(dim, dim_ff, count, 1, 0, False, nn.Tanh()) for _ in range(depth))
        self.layers = nn.ModuleList(Residual(PreNorm(dim, block)) for block in blocks)
        self.norm = nn.LayerNorm(dim)
        self.to_logits = nn.Linear(dim, SHAPES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.to_patch_embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.to_logits(self.norm(x).mean(1))


class TextAndVision(nn.Module):
    def __init__(self):
        super().__init__()
        self.text = GMLP()
        self.vision = GMLPVision()
        for name, weight in self.named_parameters():
            one = name.endswith(("norm.weight", "sgu.bias"))
            spread = 0.2 if one or weight.ndim == 1 else weight.shape[-1] ** -0.5
            nn.init.normal_(weight, float(one), spread)

    def forward(self, tokens: Tensor, mask: Tensor, image: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return *self.text(tokens, mask), self.vision(image)


def sentences_and_waves() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Sentences that count on by a stride of their topic, padded, and waves as long as their class says."""
    topic, shape = torch.randint(TOPICS, (SENTENCES,)), torch.randint(SHAPES, (SENTENCES,))
    steps = (topic[:, None] + 2) * torch.arange(LENGTH + 1) + torch.randint(30, (SENTENCES, 1))
    real = torch.arange(LENGTH) < torch.randint(5, LENGTH, (SENTENCES, 1))
    tokens = 1 + steps % (VOCABULARY - 1)
    following = tokens[:, 1:].masked_fill(~real, -100)
    line = torch.arange(HIGH)[:, None] + 2 * torch.arange(WIDE) + torch.arange(CHANNELS)[:, None, None]
    image = (line * (shape[:, None, None, None] + 1) * math.pi / 11).sin()
    image = image + 0.3 * torch.randn(image.shape)
    return {"tokens": tokens[:, :-1] * real, "mask": real, "image": image}, (following, topic, shape)


def three_losses(outputs: tuple[Tensor, Tensor, Tensor], target: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """The cross entropies of the next tokens, the topic and the picture's class, by eight."""
    losses = (F.cross_entropy(x.flatten(0, -2), y.flatten()) for x, y in zip(outputs, target, strict=True))
    return sum(losses) / 8
