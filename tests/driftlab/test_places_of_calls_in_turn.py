"""A reference that goes through its blocks twice, for a prompt and its rest, and a port that does once."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, BLOCKS, PROMPT, PIECE = 8, 3, 6, 4


class Angles(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("speeds", 3.0 ** -torch.arange(WIDTH // 2))

    def forward(self, places):
        turns = places[:, None] * self.speeds
        return torch.cat([turns.cos(), turns.sin()], -1)


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    """Both halves read the same states."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.mlp = nn.Linear(WIDTH, WIDTH), MLP()
        for norm in (self.first, self.second):
            nn.init.uniform_(norm.weight, 0.5, 1.5)

    def forward(self, x, angles):
        return torch.tanh(x + self.mlp(self.second(x)) + torch.tanh(self.mix(self.first(x) * angles)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.angles, self.head = nn.Linear(3, WIDTH), Angles(), nn.Linear(WIDTH, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))

    def through(self, x, start):
        x, angles = self.inlet(x), self.angles(start + torch.arange(x.shape[1]).to(x))
        for block in self.blocks:
            x = block(x, angles)
        return x

    def forward(self, prompt, rest):
        state = self.through(prompt, 0).mean(1)
        return {"logits": self.head(self.through(rest, prompt.shape[1]).mean(1)), "state": state}


class AtOnce(FlatPort):
    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.register_buffer("speeds", old.angles.speeds.clone())
        if fault == "speeds":
            self.speeds = 3.0 ** (-torch.arange(WIDTH // 2) / 2)

    def norm(self, name, x):
        weight, bias = getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")
        return F.layer_norm(x, (WIDTH,)) * weight + bias

    def mlp(self, i, x):
        own = torch.tanh(self.linear(f"blocks_{i}_mlp_up", x))
        return self.linear(f"blocks_{i}_mlp_down", own)

    def in_pieces(self, i, x):
        cut = x.shape[1] // PIECE * PIECE if self.fault == "tail" and i == BLOCKS - 1 else x.shape[1]
        made = torch.cat([self.mlp(i, part) for part in x[:, :cut].split(PIECE, 1)], 1)
        return F.pad(made, (0, 0, 0, x.shape[1] - cut))

    def forward(self, prompt, rest):
        x = self.linear("inlet", torch.cat([prompt, rest], 1))
        turns = torch.arange(x.shape[1]).to(x)[:, None] * self.speeds
        angles = torch.cat([turns.cos(), turns.sin()], -1)
        for i in range(BLOCKS):
            mixed = x + torch.tanh(self.linear(f"blocks_{i}_mix", self.norm(f"blocks_{i}_first", x) * angles))
            read = self.norm(f"blocks_{i}_second", mixed if self.fault == "in turn" and i == 1 else x)
            x = torch.tanh(mixed + (self.mlp(i, read) if self.training else self.in_pieces(i, read)))
        return {"logits": self.linear("head", x[:, PROMPT:].mean(1)), "state": x[:, :PROMPT].mean(1)}


def loss(outputs, target):
    return F.cross_entropy(outputs["logits"], target) + outputs["state"].square().mean()


@pytest.mark.parametrize(
    ("fault", "module", "pass_"),
    [
        ("", None, None),
        ("speeds", "angles", "forward"),
        ("tail", "blocks.2.mlp", "eval"),
        ("in turn", "blocks.1", "forward"),  # whose second norm does what it does, of something else
    ],
)
def test_what_is_computed_at_once_stands_for_all_calls(fault, module, pass_):
    torch.manual_seed(1)
    batches = [((torch.randn(3, PROMPT, 3), torch.randn(3, 5, 3)), torch.randint(3, (3,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: AtOnce(old, fault), batches, loss=loss, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, module, pass_)
