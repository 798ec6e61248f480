"""A port that puts its tokens in another order: no value of its fits as it lies until the order is gone."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, TOKENS = 8, 6


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)
        self.act = nn.GELU()

    def forward(self, x, places):
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = q @ k.mT / WIDTH**0.5 - (places[:, None] - places).abs() / TOKENS
        x = x + scores.softmax(-1) @ v
        return x + self.down(self.act(self.up(x)))


class Places(nn.Module):
    def forward(self, x):
        return torch.arange(x.shape[1])


class Pooler(nn.Module):
    def forward(self, x):
        return x[:, 1:].mean(1)


class Net(nn.Module):
    """[N, TOKENS, 5] -> scores of each token and of all, with the class token first."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inlet, self.summary = nn.Linear(5, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH))
        self.layers, self.pooler = nn.ModuleList(Layer() for _ in range(3)), Pooler()
        self.places = Places()
        self.norm, self.words, self.kinds = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 2)

    def forward(self, x):
        x = torch.cat([self.summary.expand(len(x), -1, -1), self.inlet(x)], 1)
        places = self.places(x)
        for layer in self.layers:
            x = layer(x, places)
        kind = self.kinds(self.pooler(x))  # first: what is written into its part of x is seen by the words
        return {"words": self.words(self.norm(x)[:, 1:]), "kind": kind}


class ClassLast(FlatPort):
    def layer(self, i, x, ranks):
        q, k, v = (
            x @ w.T + b for w, b in zip(*(t.chunk(3) for t in self.of(f"layers_{i}_qkv")), strict=True)
        )
        size = 3**0.5 if self.fault == "scale" and i == 1 else WIDTH**0.5
        x = x + (q @ k.mT / size - (ranks[:, None] - ranks).abs() / TOKENS).softmax(-1) @ v
        form = "tanh" if self.fault == "gelu" and i == 0 else "none"
        return x + self.linear(f"layers_{i}_down", F.gelu(self.linear(f"layers_{i}_up", x), approximate=form))

    def of(self, name):
        return getattr(self, f"{name}_weight"), getattr(self, f"{name}_bias")

    def forward(self, x):
        x = torch.cat([self.linear("inlet", x), self.summary.expand(len(x), -1, -1)], 1)
        ranks = torch.arange(1, TOKENS + 2)
        if self.fault != "places":
            ranks[-1] = 0
        for i in range(3):
            x = self.layer(i, x, ranks)
        x = x[:, :-1]
        normed = F.layer_norm(x, (WIDTH,), *self.of("norm"))
        return {"words": self.linear("words", normed), "kind": self.linear("kinds", x.mean(1))}


def loss(outputs, target):
    return F.cross_entropy(outputs["kind"], target) + outputs["words"].square().mean()


@pytest.mark.parametrize(
    ("fault", "module"),
    [("", None), ("gelu", "layers.0.act"), ("scale", "layers.1"), ("places", "places")],
)
def test_the_module_is_named_all_the_same(fault, module):
    torch.manual_seed(1)
    batches = [(torch.randn(4, TOKENS, 5), torch.randint(2, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: ClassLast(old, fault), batches, loss=loss, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
