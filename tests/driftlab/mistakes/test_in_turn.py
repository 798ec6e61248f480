"""Two modules in the other order: a gate before its norm, a norm before its pooling."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.in_turn import in_turn
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
C = 6


class Gate(nn.Module):
    """A channel's share, by its mean."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(C, C)

    def forward(self, x):
        return x * self.fc(x.mean((2, 3))).sigmoid()[..., None, None]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(C, C, 1), nn.Sequential(nn.GroupNorm(2, C), nn.Tanh())
        self.gate = Gate()

    def forward(self, x):
        return x + self.gate(self.norm(self.conv(x)))


class Pool(nn.Module):
    def forward(self, x):
        return x.mean((2, 3))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.pool, self.norm, self.fc = Pool(), nn.LayerNorm(C), nn.Linear(C, 3)

    def forward(self, x):
        return self.fc(self.norm(self.pool(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.Sequential(Block(), Block()), Head()

    def forward(self, x):
        return self.head(self.blocks(x))


class Flat(FlatPort):
    """All of it at once, channels last; ``fault`` turns one order round: in a block, or in the head."""

    def normed(self, name, x):
        w, x = getattr(self, name + "_weight"), x.unflatten(3, (2, -1))
        var, mean = torch.var_mean(x, (1, 2, 4), correction=0, keepdim=True)
        return (((x - mean) / (var + 1e-5).sqrt()).flatten(3) * w + getattr(self, name + "_bias")).tanh()

    def gated(self, i, x):
        return x * self.linear(f"blocks_{i}_gate_fc", x.mean((1, 2), keepdim=True)).sigmoid()

    def forward(self, x):
        x = x.movedim(1, 3)
        for i in range(2):
            w, b = (getattr(self, f"blocks_{i}_conv_{name}") for name in ("weight", "bias"))
            y = x @ w[..., 0, 0].T + b
            if self.fault == "gate" and i == 1:
                x = x + self.normed("blocks_1_norm_0", self.gated(1, y))
            else:
                x = x + self.gated(i, self.normed(f"blocks_{i}_norm_0", y))
        rows = x.mean((1, 2)) if self.fault != "norm" else x
        rows = (rows - rows.mean(-1, keepdim=True)) / (rows.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        rows = rows.mean((1, 2)) if self.fault == "norm" else rows
        return self.linear("head_fc", rows * self.head_norm_weight + self.head_norm_bias)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("gate", "blocks.1", "`mul` before `group_norm`, `tanh`, not behind"),
        ("norm", "head", "`pool` behind `norm`"),
    ],
)
def test_the_module_that_calls_both_is_named(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(8, C, 3, 4), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=3)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert any(words in e.details for e in found.evidence)


def test_of_one_class_two_are_told_by_their_weights():
    assert [m.words for m in in_turn(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3), nn.ReLU()))] == [
        "`1` behind `2`, not before it"
    ]


class Root(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(C) + 0.5)

    def forward(self, x):
        return self.weight * (x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt())


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(C, C), Root()

    def forward(self, x):
        return x + self.norm(self.fc(x).tanh())


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.end, self.head = nn.Sequential(Layer(), Layer()), Root(), nn.Linear(C, 3)

    def forward(self, x):
        return self.head(self.end(self.layers(x)))


class FlatStack(FlatPort):
    """``fault`` norms the second layer's sum."""

    def root(self, name, x):
        return x / (x.square().mean(0) + 1e-6).sqrt() * getattr(self, name + "_weight")[:, None]

    def forward(self, x):
        x = x.T
        for i in range(2):
            y, name = self.linear(f"layers_{i}_fc", x.T).T.tanh(), f"layers_{i}_norm"
            x = self.root(name, x + y) if self.fault and i == 1 else x + self.root(name, y)
        return self.linear("head", self.root("end", x).T)


def test_a_norm_of_the_sum_is_its_caller_s():
    torch.manual_seed(1)
    batches = [(torch.randn(8, C), torch.randint(3, (8,))) for _ in range(3)]
    right, found = (
        diagnose(Stack(), lambda old, f=fault: FlatStack(old, f), batches, loss=F.cross_entropy, steps=3)
        for fault in ("", "sum")
    )
    assert right.verdict is Verdict.ROUND_OFF
    assert (found.verdict, found.where.module) == (Verdict.BUG, "layers.1")
    assert any("`norm` behind `add`, not before it" in e.details for e in found.evidence)
