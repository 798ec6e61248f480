"""A small GPT (Radford et al., 2019) with rotary positions (Su et al., "RoFormer", 2021)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def angles(context: int, size: int) -> Tensor:
    """Of each position and pair of a head's channels: [context, size / 2]."""
    rates = 10_000.0 ** (-torch.arange(0, size, 2) / size)
    return torch.arange(context)[:, None] * rates


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[N, heads, T, size]: channel i of the first half and channel i of the second are turned together."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """Causal self-attention: [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int, heads: int, context: int):
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        turn = angles(context, width // heads)
        self.register_buffer("cos", turn.cos(), persistent=False)
        self.register_buffer("sin", turn.sin(), persistent=False)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value, each [N, T, width]."""
        return self.query(x), self.key(x), self.value(x)

    def turn(self, x: Tensor) -> Tensor:
        """The rotary positions of queries or keys [N, heads, T, size]."""
        length = x.shape[2]
        return rotated(x, self.cos[:length], self.sin[:length])

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """[N, heads, T, size], where a position sees itself and those before it."""
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.project(x))
        return self.out(self.attend(self.turn(q), self.turn(k), v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and two layers of GELU, each around a shortcut: [N, T, width] -> [N, T, width]."""

    def __init__(self, width: int, heads: int, context: int, dropout: float):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, context)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attention(self.norm1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens [N, T] -> logits [N, T, vocab_size], T at most ``context``.

    Raises:
        ValueError: ``width`` is no multiple of twice ``heads``, or a size is below 1.
    """

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        heads: int = 4,
        context: int = 32,
        vocab_size: int = 64,
        dropout: float = 0.1,
    ):
        super().__init__()
        if min(width, layers, heads, context, vocab_size) < 1:
            raise ValueError("GPT: width, layers, heads, context and vocab_size must all be 1 or more")
        if width % (2 * heads):
            raise ValueError(
                f"GPT: width={width} is no multiple of 2 x heads={heads}: write width={8 * heads}"
            )
        self.tokens = nn.Embedding(vocab_size, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, heads, context, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab_size, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.tokens(tokens))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_token_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of logits [N, T, vocab_size] and tokens [N, T]."""
    return F.cross_entropy(outputs.flatten(0, 1), targets.flatten())
