"""Positions and masks: no floating number tells of them, and what is computed of them goes everywhere."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, TOKENS, HEADS = 8, 7, 2


class Grid(nn.Module):
    """[N, T], whether a token begins a line -> its line and its place there, [N, T, 2]."""

    def forward(self, begins):
        lines = begins.cumsum(1)
        places = torch.zeros_like(lines)
        for t in range(1, TOKENS):
            places[:, t] = torch.where(begins[:, t], 0, places[:, t - 1] + 1)
        return torch.stack([lines, places], -1)


class Seen(nn.Module):
    """-> [N H, T, T], whether a token sees another: those of its line and of the one before."""

    def forward(self, lines):
        lines = lines.repeat_interleave(HEADS, 0)
        apart = lines[:, :, None] - lines[:, None]
        return (apart == 0) | (apart == 1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("speeds", torch.tensor([1.0, 0.3]))

    def forward(self, x, places, seen):
        angles = (places[..., None] * self.speeds).flatten(2)
        q, k, v = (parted(y) for y in (turned(self.q(x), angles), turned(self.k(x), angles), self.v(x)))
        shares = (q @ k.mT / WIDTH**0.5).masked_fill(~seen, -torch.inf).softmax(-1)
        y = (shares @ v).unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2)
        return x + torch.tanh(y)


def parted(x):
    """[N, T, C] -> [N H, T, C / H]"""
    return x.unflatten(2, (HEADS, -1)).transpose(1, 2).flatten(0, 1)


def turned(x, angles):
    one, other = x.chunk(2, -1)
    return torch.cat(
        [one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1
    )


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.grid, self.seen = Grid(), Seen()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x, begins):
        places = self.grid(begins)
        seen = self.seen(places[..., 0])
        for block in self.blocks:
            x = block(x, places, seen)
        return self.head(x.mean(1))


class Flat(FlatPort):
    """Places as [2, N, T], and one mask for all heads, of what is hidden."""

    def forward(self, x, begins):
        lines, count = begins.cumsum(1), torch.arange(TOKENS).expand(begins.shape)
        first = torch.where(begins, count, 0).cummax(1).values
        later = (lines > 1) if self.fault == "later lines begin at one" else 0
        places = torch.stack([lines, count - first + later]).to(x)
        apart = lines[:, :, None] - lines[:, None]
        hidden = (apart < 0) | (apart > 1)
        if self.fault == "a line sees the next one":
            hidden = (apart < -1) | (apart > 0)
        line, place = places
        angles = torch.stack([line, 0.3 * line, place, 0.3 * place], -1)
        for i in range(2):
            q, k, v = (self.linear(f"blocks_{i}_{name}", x) for name in "qkv")
            q, k, v = (y.unflatten(2, (HEADS, -1)) for y in (turned(q, angles), turned(k, angles), v))
            scores = torch.einsum("nqhc,nkhc->nhqk", q, k) / WIDTH**0.5
            shares = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
            x = x + torch.tanh(torch.einsum("nhqk,nkhc->nqhc", shares, v).flatten(2))
        return self.linear("head", x.mean(1))


def judged(fault=""):
    torch.manual_seed(1)
    begins = torch.tensor([[1, 0, 0, 1, 0, 1, 0], [1, 0, 1, 0, 0, 0, 1], [1, 1, 0, 0, 1, 0, 0]]).bool()
    batches = [((torch.randn(3, TOKENS, WIDTH), begins), torch.randint(3, (3,))) for _ in range(2)]
    return diagnose(Reader(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=2)


def test_places_and_masks_held_otherwise_are_right():
    assert judged().verdict is Verdict.ROUND_OFF


@pytest.mark.parametrize(
    ("fault", "module"), [("later lines begin at one", "grid"), ("a line sees the next one", "seen")]
)
def test_who_makes_them_is_named_not_who_uses_them(fault, module):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert found.where.module == module


class Angles(nn.Module):
    """Positions [N, T] -> [N, T, 2]."""

    def __init__(self):
        super().__init__()
        self.register_buffer("speeds", torch.tensor([1.0, 0.3, 0.1, 0.03]))

    def forward(self, positions):
        return positions[..., None] * self.speeds


class Given(nn.Module):
    """Whose positions are given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.angles, self.head = Angles(), nn.Linear(WIDTH, 3)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, positions):
        angles = self.angles(positions)
        for layer in self.layers:
            x = x + torch.tanh(turned(layer(x), angles))
        return self.head(x.mean(1))


class FlatGiven(FlatPort):
    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.register_buffer("speeds", old.angles.speeds.clone())

    def forward(self, x, positions):
        first = self.fault == "those of the first text serve all"
        angles = (positions[:1].expand_as(positions) if first else positions).unsqueeze(-1) * self.speeds
        c, s = angles.cos(), angles.sin()
        turns = torch.stack([c, -s, s, c], -1).unflatten(-1, (2, 2))
        for i in range(3):
            halves = self.linear(f"layers_{i}", x).unflatten(-1, (2, -1))
            y = torch.einsum("ntcij,ntjc->ntic", turns, halves).flatten(2)
            x = x + torch.tanh(y)
        return self.linear("head", x.mean(1))


@pytest.mark.parametrize("fault", ["", "those of the first text serve all"])
def test_what_is_repeated_over_the_batch_is_laid_on_who_makes_it(fault):
    torch.manual_seed(1)
    positions = torch.stack([torch.arange(TOKENS) + k for k in (0, 3, 5)])
    batches = [((torch.randn(3, TOKENS, WIDTH), positions), torch.randint(3, (3,))) for _ in range(2)]
    found = diagnose(Given(), lambda old: FlatGiven(old, fault), batches, loss=F.cross_entropy, steps=2)
    right = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert found.verdict in ((Verdict.BUG,) if fault else right)
    assert not fault or found.where.module == "angles"
