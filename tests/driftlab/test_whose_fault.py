"""Which of two networks that differ is at fault, where that can be told without asking what was meant."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose

torch.set_num_threads(1)
WIDTH = 6


@torch.library.custom_op("driftlab_tests::doubled", mutates_args=())
def doubled(x: torch.Tensor) -> torch.Tensor:
    """Right for what lies row by row alone: it reads the memory in its order, whatever the strides."""
    usual = torch.empty(x.shape, device="meta").stride()
    return 2 * torch.as_strided(x, x.shape, usual).clone()


@doubled.register_fake
def _(x):
    return torch.empty_like(x)


doubled.register_autograd(lambda ctx, gradient: 2 * gradient)


class Net(nn.Module):
    """[N, 5, WIDTH] -> [N, 3]; ``kernel`` doubles by the operation above; ``cut`` stops a gradient."""

    def __init__(self, kernel=False, cut=False):
        super().__init__()
        torch.manual_seed(0)
        self.kernel, self.cut = kernel, cut
        self.inlet, self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(5, 3)

    def forward(self, x):
        gate = torch.sigmoid(self.gate(x))
        x = torch.tanh(self.inlet(x)) * (gate.detach() if self.cut else gate)
        x = doubled(x.mT) if self.kernel else 2 * x.mT
        return self.out(x).mean(1)


def headline(reference, candidate, sizes=(4, 4), shape=(5, WIDTH)):
    torch.manual_seed(1)
    batches = [(torch.randn(n, *shape), torch.randn(n, 3)) for n in sizes]
    found = diagnose(reference, candidate, batches, loss=F.mse_loss, steps=3)
    assert found.verdict is Verdict.BUG
    return found.headline


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_a_kernel_that_reads_the_memory_in_its_order_is_told(role):
    wrong, right = Net(kernel=True), Net()
    said = headline(*((wrong, right) if role == "reference" else (right, wrong)))
    assert f"the {role} itself gives something else" in said


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_of_two_gradients_finite_differences_tell_which_is_the_derivative(role):
    stops, sends = Net(cut=True), Net()
    said = headline(*((stops, sends) if role == "reference" else (sends, stops)))
    other = {"reference": "candidate", "candidate": "reference"}[role]
    assert f"the {other}'s gradient is the derivative, and the {role}'s is not" in said


def test_of_another_function_neither_is_at_fault():
    said = headline(Net(), Other())
    assert "itself gives" not in said
    assert "derivative" not in said


class Other(Net):
    def forward(self, x):
        return super().forward(1.01 * x)


class Rows(nn.Module):
    """Pictures [N, 3, 2, 3] as rows behind a token, whose norm is sent gradients that lie pixel by pixel."""

    def __init__(self, by_hand=False):
        super().__init__()
        torch.manual_seed(0)
        self.by_hand = by_hand
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.Linear(4, 3)
        self.token = nn.Parameter(torch.randn(1, 1, 4))

    def forward(self, x):
        x = self.conv(x)
        x = self.normed(x) if self.by_hand else self.norm(x)
        rows = torch.cat([self.token.expand(len(x), -1, -1), x.flatten(2).mT], 1)
        return torch.tanh(self.out(rows)).mean(1)

    def normed(self, x):
        spread, center = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
        if not self.training:
            center, spread = (t[:, None, None] for t in (self.norm.running_mean, self.norm.running_var))
        else:
            self.norm(x.detach())  # for its averages
        weight, bias = (t[:, None, None] for t in (self.norm.weight, self.norm.bias))
        return (x - center) / (spread + self.norm.eps).sqrt() * weight + bias


def wrong_in_torch():
    x = torch.randn(1, 4, 2, 3, dtype=torch.float64, requires_grad=True)
    out = F.batch_norm(x, None, None, training=True)
    lying = torch.randn(1, 6, 4, dtype=torch.float64).mT.unflatten(2, (2, 3))  # strides (4, 1, 12, 4)
    both = [torch.autograd.grad(out, x, g, retain_graph=True)[0] for g in (lying, lying.contiguous())]
    return not torch.allclose(*both)


@pytest.mark.skipif(not wrong_in_torch(), reason="torch's batch norm sends one sample the right gradient")
def test_a_wrong_kernel_of_torchs_is_told_of_one_sample():
    """In torch 2.15 on a CPU, where the batch norm reads a gradient as if it lay channel by channel."""
    said = headline(Rows(), Rows(by_hand=True), shape=(3, 2, 3))
    assert "on one sample" in said
    assert "the reference itself gives something else" in said
