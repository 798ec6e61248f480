"""A table that one network holds and the other makes otherwise, of positions that are integers in the one."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, BLOCKS, TEXT = 8, 2, 6
STEPS = torch.arange(WIDTH // 2, dtype=torch.float64)


def speeds(low, high):
    """Slow ones four times slower, with a ramp between."""
    ramp = ((STEPS - low) / (high - low)).clamp(0, 1)
    return (10.0 ** -(STEPS / 2) * (1 - ramp + ramp / 4)).float()


class Turning(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("speeds", speeds(0.6, 2.3), persistent=False)

    def forward(self, positions):
        angles = positions[:, None] * self.speeds
        return angles.cos(), angles.sin()


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, cos, sin):
        q, k, v = self.fused(x).chunk(3, -1)
        (a, b), (c, d) = q.chunk(2, -1), k.chunk(2, -1)
        q = torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        k = torch.cat([c * cos - d * sin, d * cos + c * sin], -1)
        return x + self.out((q @ k.mT / WIDTH**0.5).softmax(-1) @ v)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.turning = nn.Embedding(9, WIDTH), Turning()
        self.blocks, self.head = nn.ModuleList(Look() for _ in range(BLOCKS)), nn.Linear(WIDTH, 3)

    def forward(self, text):
        x, turned = self.table(text), self.turning(torch.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x, *turned)
        return self.head(x.mean(1))


class Flat(FlatPort):
    """Turns by complex numbers' parts in a stack; positions are numbers from the first on."""

    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.register_buffer("pace", speeds(0, 3) if fault else speeds(0.6, 2.3))

    def forward(self, text):
        x = F.embedding(text, self.table_weight)
        angles = torch.arange(text.shape[1]).to(self.pace)[:, None] * self.pace
        turn = torch.stack([angles.cos(), -angles.sin(), angles.sin(), angles.cos()], -1).unflatten(
            -1, (2, 2)
        )
        for i in range(BLOCKS):
            fused = self.linear(f"blocks_{i}_fused", x).unflatten(-1, (3, -1))
            halves = fused[:, :, :2].unflatten(-1, (2, -1))
            q, k = torch.einsum("tpab,ntsbp->sntap", turn, halves).flatten(3)
            shares = (torch.einsum("ntc,nsc->nts", q, k) / WIDTH**0.5).softmax(-1)
            x = x + self.linear(f"blocks_{i}_out", torch.einsum("nts,nsc->ntc", shares, fused[:, :, 2]))
        return self.linear("head", x.mean(1))


@pytest.mark.parametrize("fault", ["", "bounds of the ramp are whole numbers"])
def test_whoever_holds_the_table_is_the_place(fault):
    torch.manual_seed(1)
    batches = [(torch.randint(9, (4, TEXT)), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, "turning")


def waves(steps):
    angles = torch.arange(TEXT + 3)[:, None] * 10.0 ** (-STEPS / steps)
    return torch.cat([angles.sin(), angles.cos()], 1).float()


class Places(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("waves", waves(WIDTH // 2 - 1), persistent=False)

    def forward(self, x):
        return self.waves.index_select(0, torch.arange(x.shape[1]))


class Placed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.places, self.head = nn.Embedding(9, WIDTH), Places(), nn.Linear(WIDTH, 3)

    def forward(self, text):
        x = self.table(text)
        return self.head(torch.tanh(x + self.places(x)).mean(1))


class Dial(nn.Module):
    """Adds what it holds, time first."""

    def __init__(self, steps):
        super().__init__()
        self.register_buffer("held", waves(steps))

    def forward(self, x):
        return x + self.held[: len(x), None]


class FlatPlaced(FlatPort):
    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.dial = Dial(WIDTH // 2 - (not fault))

    def forward(self, text):
        return self.linear("head", torch.tanh(self.dial(self.table_weight[text.T])).mean(0))


def test_whoever_takes_rows_out_of_its_own_table_is_the_place():
    torch.manual_seed(1)
    batches = [(torch.randint(9, (4, TEXT)), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Placed(), lambda old: FlatPlaced(old, "one step more"), batches, steps=2)
    assert (found.verdict, found.where.module) == (Verdict.BUG, "places")
    assert found.where.candidate_module == "dial"
