"""Networks on sequences and tables for the held-out faults: a tagger, a translator, experts and others."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn


class PrefixMean(nn.Module):
    """The mean of all time steps so far."""

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1, device=x.device).to(x.dtype)[:, None]


class Tagger(nn.Module):
    """Tokens [N, T] -> logits [N, T, 5]; token 0 is padding, which is tagged too."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(37, 10, padding_idx=0)
        self.lstm = nn.LSTM(10, 9, batch_first=True, bidirectional=True)
        self.prefix = PrefixMean()
        self.fc = nn.Linear(36, 5)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.lstm(self.embed(tokens))
        return self.fc(torch.cat([states, self.prefix(states)], -1))


class Attention(nn.Module):
    """Multi-head attention of ``x`` on ``memory``; ``mask`` [N, 1, T, S] is true where it may look."""

    def __init__(self, width: int, heads: int, p: float = 0.0):
        super().__init__()
        self.heads = heads
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.drop = nn.Dropout(p)

    def split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.split(self.query(x)), self.split(self.key(memory)), self.split(self.value(memory))
        scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        return self.out((self.drop(scores.softmax(-1)) @ v).transpose(1, 2).flatten(2))


class AddNorm(nn.Module):
    """The norm of the sum of a stream and a branch."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        return self.norm(x + branch)


def feed_forward(width: int) -> nn.Sequential:
    up, down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
    return nn.Sequential(OrderedDict(up=up, act=nn.GELU(), down=down))


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention, self.add1 = Attention(width, heads), AddNorm(width)
        self.cross, self.add2 = Attention(width, heads), AddNorm(width)
        self.mlp, self.add3 = feed_forward(width), AddNorm(width)

    def forward(self, x: Tensor, memory: Tensor, causal: Tensor) -> Tensor:
        x = self.add1(x, self.attention(x, x, causal))
        x = self.add2(x, self.cross(x, memory))
        return self.add3(x, self.mlp(x))


class Translator(nn.Module):
    """Source [N, S] and target [N, T] -> logits [N, T, V]; one embedding for both and for the head."""

    def __init__(self, width: int = 16, heads: int = 2):
        super().__init__()
        self.embed = nn.Embedding(31, width)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.position = nn.Parameter(0.1 * torch.randn(10, width))
        self.encoder, self.add1 = Attention(width, heads), AddNorm(width)
        self.mlp, self.add2 = feed_forward(width), AddNorm(width)
        self.decoder = nn.ModuleList(DecoderLayer(width, heads) for _ in range(2))
        self.head = nn.Linear(width, 31, bias=False)
        self.head.weight = self.embed.weight

    def place(self, tokens: Tensor) -> Tensor:
        return self.embed(tokens) + self.position[: tokens.shape[1]]

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        m = self.place(source)
        m = self.add1(m, self.encoder(m, m))
        m = self.add2(m, self.mlp(m))
        steps = target.shape[1]
        x = self.place(target)
        causal = torch.ones(1, 1, steps, steps, dtype=torch.bool, device=x.device).tril()
        for layer in self.decoder:
            x = layer(x, m, causal)
        return self.head(x)


class EncoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, p: float):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width, heads, p)
        self.norm2, self.mlp, self.drop = nn.LayerNorm(width), feed_forward(width), nn.Dropout(p)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, mask[:, None, None])
        return x + self.drop(self.mlp(self.norm2(x)))


class MaskedEncoder(nn.Module):
    """Tokens and a mask, true at real tokens, both [N, T] -> [N, 4]; dropout at three kinds of places."""

    def __init__(self, p: float = 0.0, width: int = 16, heads: int = 4):
        super().__init__()
        self.embed, self.drop = nn.Embedding(41, width), nn.Dropout(p)
        self.position = nn.Parameter(0.1 * torch.randn(10, width))
        self.layers = nn.ModuleList(EncoderLayer(width, heads, p) for _ in range(2))
        self.norm, self.fc = nn.LayerNorm(width), nn.Linear(width, 4)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens) + self.position[: tokens.shape[1]])
        for layer in self.layers:
            x = layer(x, mask)
        real = mask[:, :, None].to(x.dtype)
        return self.fc((self.norm(x) * real).sum(1) / real.sum(1))


class Siamese(nn.Module):
    """Two signals [N, 2, 9] -> logits [N, 2]; one encoder, called twice."""

    def __init__(self, p: float = 0.0, norm: type[nn.Module] = nn.BatchNorm1d):
        super().__init__()
        parts = OrderedDict(conv=nn.Conv1d(2, 8, 3, padding=1), norm=norm(8), act=nn.Tanh())
        self.encoder = nn.Sequential(
            parts | {"flat": nn.Flatten(), "drop": nn.Dropout(p), "fc": nn.Linear(72, 10)}
        )
        self.head = nn.Linear(10, 2)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        left, right = self.encoder(left), self.encoder(right)
        return self.head((left - right) ** 2)
