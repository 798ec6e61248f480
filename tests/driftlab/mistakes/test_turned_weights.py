"""A gain that was not turned with what it belongs to, and one row of gains for all: the norm is named."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.weight_mutations import turned_weights
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
HEADS, SIZE = 3, 4
WIDTH = HEADS * SIZE


def by_neighbours(x, axis=0):
    """The halves of each head beside each other."""
    return x.unflatten(axis, (HEADS, 2, SIZE // 2)).transpose(axis + 1, axis + 2).flatten(axis, axis + 2)


class Gained(nn.Module):
    def __init__(self, *sizes):
        super().__init__()
        self.gain = nn.Parameter(torch.rand(*sizes) + 0.5)

    def forward(self, x):
        return self.gain * x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


class Look(nn.Module):
    """Queries under one norm of all heads, keys under one norm a head."""

    def __init__(self):
        super().__init__()
        self.q, self.k = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = Gained(WIDTH), Gained(HEADS, SIZE)

    def forward(self, x):
        q = self.q_norm(self.q(x)).unflatten(-1, (HEADS, SIZE))
        scores = torch.einsum("nqhc,nkhc->nhqk", q, self.k_norm(self.k(x).unflatten(-1, (HEADS, SIZE))))
        return (scores.softmax(-1) @ x.unflatten(-1, (HEADS, -1)).transpose(1, 2)).transpose(1, 2).flatten(2)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.look, self.head = nn.Linear(5, WIDTH), Look(), nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.stem(x).tanh()
        return self.head((x + self.look(x)).mean(1))


class Turned(FlatPort):
    """Heads whose halves are neighbours, time last."""

    def normed(self, x, dim):
        return x / (x.square().mean(dim, keepdim=True) + 1e-6).sqrt()

    def forward(self, x):
        x = self.linear("stem", x).tanh().mT
        q, k = (by_neighbours(w) @ x for w in (self.look_q_weight, self.look_k_weight))
        gain, own = (
            self.look_q_norm_gain,
            by_neighbours(self.look_k_norm_gain.flatten()).unflatten(0, (HEADS, -1)),
        )
        gain = gain if self.fault == "left" else by_neighbours(gain)
        own = own[:1] if self.fault == "first" else own
        q = (self.normed(q, 1) * gain[:, None]).unflatten(1, (HEADS, SIZE))
        k = self.normed(k.unflatten(1, (HEADS, SIZE)), 2) * own[..., None]
        shares = torch.einsum("nhcq,nhck->nhqk", q, k).softmax(-1)
        seen = torch.einsum("nhqk,nhck->nhcq", shares, x.unflatten(1, (HEADS, -1))).flatten(1, 2)
        return self.linear("head", (x + seen).mean(2))


def diagnosed(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 6, 5), torch.randint(3, (4,))) for _ in range(2)]
    return diagnose(Net(), lambda old: Turned(old, fault), batches, loss=F.cross_entropy, steps=2)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("left", "look.q_norm", "with the halves of every 4 where the others are"),
        ("first", "look.k_norm", "with its first row for all"),
    ],
)
def test_the_norm_is_named(fault, module, words):
    found = diagnosed(fault)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert any(words in e.details for e in found.evidence)


def test_turned_right_it_is_the_same_function():
    assert diagnosed("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


def test_of_every_size_both_ways_are_tried():
    norm = Gained(8)
    said = [words for _, words, _ in turned_weights(norm)]
    assert len(said) == 4
    other = Gained(8)
    for _, words, change in turned_weights(norm):
        if "halves of every 8" in words:
            change(other)
    assert torch.equal(other.gain, norm.gain.reshape(2, 4).T.flatten())
