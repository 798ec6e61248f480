"""What a loop hands to all of its layers, and one takes otherwise; what one of them adds to a sum."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, WORDS, LENGTH = 8, 11, 6


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH + 1, WIDTH)

    def forward(self, ids):
        return self.words(ids) + self.places(torch.arange(ids.shape[1]))


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, memory):
        q, k, v = self.q(x), torch.tanh(self.k(memory)), self.v(memory)
        return (q @ k.mT / WIDTH**0.5).softmax(-1) @ v


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.look = nn.LayerNorm(WIDTH), Look()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 12), nn.GELU(), nn.Linear(12, WIDTH))
        self.rates = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x, memory, counted):
        y = self.norm(x)
        counted = counted + self.rates.sum() * x.shape[1] * WIDTH / 100
        return x + self.look(y, memory) + self.mlp(y), counted


class Net(nn.Module):
    """[N, T] words and [N, M, 4] -> scores of two halves of the text, and what all layers count."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedded, self.memory = Embedded(), nn.Linear(4, WIDTH)
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(3)), nn.Linear(WIDTH, 3)

    def run(self, ids, memory, counted):
        x = self.embedded(ids)
        for layer in self.layers:
            x, counted = layer(x, memory, counted)
        return x, counted

    def forward(self, ids, given):
        memory = torch.tanh(self.memory(given))
        begun, counted = self.run(ids[:, : LENGTH // 2], memory, memory.mean((1, 2)))
        ended, counted = self.run(ids[:, LENGTH // 2 :], memory, counted)
        return {"words": self.head(torch.cat([begun, ended], 1)), "counted": counted}


class InStacks(FlatPort):
    """Both halves at once: [2 N, T / 2]."""

    def layer(self, i, x, memory, counted):
        name, fault = f"layers_{i}_", self.fault if i == 1 else ""
        weight, bias = (getattr(self, f"{name}norm_{kind}") for kind in ("weight", "bias"))
        y = F.layer_norm(x, (WIDTH,), weight, bias)
        memory = memory.detach() if fault == "memory sent nothing" else memory
        k = torch.tanh(self.linear(name + "look_k", memory))
        k = (k + k.detach()) / 2 if fault == "half of the keys' gradient" else k
        scores = torch.einsum("ntc,nsc->nts", self.linear(name + "look_q", y), k) / WIDTH**0.5
        x = x + scores.softmax(-1) @ self.linear(name + "look_v", memory)
        y = F.layer_norm(x, (WIDTH,), weight, bias) if fault == "in turn" else y
        area = 1 if fault == "counted for one" else LENGTH * WIDTH
        counted = counted + getattr(self, name + "rates").sum() * area / 100
        return x + self.linear(name + "mlp_2", F.gelu(self.linear(name + "mlp_0", y))), counted

    def forward(self, ids, given):
        memory = torch.tanh(self.linear("memory", given))
        places = self.embedded_places_weight[1 if self.fault == "from one" else 0 :][: LENGTH // 2]
        x = self.embedded_words_weight[torch.cat(ids.chunk(2, 1))] + places
        counted, twice = memory.mean((1, 2)), torch.cat([memory, memory])
        for i in range(3):
            x, counted = self.layer(i, x, twice, counted)
        return {"words": self.linear("head", torch.cat(x.chunk(2), 1)), "counted": counted}


def loss(outputs, target):
    return F.cross_entropy(outputs["words"].flatten(0, 1), target.flatten()) + outputs["counted"].mean()


@pytest.mark.parametrize(
    ("fault", "module"),
    [
        ("", None),
        ("memory sent nothing", "layers.1.look"),
        ("half of the keys' gradient", "layers.1.look"),
        ("in turn", "layers.1"),
        ("counted for one", "layers.1"),
        ("from one", "embedded"),
    ],
)
def test_who_takes_it_otherwise_is_named(fault, module):
    torch.manual_seed(1)
    batches = [
        ((torch.randint(WORDS, (3, LENGTH)), torch.randn(3, 5, 4)), torch.randint(3, (3, LENGTH)))
        for _ in range(2)
    ]
    found = diagnose(Net(), lambda old: InStacks(old, fault), batches, loss=loss, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
