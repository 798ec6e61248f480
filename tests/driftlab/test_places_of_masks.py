"""A mask that the candidate holds in floating numbers, with others joined to it."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, LENGTH, LAYERS = 6, 5, 2


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.fused, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, seen):
        q, k, v = self.fused(x).chunk(3, -1)
        scores = q @ k.mT / WIDTH**0.5
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -1e9).masked_fill(~seen, -1e9)
        return x + self.out(scores.softmax(-1) @ v)


class Reader(nn.Module):
    """Texts with padding; what ends each of them sees the words alone, and itself."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.end = nn.Embedding(9, WIDTH), nn.Parameter(torch.randn(WIDTH))
        self.layers, self.head = nn.ModuleList(Layer() for _ in range(LAYERS)), nn.Linear(WIDTH, 3)

    def forward(self, text):
        x = torch.cat([self.words(text), self.end.expand(len(text), 1, -1)], 1)
        seen = F.pad((text > 0)[:, None], (0, 1, text.shape[1], 0), value=True)
        for layer in self.layers:
            x = layer(x, seen)
        return self.head(x[:, -1])


class FlatReader(FlatPort):
    def forward(self, text):
        last = text.shape[1]
        x = torch.cat([F.embedding(text, self.words_weight), self.end.repeat(len(text), 1, 1)], 1)
        seen = x.new_ones(len(text), last + 1, last + 1).tril()
        seen[:, -1, :-1] = (text > 0).to(x)
        seen[:, -1, -1] = self.fault != "the end does not see itself"
        for i in range(LAYERS):
            q, k, v = self.linear(f"layers_{i}_fused", x).chunk(3, -1)
            share = torch.einsum("bqd,bkd->bqk", q, k) / WIDTH**0.5 - 1e9 * (1 - seen)
            x = x + self.linear(f"layers_{i}_out", share.softmax(-1) @ v)
        return self.linear("head", x[:, -1])


def judged(fault):
    torch.manual_seed(1)
    texts = [torch.randint(1, 9, (6, LENGTH)).masked_fill(torch.rand(6, LENGTH) < 0.3, 0) for _ in range(2)]
    batches = [(text, torch.randint(3, (6,))) for text in texts]
    return diagnose(Reader(), lambda old: FlatReader(old, fault), batches, loss=F.cross_entropy, steps=2)


@pytest.mark.parametrize(("fault", "module"), [("the end does not see itself", "")])
def test_the_place_makes_the_mask(fault, module):
    found = judged(fault)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)


def test_the_same_mask_in_other_code_is_no_fault():
    assert judged("").verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
