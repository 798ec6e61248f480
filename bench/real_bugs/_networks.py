"""The networks that the published bugs are shown in: thin, and made of methods that one bug each replaces."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bench.tasks import _task, _tokens_loss

VOCABULARY, WIDTH, LENGTH = 23, 24, 10


class RMSNorm(nn.Module):
    """As Gemma has it: the gain is one more than the weight."""

    def __init__(self, width: int = WIDTH, eps: float = 1e-6):
        super().__init__()
        self.weight, self.eps = nn.Parameter(0.1 * torch.randn(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


def angles(length: int, width: int, like: Tensor) -> Tensor:
    """[T, D / 2]: position times frequency."""
    places = torch.arange(width // 2, device=like.device, dtype=like.dtype)
    return torch.arange(length, device=like.device, dtype=like.dtype)[:, None] * 10000 ** (
        -2 * places / width
    )


def slopes(heads: int) -> list[float]:
    """ALiBi's, where the number of heads need not be a power of two (Press et al., their published code)."""
    if math.log2(heads).is_integer():
        return [2 ** (-8 * (h + 1) / heads) for h in range(heads)]
    nearest = 2 ** int(math.log2(heads))
    return slopes(nearest) + slopes(2 * nearest)[0::2][: heads - nearest]


class Attention(nn.Module):
    """Causal self-attention [N, T, D] with grouped keys and values, and rotary, ALiBi or no positions."""

    def __init__(self, heads: int = 4, groups: int = 2, positions: str = "rope", window: int = LENGTH):
        super().__init__()
        self.heads, self.groups, self.positions, self.window = heads, groups, positions, window
        narrow = WIDTH // heads * groups
        self.q, self.out = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = nn.Linear(WIDTH, narrow, bias=False), nn.Linear(WIDTH, narrow, bias=False)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(2, (heads, -1)).transpose(1, 2)

    def rotate(self, x: Tensor) -> Tensor:
        angle = angles(x.shape[2], x.shape[3], x)
        first, second = x.chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def repeat(self, x: Tensor) -> Tensor:
        return x.repeat_interleave(self.heads // self.groups, 1)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.mT * q.shape[-1] ** -0.5

    def allowed(self, length: int, device: torch.device) -> Tensor:
        back = torch.arange(length, device=device)
        back = back[:, None] - back
        return (back >= 0) & (back < self.window)

    def slopes(self) -> list[float]:
        return slopes(self.heads)

    def bias(self, scores: Tensor) -> Tensor:
        """[heads, T, T], added to the scores."""
        places = torch.arange(scores.shape[-1], device=scores.device, dtype=scores.dtype)
        return scores.new_tensor(self.slopes())[:, None, None] * (places - places[:, None])

    def masked(self, scores: Tensor) -> Tensor:
        if self.positions == "alibi":
            scores = scores + self.bias(scores)
        return scores.masked_fill(~self.allowed(scores.shape[-1], scores.device), -torch.inf)

    def weights(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def merge(self, y: Tensor) -> Tensor:
        return y.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(self.q(x), self.heads), self.split(self.k(x), self.groups), self.v(x)
        if self.positions == "rope":
            q, k = self.rotate(q), self.rotate(k)
        k, v = self.repeat(k), self.repeat(self.split(v, self.groups))
        return self.out(self.merge(self.weights(self.masked(self.scores(q, k))) @ v))


class Prefixed(Attention):
    """Attends to four learned keys and values before its own, as to a cache."""

    def __init__(self, attention: Attention):
        super().__init__(positions="none")
        self.load_state_dict(attention.state_dict())
        generator = torch.Generator().manual_seed(3)
        self.past = nn.Parameter(torch.randn(2, 1, self.heads, 4, 6, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        q = self.split(self.q(x), self.heads)
        k, v = (self.repeat(self.split(layer(x), self.groups)) for layer in (self.k, self.v))
        k, v = (
            torch.cat([p.expand(len(x), -1, -1, -1), own], 2)
            for p, own in zip(self.past, (k, v), strict=True)
        )
        return self.out(self.merge(self.mix(q, k, v)))

    def mix(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(
            k.shape[2] - q.shape[2]
        )
        return (self.scores(q, k).masked_fill(~mask, -torch.inf)).softmax(-1) @ v


class Block(nn.Module):
    """A norm before and one behind each half, as in Gemma 2."""

    def __init__(self, **attention: object):
        super().__init__()
        self.attn, self.up, self.down = Attention(**attention), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)
        self.act = nn.GELU("tanh")
        self.norm1, self.post1, self.norm2, self.post2 = (RMSNorm() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.post1(self.attn(self.norm1(x)))
        return x + self.post2(self.down(self.act(self.up(self.norm2(x)))))


class Decoder(nn.Module):
    """Tokens [N, T] -> logits [N, T, V]."""

    def __init__(self, **attention: object):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(**attention) for _ in range(2))
        self.norm, self.head = RMSNorm(), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _tokens() -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (6, LENGTH + 1))
    return tokens[:, :-1], tokens[:, 1:]


def own_loss(outputs: Tensor, targets: object) -> Tensor:
    """Of a network whose output is its loss."""
    return outputs


def losing(name: str, network: Callable[[], nn.Module], batch: Callable[[], dict]):
    """A task whose network computes its own loss."""
    return _task(name, network, lambda: (batch(), 0), own_loss)


ATTENTION = ("blocks.0.attn", "blocks.1.attn")


def _cached() -> nn.Module:
    model = Decoder(positions="none")
    for block in model.blocks:
        block.attn = Prefixed(block.attn)
    return model


decoder = _task("decoder", Decoder, _tokens, _tokens_loss)
windowed = _task("windowed", lambda: Decoder(window=3), _tokens, _tokens_loss)
alibi = _task("alibi", lambda: Decoder(heads=6, groups=6, positions="alibi"), _tokens, _tokens_loss)
cached = _task("cached", _cached, _tokens, _tokens_loss)
