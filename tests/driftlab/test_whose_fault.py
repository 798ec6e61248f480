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


def headline(reference, candidate):
    torch.manual_seed(1)
    batches = [(torch.randn(4, 5, WIDTH), torch.randn(4, 3)) for _ in range(2)]
    found = diagnose(reference, candidate, batches, loss=F.mse_loss, steps=3)
    assert found.verdict is Verdict.BUG
    return found.headline


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_a_kernel_that_reads_the_memory_in_its_order_is_told(role):
    wrong, right = Net(kernel=True), Net()
    said = headline(*((wrong, right) if role == "reference" else (right, wrong)))
    assert f"the {role} gives what the other does" in said


@pytest.mark.parametrize("role", ["reference", "candidate"])
def test_of_two_gradients_finite_differences_tell_which_is_the_derivative(role):
    stops, sends = Net(cut=True), Net()
    said = headline(*((stops, sends) if role == "reference" else (sends, stops)))
    other = {"reference": "candidate", "candidate": "reference"}[role]
    assert f"the {other}'s gradient is the derivative, and the {role}'s is not" in said


def test_of_another_function_neither_is_at_fault():
    said = headline(Net(), Other())
    assert "gives what" not in said
    assert "derivative" not in said


class Other(Net):
    def forward(self, x):
        return super().forward(1.01 * x)
