"""A temporal fusion transformer: chosen variables, an LSTM over past and future, attention with one value."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, PAST, FUTURE = 8, 2, 7, 4


class Gate(nn.Module):
    def __init__(self, width: int = WIDTH):
        super().__init__()
        self.fc = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        return F.glu(self.fc(x), -1)


class GRN(nn.Module):
    """A gated residual network; a context may join the first layer."""

    def __init__(self, before: int, after: int, context: bool = False):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(before, after), nn.Linear(after, after)
        self.context = nn.Linear(WIDTH, after, bias=False) if context else None
        self.skip = nn.Linear(before, after) if before != after else nn.Identity()
        self.gate, self.norm = Gate(after), nn.LayerNorm(after)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.fc1(x)
        if self.context is not None:
            h = h + self.context(context)
        return self.norm(self.skip(x) + self.gate(self.fc2(F.elu(h))))


class GateNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.norm = Gate(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.norm(skip + self.gate(x))


class Select(nn.Module):
    """Variables [N, T, V] -> their features' mean [N, T, C], weighed by all of them and a context."""

    def __init__(self, count: int):
        super().__init__()
        self.lifts = nn.ModuleList(nn.Linear(1, WIDTH) for _ in range(count))
        self.weigh = GRN(count * WIDTH, count, context=True)
        self.each = nn.ModuleList(GRN(WIDTH, WIDTH) for _ in range(count))

    def forward(self, x: Tensor, context: Tensor) -> Tensor:
        features = [lift(x[..., i : i + 1]) for i, lift in enumerate(self.lifts)]
        shares = self.weigh(torch.cat(features, -1), context[:, None]).softmax(-1)
        made = torch.stack([grn(x) for grn, x in zip(self.each, features, strict=True)], -1)
        return (made * shares[..., None, :]).sum(-1)


class Interpretable(nn.Module):
    """Causal attention whose heads share their values and are averaged."""

    def __init__(self):
        super().__init__()
        self.size = WIDTH // HEADS
        self.q, self.k = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.v, self.out = nn.Linear(WIDTH, self.size), nn.Linear(self.size, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (f(x).unflatten(2, (HEADS, self.size)).transpose(1, 2) for f in (self.q, self.k))
        scores = q @ k.mT / self.size**0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).triu(1)
        shares = scores.masked_fill(later, float("-inf")).softmax(-1)
        return self.out((shares @ self.v(x)[:, None]).mean(1))


class Fusion(nn.Module):
    """What is fixed [N, 3], what was [N, 7, 4], what is known to come [N, 4, 2] -> quantiles [N, 4, 3]."""

    def __init__(self):
        super().__init__()
        self.fixed = nn.Linear(3, WIDTH)
        self.contexts = nn.ModuleList(GRN(WIDTH, WIDTH) for _ in range(4))
        self.past, self.future = Select(4), Select(2)
        self.encoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.decoder = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.local, self.enrich = GateNorm(), GRN(WIDTH, WIDTH, context=True)
        self.attention, self.attended = Interpretable(), GateNorm()
        self.feed, self.last = GRN(WIDTH, WIDTH), GateNorm()
        self.quantiles = nn.Linear(WIDTH, 3)

    def forward(self, fixed: Tensor, past: Tensor, future: Tensor) -> Tensor:
        select, hidden, cell, enrich = (grn(self.fixed(fixed)) for grn in self.contexts)
        past, future = self.past(past, select), self.future(future, select)
        seen, state = self.encoder(past, (hidden[None], cell[None]))
        ahead, _ = self.decoder(future, state)
        x = self.local(torch.cat([seen, ahead], 1), torch.cat([past, future], 1))
        rich = self.enrich(x, enrich[:, None])
        y = self.attended(self.attention(rich), rich)[:, PAST:]
        return self.quantiles(self.last(self.feed(y), x[:, PAST:]))


def sales() -> tuple[dict[str, Tensor], Tensor]:
    """Waves whose height is fixed, and what they come to."""
    fixed, steps = torch.randn(10, 3), torch.arange(PAST + FUTURE)
    phase = 0.7 * steps + 3 * torch.rand(10, 1)
    wave = fixed[:, :1] + torch.sin(phase) * (1 + fixed[:, 1:2].abs())
    known = torch.stack([torch.cos(phase), torch.randn(10, len(steps))], 2)
    past = torch.cat([wave[:, :PAST, None], torch.randn(10, PAST, 1), known[:, :PAST]], 2)
    return {"fixed": fixed, "past": past, "future": known[:, PAST:]}, wave[:, PAST:]


def pinball(outputs: Tensor, target: Tensor) -> Tensor:
    """The loss of the quantiles 0.1, 0.5 and 0.9."""
    over = target.to(outputs)[..., None] - outputs
    level = torch.tensor([0.1, 0.5, 0.9]).to(outputs)
    return torch.maximum(level * over, (level - 1) * over).mean()
