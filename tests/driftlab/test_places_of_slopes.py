"""Gradients alone are wrong, in flat code: what a value that both networks have is sent tells where."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, BLOCKS, TEXT = 8, 3, 5


def turned(x):
    """Each half by the places' angles."""
    angles = torch.arange(x.shape[1]).to(x)[:, None] * 3.0 ** -torch.arange(WIDTH // 2).to(x)
    cos, sin, (one, other) = angles.cos(), angles.sin(), x.chunk(2, -1)
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.fused(x).chunk(3, -1)
        shares = (turned(q) @ turned(k).mT / WIDTH**0.5).softmax(-1)
        return self.out(shares @ v)


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(self.up(x).relu().square())


class Block(nn.Module):
    """Both halves read the same states, each through a norm of its own."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.look, self.mlp = Look(), Squared()
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x):
        return torch.tanh(x + self.look(self.first(x)) + self.mlp(self.second(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def forward(self, x):
        x = self.inlet(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Flat(FlatPort):
    def normed(self, name, x):
        return x * getattr(self, f"{name}_weight") + getattr(self, f"{name}_bias")

    def forward(self, x):
        x = self.linear("inlet", x)
        for i in range(BLOCKS):
            name, plain = f"blocks_{i}", F.layer_norm(x, (WIDTH,))
            q, k, v = self.linear(f"{name}_look_fused", self.normed(f"{name}_first", plain)).chunk(3, -1)
            there = turned(k)
            if self.fault == "keys" and i == 1:
                there = k + (there - k).detach()
            shares = torch.einsum("nqc,nkc->nqk", turned(q) / WIDTH**0.5, there).softmax(-1)
            seen = torch.einsum("nqk,nkc->nqc", shares, v)
            made = self.linear(f"{name}_mlp_up", self.normed(f"{name}_second", plain))
            wide = made.relu()
            if self.fault == "squares" and i == 1:
                made = made.detach() * 2 - made  # the same number, sent back with another sign
            made = self.linear(f"{name}_mlp_down", wide * made)
            x = torch.tanh(self.linear(f"{name}_look_out", seen) + x + made)
        return self.linear("head", x.mean(1))


@pytest.mark.parametrize(
    ("fault", "module"), [("", None), ("keys", "blocks.1.look"), ("squares", "blocks.1.mlp")]
)
def test_the_place_lies_behind_what_is_sent_another_gradient(fault, module):
    torch.manual_seed(1)
    batches = [(torch.randn(4, TEXT, 3), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert found.where.pass_ in ("input gradient", "weight gradient")
