"""Two decoders: biased by distance with norms on both sides; rotary with grouped queries and a window."""

import torch
from torch import Tensor, nn

from bench.held_back._fifth_ports import next_token, tokens
from bench.tasks import _task


class Biased(nn.Module):
    """Causal attention whose scores fall with the distance, at a rate of each head's own (ALiBi)."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))

    def bias(self, x: Tensor) -> Tensor:
        slopes = 2.0 ** (-8 / self.heads * torch.arange(1, self.heads + 1).to(x))
        steps = torch.arange(x.shape[1]).to(x)
        distance = steps - steps[:, None]
        return (slopes[:, None, None] * distance).masked_fill(distance > 0, float("-inf"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        scores = q @ k.mT / q.shape[-1] ** 0.5 + self.bias(x)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Sandwich(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.attention_before, self.attention_after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Biased(width, heads)
        self.mlp_before, self.mlp_after = nn.LayerNorm(width), nn.LayerNorm(width)
        gelu = nn.GELU(approximate="tanh")
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), gelu, nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention_after(self.attention(self.attention_before(x)))
        return x + self.mlp_after(self.mlp(self.mlp_before(x)))


class AlibiDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 24)
        self.blocks = nn.ModuleList(Sandwich(24, 4) for _ in range(3))
        self.norm = nn.LayerNorm(24)
        self.head = nn.Linear(24, 23)

    def forward(self, drawn: Tensor) -> Tensor:
        x = self.embed(drawn)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Grouped(nn.Module):
    """Rotary attention of two queries a key, over the last ``window`` steps."""

    def __init__(self, width: int, heads: int, window: int):
        super().__init__()
        self.heads, self.groups, self.window = heads, heads // 2, window
        self.q = nn.Linear(width, width, bias=False)
        self.k, self.v = (nn.Linear(width, width // 2, bias=False) for _ in range(2))
        self.out = nn.Linear(width, width, bias=False)

    def turn(self, x: Tensor) -> Tensor:
        """Each even feature and the odd one after it as a point of the plane, turned by the step."""
        steps, pairs = torch.arange(x.shape[2]).to(x), torch.arange(0, x.shape[3], 2).to(x)
        angles = steps[:, None] * 50.0 ** (-pairs / x.shape[3])
        cos, sin = angles.cos(), angles.sin()
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, odd * cos + even * sin], -1).flatten(3)

    def hidden(self, length: int) -> Tensor:
        seen = torch.ones(length, length, dtype=torch.bool)
        return ~seen.tril().triu(1 - self.window)

    def forward(self, x: Tensor) -> Tensor:
        q = self.turn(self.q(x).unflatten(2, (self.heads, -1)).transpose(1, 2))
        k, v = (f(x).unflatten(2, (self.groups, -1)).transpose(1, 2) for f in (self.k, self.v))
        k, v = (y.repeat_interleave(self.heads // self.groups, 1) for y in (self.turn(k), v))
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores.masked_fill(self.hidden(x.shape[1]).to(x.device), float("-inf"))
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Gated(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        self.act = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.gate(x)) * self.up(x))


class GroupedBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.norm2 = (nn.RMSNorm(width, eps=1e-6) for _ in range(2))
        self.attention = Grouped(width, 4, 4)
        self.mlp = Gated(width, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GroupedDecoder(nn.Module):
    """The head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(23, 24)
        nn.init.normal_(self.embed.weight, std=0.3)
        self.blocks = nn.ModuleList(GroupedBlock(24) for _ in range(3))
        self.norm = nn.RMSNorm(24, eps=1e-6)
        self.head = nn.Linear(24, 23, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, drawn: Tensor) -> Tensor:
        x = self.embed(drawn)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


alibi_decoder = _task("fifth_alibi_decoder", AlibiDecoder, tokens(5, 10, 23), next_token)
grouped_decoder = _task("fifth_grouped_decoder", GroupedDecoder, tokens(5, 10, 23), next_token)
