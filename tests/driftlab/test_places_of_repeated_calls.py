"""A module that is called several times: on parts of a batch, on two inputs, at the four slopes of a step."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH, PARTS, STEPS = 6, 3, 2


class Ghost(nn.Module):
    """A batch norm of each part of the batch (Hoffer et al., Train longer, generalize better, 2017)."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(WIDTH, track_running_stats=False)
        nn.init.uniform_(self.bn.weight, 0.5, 1.5)

    def forward(self, x):
        return torch.cat([self.bn(part) for part in x.chunk(PARTS)])


class Scaling(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.linspace(-1, 1, WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 2, WIDTH))

    def forward(self, x):
        return (x - self.shift) / self.scale


class Field(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Solver(nn.Module):
    """The classical steps of Runge and Kutta."""

    def __init__(self):
        super().__init__()
        self.field = Field()

    def forward(self, x):
        for _ in range(STEPS):
            one = self.field(x)
            two = self.field(x + one / 4)
            three = self.field(x + two / 4)
            four = self.field(x + three / 2)
            x = x + (one + 2 * two + 2 * three + four) / 12
        return x


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.scaling, self.enter, self.ghost = Scaling(), nn.Linear(WIDTH, WIDTH), Ghost()
        self.solver, self.head = Solver(), nn.Linear(2 * WIDTH, 3)

    def forward(self, x, y):
        both = self.enter(self.scaling(x)).tanh(), self.enter(self.scaling(y)).tanh()
        return self.head(torch.cat([self.solver(self.ghost(both[0])), both[1]], -1))


class Flat(FlatPort):
    """Both inputs at once, all parts at once, a loop over the slopes."""

    def __init__(self, old, fault=""):
        super().__init__(old, fault)
        self.register_buffer("shift", old.scaling.shift.clone())
        self.register_buffer("scale", old.scaling.scale.clone())

    def normed(self, x):
        x = x.unflatten(0, (1 if self.fault == "parts" else PARTS, -1))
        var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
        return ((x - mean) * (var + 1e-5).rsqrt()).flatten(0, 1) * self.ghost_bn_weight + self.ghost_bn_bias

    def slope(self, x):
        for i in range(2):
            x = torch.tanh(self.linear(f"solver_field_layers_{i}", x))
        return x

    def stepped(self, x):
        start, slope, total = x, 0.0, 0.0
        for share, weight in ((0, 1), (0.25, 2), (0.25, 2), (0.5, 1)):
            slope = self.slope(start + share * slope)
            last = self.fault == "slope" and share == 0.5
            total = total + weight * (slope.detach() if last else slope)
        return start + total / 12

    def forward(self, x, y):
        both = torch.stack([x, y])
        early = self.fault == "scaled"
        both = both / self.scale - self.shift if early else both / self.scale - self.shift / self.scale
        x, y = self.linear("enter", both).tanh()
        x = self.normed(x)
        for _ in range(STEPS):
            x = self.stepped(x)
        return self.linear("head", torch.cat([x, y], -1))


@pytest.mark.parametrize(
    ("fault", "module", "pass_"),
    [
        ("", None, None),
        ("parts", "ghost", "forward"),
        ("scaled", "scaling", "forward"),
        ("slope", "solver", "input gradient"),
    ],
)
def test_the_module_whose_code_does_it_is_named(fault, module, pass_):
    torch.manual_seed(1)
    batches = [
        ({"x": torch.randn(12, WIDTH), "y": torch.randn(12, WIDTH)}, torch.randint(3, (12,))) for _ in "ab"
    ]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=2)
    if not fault:
        assert found.verdict is Verdict.ROUND_OFF
        return
    assert (found.verdict, found.where.module, found.where.pass_) == (Verdict.BUG, module, pass_)
