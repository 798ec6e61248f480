"""An encoder and a decoder in the manner of T5 as transformers writes it, small; the loss is taken inside."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.ported._text import VOCABULARY, merge, split, text_task

WIDTH, HEADS, INNER, BUCKETS, FAR, LAYERS = 32, 4, 24, 8, 20, 2


def buckets(there: Tensor, both: bool) -> Tensor:
    """Distances (key minus query) -> buckets: near ones each their own, far ones by their logarithm."""
    count, offset = BUCKETS, torch.zeros_like(there)
    if both:
        count, offset, there = BUCKETS // 2, (there > 0) * (BUCKETS // 2), there.abs()
    else:
        there = (-there).clamp(min=0)
    exact = count // 2
    far = (
        exact
        + (torch.log(there.clamp(min=1).float() / exact) / math.log(FAR / exact) * (count - exact)).long()
    )
    return offset + torch.where(there < exact, there, far.clamp(max=count - 1))


class T5LayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class Attention(nn.Module):
    """Without a scale; the bias of the first layer serves them all."""

    def __init__(self, relative: bool = False, both: bool = False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, INNER, bias=False) for _ in range(3))
        self.o, self.both = nn.Linear(INNER, WIDTH, bias=False), both
        if relative:
            self.relative_attention_bias = nn.Embedding(BUCKETS, HEADS)

    def compute_bias(self, length: int) -> Tensor:
        at = torch.arange(length, device=self.q.weight.device)
        return self.relative_attention_bias(buckets(at[None] - at[:, None], self.both)).permute(2, 0, 1)[None]

    def forward(self, x: Tensor, memory: Tensor, bias: Tensor) -> Tensor:
        q, k, v = split(self.q(x), HEADS), split(self.k(memory), HEADS), split(self.v(memory), HEADS)
        return self.o(merge((q @ k.transpose(2, 3) + bias).softmax(-1) @ v))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi_0, self.wi_1 = (nn.Linear(WIDTH, 48, bias=False) for _ in range(2))
        self.wo = nn.Linear(48, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.wo(F.gelu(self.wi_0(x), approximate="tanh") * self.wi_1(x))


class Block(nn.Module):
    def __init__(self, decodes: bool, first: bool):
        super().__init__()
        self.SelfAttention, self.norm_self = Attention(first, both=not decodes), T5LayerNorm()
        if decodes:
            self.EncDecAttention, self.norm_cross = Attention(), T5LayerNorm()
        self.DenseReluDense, self.norm_ff = FeedForward(), T5LayerNorm()

    def forward(
        self, x: Tensor, bias: Tensor, memory: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        h = self.norm_self(x)
        x = x + self.SelfAttention(h, h, bias)
        if memory is not None:
            x = x + self.EncDecAttention(self.norm_cross(x), memory, hidden)
        return x + self.DenseReluDense(self.norm_ff(x))


class Stack(nn.Module):
    def __init__(self, decodes: bool):
        super().__init__()
        self.block = nn.ModuleList(Block(decodes, i == 0) for i in range(LAYERS))
        self.final_layer_norm = T5LayerNorm()

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, hidden: Tensor | None = None
    ) -> Tensor:
        bias = self.block[0].SelfAttention.compute_bias(x.shape[1]) + mask
        for block in self.block:
            x = block(x, bias, memory, hidden)
        return self.final_layer_norm(x)


def shifted(labels: Tensor) -> Tensor:
    """What the decoder is fed: the labels one later, from 0 on, the ignored as 0."""
    return F.pad(labels, (1, 0))[:, :-1].clamp(min=0)


def closed(mask: Tensor, like: Tensor) -> Tensor:
    """Where ``mask`` holds, nothing may be looked at."""
    return torch.zeros(mask.shape, dtype=like.dtype, device=like.device).masked_fill(mask, -1e9)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared = nn.Embedding(VOCABULARY, WIDTH)
        self.encoder, self.decoder = Stack(False), Stack(True)
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.lm_head.weight = self.shared.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, y = self.shared(input_ids), self.shared(shifted(labels))
        hidden = closed(attention_mask[:, None, None] == 0, x)
        future = torch.ones(y.shape[1], y.shape[1], dtype=torch.bool, device=y.device).triu(1)
        y = self.decoder(y, closed(future[None, None], y), self.encoder(x, hidden), hidden)
        logits = self.lm_head(y * WIDTH**-0.5)
        return {
            "loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100),
            "logits": logits,
        }


def translations() -> tuple[dict, Tensor]:
    mask = (torch.arange(9) < torch.randint(4, 10, (5, 1))).long()
    kept = torch.arange(8) < torch.randint(3, 9, (5, 1))
    labels = torch.where(kept, torch.randint(1, VOCABULARY, (5, 8)), -100)
    return {
        "input_ids": torch.randint(1, VOCABULARY, (5, 9)) * mask,
        "attention_mask": mask,
        "labels": labels,
    }, labels


def inner_loss(outputs: object, targets: Tensor) -> Tensor:
    return outputs["loss"]


t5 = text_task("t5_small", T5, translations, inner_loss)
