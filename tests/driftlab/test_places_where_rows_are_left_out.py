"""Padded sequences, and a port that packs what is there: no value of the one has the other's size."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import driftlab
from driftlab import Verdict
from tests.driftlab.flat_port import FlatPort

WIDTH, LENGTHS = 6, torch.tensor([5, 3, 4])


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, real):
        scores = self.query(x) @ self.key(x).mT / WIDTH**0.5
        return scores.masked_fill(~real[:, None], -torch.inf).softmax(-1) @ self.value(x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.before, self.behind = Attention(), nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.widen, self.narrow = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x, real):
        x = x + self.attention(self.before(x), real)
        return x + self.narrow(torch.tanh(self.widen(self.behind(x))))


class Padded(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.out = nn.Linear(4, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        for norm in (m for m in self.modules() if isinstance(m, nn.LayerNorm)):
            nn.init.uniform_(norm.weight, 0.5, 1.5)
            nn.init.normal_(norm.bias, std=0.3)

    def forward(self, x):
        real = torch.arange(x.shape[1]) < LENGTHS[:, None]
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, real)
        return (self.out(x) * real[..., None]).sum(1)


class Packed(FlatPort):
    def norm(self, name, x, correction=0):
        spread, center = torch.var_mean(x, -1, correction=correction, keepdim=True)
        weight, bias = getattr(self, name + "_weight"), getattr(self, name + "_bias")
        return (x - center) / (spread + 1e-5).sqrt() * weight + bias

    def block(self, i, x, whose):
        last = i == 1
        y = self.norm(f"blocks_{i}_before", x, correction=int(last and self.fault == "norm"))
        query, key, value = (self.linear(f"blocks_{i}_attention_{n}", y) for n in ("query", "key", "value"))
        value = y if last and self.fault == "value" else value
        scores = query @ key.T / WIDTH**0.5
        shares = scores.masked_fill(whose[:, None] != whose, -torch.inf).softmax(-1)
        x = (y if last and self.fault == "residual" else x) + shares @ value
        wide = self.linear(f"blocks_{i}_widen", self.norm(f"blocks_{i}_behind", x))
        return x + self.linear(f"blocks_{i}_narrow", torch.tanh(wide))

    def forward(self, x):
        real = torch.arange(x.shape[1]) < LENGTHS[:, None]
        whose, x = real.nonzero()[:, 0], self.linear("enter", x[real])
        for i in range(2):
            x = self.block(i, x, whose)
        said = self.linear("out", x)
        return torch.zeros(len(real), 3, dtype=said.dtype).index_add(0, whose, said)


def loss(outputs, target):
    return F.cross_entropy(outputs, target) / 8


def judged(fault=""):
    torch.manual_seed(1)
    batches = [(torch.randn(3, 5, 4), torch.randint(3, (3,))) for _ in range(2)]
    return driftlab.diagnose(Padded(), lambda old: Packed(old, fault), batches, loss)


def test_a_packed_port_is_the_same_function():
    assert judged().verdict is Verdict.ROUND_OFF


@pytest.mark.parametrize(
    ("fault", "place"),
    [("norm", "blocks.1.before"), ("value", "blocks.1.attention.value"), ("residual", "blocks.1")],
)
def test_the_place_is_found_among_the_rows_that_both_have(fault, place):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert found.where.module == place
