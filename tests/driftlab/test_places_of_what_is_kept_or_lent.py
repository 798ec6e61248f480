"""What a part keeps for itself, what it gives besides, and what it takes out of a list that it is lent."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, ROWS = 6, 4


class Shifted(nn.Module):
    def forward(self, x):
        return F.softplus(x) - math.log(2)


class Encoder(nn.Module):
    """Gives its states besides."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        states = []
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
            states.append(x)
        return x, states


class Up(nn.Module):
    """Takes the last of the states that are left."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x, states):
        return torch.sin(self.mix(torch.cat([x, states.pop()], -1)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(WIDTH, WIDTH), Shifted(), nn.Linear(WIDTH, WIDTH))
        self.encoder, self.ups = Encoder(), nn.ModuleList([Up(), Up()])
        self.grid, self.head = nn.Conv1d(WIDTH, WIDTH, 3), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x, states = self.encoder(self.inner(x))
        grid = self.grid(states[0].transpose(1, 2)).mean(2)
        for up in self.ups:
            x = up(x, states)
        return self.head(x.mean(1) + grid)


class Flat(FlatPort):
    def forward(self, x):
        x = self.linear("inner_0", x)
        x = F.softplus(x) - (0 if self.fault == "not shifted" else math.log(2))
        x = self.linear("inner_2", x.clamp(min=0) if self.fault == "rectified" else x)
        states = []
        for i in range(3):
            x = x + torch.tanh(self.linear(f"encoder_layers_{i}", x))
            states.append(x)
        seen = states[1 if self.fault == "another state" else 0]
        windows = seen.unfold(1, 3, 1).flatten(2)
        grid = (windows @ self.grid_weight.flatten(1).T + self.grid_bias).mean(1)
        for i, state in enumerate((states[2], states[1])):
            state = state.detach() if self.fault == "a state detached" and i == 1 else state
            x = torch.sin(self.linear(f"ups_{i}_mix", torch.cat([x, state], -1)))
        return self.linear("head", x.mean(1) + grid)


def judged(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(5, ROWS, WIDTH), torch.randint(3, (5,))) for _ in range(2)]
    return diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=2)


@pytest.mark.parametrize(
    ("fault", "module", "pass_", "words"),
    [
        ("not shifted", "inner.1", "forward", "would do that"),
        ("rectified", "inner.1", "forward", "through ReLU"),
        ("another state", "", "forward", "the operand of `transpose` that is another value"),
        ("a state detached", "ups.1", "input gradient", "detached there"),
    ],
)
def test_the_place_is_whose_it_is(fault, module, pass_, words):
    found = judged(fault)
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, module, pass_)
    assert words in " ".join(str(found).split())


def test_the_same_function_in_other_code_is_no_fault():
    assert judged("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
