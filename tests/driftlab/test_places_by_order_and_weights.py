"""Mistakes that no number tells: another order, weights exchanged, calls that share what is each's own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH, STEPS = 6, 5


class Heads(nn.Module):
    """Two heads of three numbers, each of which is a share of its head."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.project(x).unflatten(-1, (2, 3)).softmax(-1).flatten(-2)


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.up = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return F.silu(self.gate(x)) * self.up(x)


class Mean(nn.Module):
    def forward(self, x, lengths):
        kept = torch.arange(x.shape[1]) < lengths[:, None]
        return (x * kept[..., None]).sum(1) / lengths[:, None]


class Memory(nn.Module):
    """What it was given before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.randn(8, WIDTH))

    def forward(self, x):
        before = self.rows.clone()
        if self.training:
            self.rows.mul_(0.5).add_(x.detach())
        return before


class Net(nn.Module):
    def __init__(self, dropped: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.tower = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.heads, self.gated, self.norm = Heads(), Gated(), nn.LayerNorm(WIDTH)
        self.mean, self.memory, self.drop = Mean(), Memory(), nn.Dropout(dropped)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x, y, lengths):
        one, other = (self.tower(t.flatten(0, 1)).view_as(t) for t in (x, y))
        h = self.heads(one - other)
        h = self.norm(h + self.gated(h))
        h = self.mean(h, lengths)
        return self.head(self.drop(h + self.memory(h).tanh()))


class Flat(nn.Module):
    """All of it in one function, steps before rows."""

    def __init__(self, old: Net, fault: str = ""):
        super().__init__()
        self.fault, self.dropped = fault, old.drop.p
        for name, parameter in old.named_parameters():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(parameter.detach().clone()))
        for name, buffer in old.named_buffers():
            self.register_buffer(name.replace(".", "_"), buffer.clone())

    def linear(self, name, x):
        return x @ getattr(self, name + "_weight").T + getattr(self, name + "_bias")

    def towered(self, rows):
        x = self.linear("tower_0", rows)
        state = self.tower_1_running_mean, self.tower_1_running_var, self.tower_1_weight, self.tower_1_bias
        return F.batch_norm(x, *state, self.training).tanh()

    def forward(self, x, y, lengths):
        both = [t.transpose(0, 1).flatten(0, 1) for t in (x, y)]
        if self.fault == "statistics of both":
            one, other = self.towered(torch.cat(both)).chunk(2)
        else:
            one, other = map(self.towered, both)
        h = self.linear("heads_project", (one - other).unflatten(0, (STEPS, -1)))
        if self.fault == "heads side by side":
            h = h.unflatten(-1, (3, 2)).mT.softmax(-1).flatten(-2)
        else:
            h = h.unflatten(-1, (2, 3)).softmax(-1).flatten(-2)
        gate, up = self.linear("gated_gate", h), self.linear("gated_up", h)
        if self.fault == "gate for up":
            gate, up = up, gate
        gated = gate * gate.sigmoid() * up
        norm = (WIDTH,), self.norm_weight, self.norm_bias
        h = h + F.layer_norm(gated, *norm) if self.fault == "normed alone" else F.layer_norm(h + gated, *norm)
        kept = torch.arange(STEPS)[:, None] < lengths
        count = STEPS if self.fault == "padding counted" else lengths[:, None]
        h = torch.einsum("tnc,tn->nc", h, kept.to(h)) / count
        before = self.memory_rows.clone()
        if self.training:
            self.memory_rows.copy_(0.5 * self.memory_rows + h.detach())
        if self.fault == "read after written":
            before = self.memory_rows.clone()
        h = F.dropout(h + before.tanh(), self.dropped, self.training or self.fault == "dropout in eval")
        return self.linear("head", h)


def batches():
    torch.manual_seed(1)
    given = [
        {
            "x": torch.randn(8, STEPS, WIDTH),
            "y": 1 + 2 * torch.randn(8, STEPS, WIDTH),
            "lengths": torch.randint(2, STEPS, (8,)),
        }
        for _ in range(3)
    ]
    return [(one, torch.randint(3, (8,))) for one in given]


def judged(fault):
    net = Net(0.3 if fault == "dropout in eval" else 0.0)
    return diagnose(net, lambda old: Flat(old, fault), batches(), loss=F.cross_entropy, steps=3)


def test_written_in_one_function_it_is_right():
    assert judged("").verdict is Verdict.ROUND_OFF


@pytest.mark.parametrize(
    ("fault", "module", "pass_", "words"),
    [
        ("statistics of both", "tower.1", "forward", "statistics of all calls together"),
        ("heads side by side", "heads", "forward", "`unflatten` in the other order"),
        ("gate for up", "gated", "forward", "`gated.gate` and `gated.up` exchanged"),
        ("normed alone", "", "forward", "a residual that `layer_norm` does not norm"),
        ("padding counted", "mean", "forward", "times the largest of the counts that are divided by"),
        ("read after written", "memory", "forward", "`memory.rows` as the call leaves it"),
        ("dropout in eval", "drop", "eval", "dropout unasked for"),
    ],
)
def test_the_mistake_is_named_with_its_module(fault, module, pass_, words):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == (module, pass_)
    assert any(words in evidence.details for evidence in found.evidence)
