"""Two values detached together, as keys and values that are kept: no one of them is all that is lacked."""

import pytest
import torch
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6


class Look(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, text):
        shares = (self.q(x) @ self.k(text).mT / WIDTH**0.5).softmax(-1)
        return x + torch.tanh(shares @ self.v(text))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.text, self.head = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)
        self.looks = nn.ModuleList(Look() for _ in range(3))

    def forward(self, x, text):
        text = torch.tanh(self.text(text))
        for look in self.looks:
            x = look(x, text)
        return self.head(x.mean(1))


class Flat(FlatPort):
    def forward(self, x, text):
        text = torch.tanh(self.linear("text", text))
        for i in range(3):
            q, k, v = self.linear(f"looks_{i}_q", x), *(self.linear(f"looks_{i}_{n}", text) for n in "kv")
            if self.fault and i == 1:
                k, v = k.detach(), v.detach()
            scores = torch.einsum("nqc,nkc->nqk", q, k) / WIDTH**0.5
            x = x + torch.tanh(torch.einsum("nqk,nkc->nqc", scores.softmax(-1), v))
        return self.linear("head", x.mean(1))


@pytest.mark.parametrize("fault", ["", "kept"])
def test_who_makes_both_and_goes_on_with_them_is_named(fault):
    torch.manual_seed(1)
    batches = [((torch.randn(3, 4, WIDTH), torch.randn(3, 5, 3)), torch.randint(3, (3,))) for _ in range(2)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, steps=2)
    if not fault:
        assert found.verdict in (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
        return
    assert (found.verdict, found.where.module) == (Verdict.BUG, "looks.1")
    assert "detached there, would do that" in " ".join(str(found).split())
