"""Mistakes in what a module does between its parts, which are right: who calls them is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6


class Mix(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.down(torch.sigmoid(self.up(x)))


class First(nn.Module):
    """A layer that goes around nothing."""

    def __init__(self):
        super().__init__()
        self.mix, self.norm = Mix(), nn.LayerNorm(WIDTH)

    def forward(self, x):
        return self.norm(self.mix(x))


class Steps(nn.Module):
    """Goes through the rows; where a new sequence begins the state does so as well."""

    def __init__(self):
        super().__init__()
        self.cell = nn.Linear(2 * WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x, begins):
        states, state = [], self.start.expand(len(x), -1)
        for now, new in zip(x.unbind(1), begins.unbind(1), strict=True):
            state = torch.where(new[:, None], self.start, state)
            state = torch.tanh(self.cell(torch.cat([now, state], 1)))
            states.append(state)
        return torch.stack(states, 1)


class Bends(nn.Module):
    """A chain of layers, each bent but the last."""

    def __init__(self):
        super().__init__()
        layers = (nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(3))
        self.layers = nn.ModuleList(layers)

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


class Ends(nn.Module):
    """A norm behind an activation."""

    def __init__(self):
        super().__init__()
        self.bends = Bends()
        self.act, self.norm, self.out = nn.GELU(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(self.norm(self.act(x + self.bends(x))))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.steps, self.ends = First(), Steps(), Ends()
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.3)

    def forward(self, x, begins):
        """What is said of each sequence, and the states where none begins."""
        states = self.steps(self.first(x), begins)
        said = self.ends(states).mean(1)
        return said, states * ~begins[..., None]


class InOne(FlatPort):
    def norm(self, name, x):
        spread, center = torch.var_mean(x, -1, correction=0, keepdim=True)
        weight, bias = getattr(self, name + "_weight"), getattr(self, name + "_bias")
        return (x - center) * (spread + 1e-5).rsqrt() * weight + bias

    def forward(self, x, begins):
        x = x.transpose(0, 1)
        mixed = self.linear("first_mix_down", torch.sigmoid(self.linear("first_mix_up", x)))
        x = self.norm("first_norm", mixed + (x if self.fault == "residual" else 0))
        states, state = [], self.steps_start.expand(x.shape[1], -1)
        for now, new in zip(x, begins.T[..., None], strict=True):
            state = state if self.fault == "reset" else torch.where(new, self.steps_start, state)
            state = torch.tanh(self.linear("steps_cell", torch.cat([now, state], 1)))
            states.append(state)
        states = torch.stack(states)
        kept = states * ~begins.T[..., None]
        states = y = kept if self.fault == "cut" else states
        for i in range(3):
            y = self.norm(f"ends_bends_layers_{i}_1", self.linear(f"ends_bends_layers_{i}_0", y))
            y = torch.tanh(y) if i < 2 else y
        y, order = states + y, self.fault == "order"
        y = F.gelu(self.norm("ends_norm", y)) if order else self.norm("ends_norm", F.gelu(y))
        return self.linear("ends_out", y).mean(0), kept.transpose(0, 1)


def loss(outputs, target):
    said, states = outputs
    return F.cross_entropy(said, target) + states.square().mean()


def judged(fault):
    torch.manual_seed(1)
    begins = torch.zeros(4, 5, dtype=torch.bool)
    begins[1, 2] = begins[3, 4] = True
    batches = [((torch.randn(4, 5, WIDTH), begins), torch.randint(3, (4,))) for _ in range(2)]
    return diagnose(Net(), lambda old: InOne(old, fault), batches, loss=loss, steps=2)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("residual", "first", ""),
        ("reset", "steps", "that is false everywhere, each time in `steps` would do that"),
        ("cut", "", ""),
        ("order", "ends", "`gelu` behind `layer_norm`, not before it"),
    ],
)
def test_who_calls_the_parts_is_named(fault, module, words):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert found.where.module == module
    assert words in "\n".join(e.details for e in found.evidence)


def test_what_is_done_rightly_between_them_is_right():
    assert judged("").verdict is Verdict.ROUND_OFF
