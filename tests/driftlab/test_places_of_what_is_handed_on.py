"""A module that is handed another value: that is the affair of who hands it on, wherever it is taken."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6


class Step(nn.Module):
    """Takes what it is given twice."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(x))


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.both, self.step = nn.Linear(WIDTH, 2 * WIDTH), Step()
        self.out = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        one, other = self.both(x).chunk(2, -1)
        return self.out(torch.cat([one, other, self.step(other)], -1))


class More(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.sin(2 * self.fc(x))


class Head(nn.Module):
    def __init__(self):
        super().__init__()
        self.dense, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.dense(x)))


class Top(nn.Module):
    """Hands the result of one part to the other, which hands it to its first layer."""

    def __init__(self):
        super().__init__()
        self.more, self.head = More(), Head()

    def forward(self, x):
        return self.head(self.more(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.halves, self.top = Halves(), Top()

    def forward(self, x):
        return self.top(self.halves(x))


class InOne(FlatPort):
    """All of it at once; but for one fault beside a row of zeros, so that no value has its old size."""

    def forward(self, x):
        rows = 0 if self.fault == "part left out" else 1
        x = torch.cat([torch.zeros_like(x[:rows]), x])
        one, other = self.linear("halves_both", x).chunk(2, -1)
        taken = one if self.fault == "other half" else other
        step = taken + torch.tanh(self.linear("halves_step_fc", taken))
        x = self.linear("halves_out", torch.cat([one, other, step], -1))
        y = x if self.fault == "part left out" else torch.sin(2 * self.linear("top_more_fc", x))
        return self.linear("top_head_out", torch.tanh(self.linear("top_head_dense", y)))[rows:]


def judged(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(8, WIDTH), torch.randint(3, (8,))) for _ in range(2)]
    return diagnose(Net(), lambda old: InOne(old, fault), batches, loss=F.cross_entropy, steps=2)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("other half", "halves", "what `halves.step` is given is another value"),
        ("part left out", "top", "operand 1 of `linear` that is another value"),
    ],
)
def test_who_hands_it_on_is_named(fault, module, words):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert found.where.module == module
    assert words in "\n".join(e.details for e in found.evidence)


class Turned(nn.Module):
    """[N, T, C] -> [N, T, C], with the channels first inside."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x):
        return torch.tanh(self.conv(x.mT)).mT


class Guess(nn.Module):
    def __init__(self):
        super().__init__()
        self.turned, self.last = Turned(), nn.Linear(WIDTH, 1)

    def forward(self, x):
        return self.last(self.turned(x))


class Adaptor(nn.Module):
    """[N, T, C] -> [N, T, 2]: the second guess is made of what the first was not yet part of."""

    def __init__(self):
        super().__init__()
        self.low, self.high, self.more = Guess(), Guess(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        later = x + torch.sin(self.more(x))
        return torch.cat([self.low(x), self.high(later), later], -1)


class Speech(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.adaptor, self.out = nn.Linear(4, WIDTH), Adaptor(), nn.Linear(WIDTH + 2, 3)

    def forward(self, x):
        return self.out(self.adaptor(torch.tanh(self.enter(x)))).mean(1)


class FlatSpeech(FlatPort):
    def guess(self, name, x):
        taps, bias = (getattr(self, f"adaptor_{name}_turned_conv_{kind}") for kind in ("weight", "bias"))
        windows = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1)
        return self.linear(
            f"adaptor_{name}_last", (torch.einsum("ntck,ock->nto", windows, taps) + bias).tanh()
        )

    def forward(self, x):
        x = self.linear("enter", x).tanh()
        later = x + self.linear("adaptor_more", x).sin()
        low = self.guess("low", x.detach() if self.fault == "detached" else x)
        high = self.guess("high", x if self.fault == "too early" else later)
        return self.linear("out", torch.cat([low, high, later], -1)).mean(1)


@pytest.mark.parametrize("fault", ["too early", "detached"])
def test_so_it_is_behind_a_transpose_and_through_modules_that_only_hand_it_on(fault):
    torch.manual_seed(1)
    batches = [(torch.randn(5, 7, 4), torch.randint(3, (5,))) for _ in range(2)]
    found = diagnose(Speech(), lambda old: FlatSpeech(old, fault), batches, loss=F.cross_entropy, steps=2)
    assert found.verdict is Verdict.BUG
    assert found.where.module == "adaptor"


def test_what_is_handed_on_rightly_is_right():
    assert judged("").verdict is Verdict.ROUND_OFF
