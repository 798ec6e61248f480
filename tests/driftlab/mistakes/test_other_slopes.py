"""Activations whose way back is another's, against such a way back written by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.other_slopes import OtherSlopes, slopes
from driftlab.tracing.scopes import Scopes
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
SLOPES = dict(slopes())


def straight(x):
    return x


@pytest.mark.parametrize(
    ("words", "activation", "other"),
    [
        ("a gate that is detached", nn.SiLU(), lambda x: x * x.sigmoid().detach()),
        ("a gate that is detached", nn.Mish(), lambda x: x * F.softplus(x).tanh().detach()),
        ("a gate that is detached", nn.GELU(), lambda x: x * torch.special.ndtr(x).detach()),
        ("a gradient that goes straight through", nn.ReLU(), straight),
        ("the slope of ReLU", nn.GELU(), F.relu),
        ("the slope of gelu's tanh form", nn.GELU(), lambda x: F.gelu(x, approximate="tanh")),
    ],
)
def test_the_value_stays_and_the_slope_is_the_other_s(words, activation, other):
    x = torch.cat([torch.randn(40), torch.zeros(3)]).double().requires_grad_()
    places = frozenset()
    for _ in range(2):
        with OtherSlopes(SLOPES[words], Scopes(activation), places) as mode:
            y = activation(x)
        places = frozenset(mode.places)
    assert [scope for scope, _ in places] == [""]
    torch.testing.assert_close(y, activation(x))
    found, wanted = (torch.autograd.grad(made.sum(), x)[0] for made in (y, other(x)))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(
    ("words", "activation"), [("a gate that is detached", nn.ReLU()), ("the slope of ReLU", nn.ReLU())]
)
def test_what_has_no_other_slope_is_left_alone(words, activation):
    with OtherSlopes(SLOPES[words], Scopes(activation)) as mode:
        activation(torch.randn(3, requires_grad=True))
    assert not mode.places


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.first, self.inner = nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 5)
        self.second, self.head = nn.GELU(), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.second(self.inner(self.first(self.enter(x)))))


class QuickSlope(torch.autograd.Function):
    """gelu, whose way back is that of x * sigmoid(1.702 x)."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(1.702 * x)
        return grad * gate * (1 + 1.702 * x * (1 - gate))


class UnknownSlope(QuickSlope):
    """The same with a slope that no activation has."""

    @staticmethod
    def backward(ctx, grad):
        return grad * (1 - ctx.saved_tensors[0].tanh().abs())


BY_HAND = {"quick": QuickSlope, "unknown": UnknownSlope}


class Flat(FlatPort):
    def forward(self, x):
        x = self.linear("enter", x)
        gate = x.sigmoid()
        x = self.linear("inner", x * (gate.detach() if self.fault == "gate" else gate))
        return self.linear("head", BY_HAND[self.fault].apply(x) if self.fault in BY_HAND else F.gelu(x))


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("gate", "first", "a gate that is detached"),
        ("quick", "second", "the slope of gelu's sigmoid form"),
        ("unknown", "second", ""),
    ],
)
def test_the_activation_is_named(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=3)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert found.where.pass_ == "input gradient"
    assert any(words in e.details for e in found.evidence)


class Star(nn.Module):
    """StarReLU (Yu et al., MetaFormer Baselines for Vision, 2022)."""

    def __init__(self):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.tensor(0.9)), nn.Parameter(torch.tensor(-0.4))

    def forward(self, x):
        return self.scale * F.relu(x).square() + self.bias


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(6, 8), Star(), nn.Linear(8, 6)

    def forward(self, x):
        return self.fc2(self.act(self.fc1(x)))


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mlps, self.head = nn.ModuleList((Mlp(), Mlp())), nn.Linear(6, 3)

    def forward(self, x):
        for mlp in self.mlps:
            x = x + mlp(x)
        return self.head(x)


class FlatMixed(FlatPort):
    """``fault`` takes one of the two equal factors of the second square for a constant."""

    def forward(self, x):
        for i in range(2):
            y, name = self.linear(f"mlps_{i}_fc1", x).clamp(min=0), f"mlps_{i}_act"
            y = y * (y.detach() if self.fault and i == 1 else y)
            y = y * getattr(self, name + "_scale") + getattr(self, name + "_bias")
            x = x + self.linear(f"mlps_{i}_fc2", y)
        return self.linear("head", x)


def test_half_a_slope_is_the_activation_s_and_not_of_who_calls_it():
    torch.manual_seed(1)
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Mixed(), lambda old: FlatMixed(old, "half"), batches, loss=F.cross_entropy, steps=3)
    assert (found.verdict, found.where.module) == (Verdict.BUG, "mlps.1.act")
    assert any("0.5 times the gradient" in e.details for e in found.evidence)
