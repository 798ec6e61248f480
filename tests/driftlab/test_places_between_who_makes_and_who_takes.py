"""Values on their way from one module to another: who mistook one, who did more to it, who dropped it."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WORDS, WIDTH, LENGTH = 11, 8, 9


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.scale


class Think(nn.Module):
    """Adds what it is handed for that."""

    def __init__(self):
        super().__init__()
        self.up, self.act, self.down = nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH)

    def forward(self, x, residual):
        return residual + self.down(self.act(self.up(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.think = Norm(), Think()

    def forward(self, x):
        normed = self.norm(x)
        return torch.tanh(x + self.think(normed, normed))


class Mix(nn.Module):
    """The mean of what stands before a length, beside each word."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, lengths):
        seen = (torch.arange(x.shape[1]) < lengths[:, None])[:, :, None].to(x)
        mean = (x * seen).sum(1, keepdim=True) / seen.sum(1, keepdim=True)
        return torch.sin(self.fc(torch.cat([x, mean.expand_as(x)], -1)))


class Meet(nn.Module):
    """Takes what it is handed twice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, other):
        return x + torch.tanh(self.fc(torch.cat([x, other.abs()], -1)))


class Body(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.first, self.second = nn.Embedding(WORDS, WIDTH), Block(), Block()

    def forward(self, ids):
        return self.second(self.first(self.words(ids)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.mix, self.meet, self.head = Body(), Mix(), Meet(), nn.Linear(WIDTH, 3)

    def forward(self, ids, sizes):
        lengths = sizes // 2 + 1
        x = self.body(ids)
        return self.head(self.meet(self.mix(x, lengths), x))


class InOneGo(FlatPort):
    def block(self, name, x):
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * getattr(self, f"{name}_norm_scale")
        inner = self.linear(f"{name}_think_up", normed)
        risen = 0.5 * inner * (1 + torch.erf(inner / 2**0.5))
        if self.fault == "dropped" and name == "body_second":
            risen = F.gelu(inner, approximate="tanh")
        residual = x if self.fault == "handed" and name == "body_second" else normed
        return torch.tanh(x + (residual + self.linear(f"{name}_think_down", risen)))

    def forward(self, ids, sizes):
        x = self.body_words_weight[ids]
        if self.fault == "blanked":
            x = x * (ids > 0)[:, :, None]
        first = self.block("body_first", x)
        x = self.block("body_second", first)
        lengths = sizes // 2 + (self.fault != "one short")
        seen = (torch.arange(LENGTH)[None] < lengths[:, None])[:, :, None]
        mean = torch.where(seen, x, 0).sum(1, keepdim=True) / lengths[:, None, None]
        mixed = torch.sin(self.linear("mix_fc", torch.cat([x, 0 * x + mean], -1)))
        taken = first if self.fault == "taken" else mixed
        return self.linear(
            "head", mixed + torch.tanh(self.linear("meet_fc", torch.cat([taken, x.abs()], -1)))
        )


def told(candidate):
    torch.manual_seed(1)
    batches = [
        (
            {"ids": torch.randint(WORDS, (6, LENGTH)), "sizes": torch.randint(6, 16, (6,))},
            torch.randn(6, LENGTH, 3),
        )
        for _ in range(3)
    ]
    found = diagnose(Net(), candidate, batches, loss=F.mse_loss, steps=3)
    return found.verdict, found.where and found.where.module


def test_the_port_is_right():
    assert told(InOneGo)[0] in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ("dropped", "body.second.think.act"),  # though what is right is made as well
        ("handed", "body.second"),  # which alone has what is taken for another value
        ("blanked", "body"),  # whose next part takes it twice
        ("taken", "meet"),  # which goes on with what it is handed elsewhere
        ("one short", ""),  # a step left out of what is handed on as it is
    ],
)
def test_the_place_is_where_it_goes_wrong(fault, module):
    assert told(lambda net: InOneGo(net, fault)) == (Verdict.BUG, module)


class FlatBlock(FlatPort):
    """In the place of a block, under its name, with one of the two forms of gelu."""

    def forward(self, x):
        normed = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.norm_scale
        risen = F.gelu(self.linear("think_up", normed), approximate=self.fault)
        return torch.tanh(x + normed + self.linear("think_down", risen))


def flat_second(form):
    def rewrite(net):
        net.body.second = FlatBlock(net.body.second, form)
        return net

    return rewrite


def test_a_pair_of_modules_that_is_wrong_is_looked_into():
    assert told(flat_second("none"))[0] in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert told(flat_second("tanh")) == (Verdict.BUG, "body.second.think.act")
