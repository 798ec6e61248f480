"""A network that differentiates on its way: energies, and forces as their slopes."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
WIDTH = 6
BACK = ("input gradient", "weight gradient")


class Mixing(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.gate = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + torch.tanh(self.fc(x)) * torch.sigmoid(self.gate(x))


class Slope(nn.Module):
    def forward(self, energy, r):
        return -torch.autograd.grad(energy.sum(), r, create_graph=True)[0]


class Potential(nn.Module):
    """Atoms [N, 3] -> the energy of each, and the force on it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.filter = nn.Linear(3, WIDTH), nn.Linear(1, WIDTH)
        self.out, self.slope = nn.Linear(WIDTH, 1), Slope()
        self.layers = nn.ModuleList(Mixing() for _ in range(3))

    def forward(self, r):
        with torch.enable_grad():
            r = r if r.requires_grad else r.detach().requires_grad_()
            x, far = self.enter(r), torch.linalg.vector_norm(r, dim=1, keepdim=True)
            x = x * (self.filter(far) * torch.cos(far / 3))
            for layer in self.layers:
                x = layer(x)
            energy = self.out(x)[:, 0]
            return energy, self.slope(energy, r)


class FlatPotential(FlatPort):
    def forward(self, r):
        with torch.enable_grad():
            r = r if r.requires_grad else r.detach().requires_grad_()
            x, far = self.linear("enter", r), r.square().sum(1, keepdim=True).sqrt()
            fading = torch.cos(far / 3)
            if self.fault == "a bias that does not fade":
                filters = far * fading @ self.filter_weight.T + self.filter_bias
            else:
                filters = self.linear("filter", far) * fading
            x = x * filters
            for i in range(3):
                open_ = torch.sigmoid(self.linear(f"layers_{i}_gate", x))
                if i == 1 and self.fault == "a wave in the gate":
                    open_ = open_ + 0.1 * torch.sin(3 * open_)
                x = torch.addcmul(x, self.linear(f"layers_{i}_fc", x).tanh(), open_)
            energy = self.linear("out", x)[:, 0]
            further = self.fault != "no second slope"
            (slope,) = torch.autograd.grad(energy.sum(), r, retain_graph=True, create_graph=further)
            return energy, -slope


def loss(outputs, target):
    return F.mse_loss(outputs[0], target[0]) + F.mse_loss(outputs[1], target[1])


def judged(fault=""):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 3), (torch.randn(8), torch.randn(8, 3))) for _ in range(2)]
    return diagnose(Potential(), lambda old: FlatPotential(old, fault), batches, loss=loss, steps=2)


def test_forces_written_otherwise_are_right():
    assert judged().verdict is Verdict.ROUND_OFF


@pytest.mark.parametrize(
    ("fault", "module", "passes"),
    [
        ("a bias that does not fade", "filter", ("forward",)),
        ("a wave in the gate", "layers.1", ("forward",)),
        ("no second slope", "slope", BACK),
    ],
)
def test_the_module_is_named(fault, module, passes):
    found = judged(fault)
    assert found.verdict is Verdict.BUG
    assert found.where.module == module
    assert found.where.pass_ in passes
