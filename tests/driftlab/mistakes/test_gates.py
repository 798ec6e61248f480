"""Gates of recurrent layers in another order or turned over, against cells written by hand."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.gates import other_gates

torch.set_num_threads(1)
WIDTH, STATE = 3, 4


def cell(layer, x, h, order=(0, 1, 2), update=torch.sigmoid):
    """A GRU's, whose rows hold reset, update and candidate in ``order``."""
    parts = [
        [t.chunk(3)[at] for at in order]
        for t in (layer.weight_ih, layer.weight_hh, layer.bias_ih, layer.bias_hh)
    ]
    (ri, zi, ni), (rh, zh, nh) = (
        [F.linear(value, w, b) for w, b in zip(weights, biases, strict=True)]
        for value, weights, biases in ((x, parts[0], parts[2]), (h, parts[1], parts[3]))
    )
    z = update(zi + zh)
    return (1 - z) * torch.tanh(ni + torch.sigmoid(ri + rh) * nh) + z * h


@pytest.mark.parametrize(
    ("words", "how"),
    [
        ("gates 1 and 2", {"order": (1, 0, 2)}),
        ("gates 2 and 3", {"order": (0, 2, 1)}),
        ("the other side of gate 2", {"update": lambda z: 1 - torch.sigmoid(z)}),
    ],
)
def test_a_cell_with_its_gates_otherwise(words, how):
    layer = nn.GRUCell(WIDTH, STATE)
    other, x, h = copy.deepcopy(layer), torch.randn(2, WIDTH), torch.randn(2, STATE)
    {said: change for _, said, change in other_gates(layer)}[words](other)
    torch.testing.assert_close(other(x, h), cell(layer, x, h, **how))


def test_each_layer_and_direction_and_all_of_them():
    network = nn.Sequential(nn.LSTM(WIDTH, STATE, 2, bidirectional=True), nn.Linear(8, 3))
    found = [words for _, words, _ in other_gates(network)]
    where = ("l0", "l0_reverse", "l1", "l1_reverse")
    assert [words.partition(" in ")[2].strip("`") for words in found[::10]] == [*where, ""]
    assert len(found) == len(set(found)) == 5 * 10
    assert not list(other_gates(nn.Linear(2, 2)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.rnn = nn.Linear(5, WIDTH), nn.GRU(WIDTH, STATE, batch_first=True)
        self.head = nn.Linear(STATE, 3)

    def forward(self, x):
        return self.head(self.rnn(self.enter(x).tanh())[0].mean(1))


class Steps(nn.Module):
    def __init__(self, old, fault):
        super().__init__()
        self.enter, self.head = copy.deepcopy(old.enter), copy.deepcopy(old.head)
        self.cell, self.fault = nn.GRUCell(WIDTH, STATE), fault
        self.cell.load_state_dict({n.removesuffix("_l0"): t for n, t in old.rnn.state_dict().items()})

    def forward(self, x):
        h, made = x.new_zeros(len(x), STATE), []
        for now in self.enter(x).tanh().unbind(1):
            h = cell(self.cell, now, h, (1, 0, 2) if self.fault == "order" else (0, 1, 2))
            made.append(h)
        return self.head(torch.stack(made).mean(0))


@pytest.mark.parametrize(("fault", "verdict"), [("order", Verdict.BUG), ("", Verdict.ROUND_OFF)])
def test_the_layer_is_named(fault, verdict):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 6, 5), torch.randint(3, (4,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Steps(old, fault), batches, loss=F.cross_entropy, steps=2)
    assert found.verdict is verdict
    if fault:
        assert (found.where.module, found.where.pass_) == ("rnn", "forward")
        assert "gates 1 and 2 of `rnn`" in " ".join(str(found).split())
