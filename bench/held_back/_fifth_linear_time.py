"""Two networks that mix time by a decaying state: one per channel (RWKV), one per head with gates."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_ports import next_token, tokens
from bench.tasks import _task


def before(x: Tensor) -> Tensor:
    """Each step's predecessor, zero for the first."""
    return F.pad(x, (0, 0, 1, -1))


class TimeMix(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.decay = nn.Parameter(torch.linspace(-2, 0.5, width))
        self.bonus = nn.Parameter(0.5 * torch.randn(width))
        self.mix_key, self.mix_value, self.mix_gate = (nn.Parameter(torch.rand(width)) for _ in range(3))
        self.key, self.value, self.gate, self.output = (nn.Linear(width, width, bias=False) for _ in range(4))

    def average(self, k: Tensor, v: Tensor) -> Tensor:
        """Of the values so far, weighed by exp(key) and by age; the exponents are kept small."""
        total, weight, top = (
            torch.zeros_like(v[:, 0]),
            torch.zeros_like(v[:, 0]),
            torch.full_like(v[:, 0], -1e30),
        )
        y = []
        for key, value in zip(k.unbind(1), v.unbind(1), strict=True):
            now = torch.maximum(top, key + self.bonus)
            old, new = (top - now).exp(), (key + self.bonus - now).exp()
            y.append((old * total + new * value) / (old * weight + new))
            faded = top - self.decay.exp()
            top = torch.maximum(faded, key)
            old, new = (faded - top).exp(), (key - top).exp()
            total, weight = old * total + new * value, old * weight + new
        return torch.stack(y, 1)

    def forward(self, x: Tensor) -> Tensor:
        past = before(x)
        k, v = self.key(past.lerp(x, self.mix_key)), self.value(past.lerp(x, self.mix_value))
        return self.output(self.gate(past.lerp(x, self.mix_gate)).sigmoid() * self.average(k, v))


class ChannelMix(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.mix_key, self.mix_gate = (nn.Parameter(torch.rand(width)) for _ in range(2))
        self.key, self.value = nn.Linear(width, 32, bias=False), nn.Linear(32, width, bias=False)
        self.gate = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        past = before(x)
        h = self.key(past.lerp(x, self.mix_key)).relu().square()
        return self.gate(past.lerp(x, self.mix_gate)).sigmoid() * self.value(h)


class Receptive(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.time = nn.LayerNorm(width), TimeMix(width)
        self.norm2, self.channel = nn.LayerNorm(width), ChannelMix(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(self.norm1(x))
        return x + self.channel(self.norm2(x))


class ReceptiveDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.blocks = nn.Sequential(*(Receptive(16) for _ in range(3)))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 20, bias=False)

    def forward(self, drawn: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.first(self.embed(drawn)))))


class GatedState(nn.Module):
    """Linear attention whose state is multiplied at each step by gates of the key's features."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.fade = (nn.Linear(width, width // 2) for _ in range(3))
        self.v, self.swish, self.out = (nn.Linear(width, width) for _ in range(3))
        self.norm = nn.RMSNorm(width // heads, eps=1e-5)

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, fade: Tensor) -> Tensor:
        """All [N, T, heads, features]; ``fade`` holds logarithms."""
        state, y = 0.0, []
        for t in range(q.shape[1]):
            state = state * fade[:, t, ..., None].exp() + k[:, t, ..., None] * v[:, t, :, None]
            y.append((q[:, t, :, None] @ state).squeeze(2))
        return torch.stack(y, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, fade = (f(x).unflatten(2, (self.heads, -1)) for f in (self.q, self.k, self.v, self.fade))
        y = self.mixed(q * q.shape[-1] ** -0.5, k, v, F.logsigmoid(fade) / 2)
        return self.out(self.norm(y).flatten(2) * F.silu(self.swish(x)))


class GatedBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.norm1, self.mix, self.norm2 = nn.LayerNorm(width), GatedState(width, 2), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GatedForecast(nn.Module):
    """[N, T, 5] -> the next step of each."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Linear(5, 16)
        self.blocks = nn.ModuleList(GatedBlock(16) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def _walk() -> tuple[Tensor, Tensor]:
    x = torch.randn(6, 12, 5).cumsum(1) / 2
    return x[:, :-1], x[:, 1:]


receptive = _task("fifth_receptive", ReceptiveDecoder, tokens(4, 10, 20), next_token)
gated_states = _task("fifth_gated_states", GatedForecast, _walk, F.mse_loss)
