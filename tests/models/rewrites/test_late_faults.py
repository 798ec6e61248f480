"""A late fault is right until it sets in, and off by what it says from then on."""

import copy

import pytest
import torch
from torch import nn

from models.rewrites.late_faults import OFF, late_fault, split_with_late_fault

AT = 3


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 5, 3)).double()


def gradient(model, x):
    model.zero_grad()
    model(x).square().sum().backward()
    return model[2].weight.grad.clone()


@pytest.mark.parametrize("make", [late_fault, split_with_late_fault])
@pytest.mark.parametrize(
    ("sort", "factor"),
    [("gradient", 1 + OFF), ("schedule", (10 * AT + 1) / (10 * AT)), ("counter", (1 + OFF) ** 2)],
)
def test_the_gradient_is_off_from_the_call_on(make, sort, factor):
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    right = network()
    wrong = make(copy.deepcopy(right), sort=sort, at=AT)
    for call in range(AT + 1):  # the factor is rounded to float32
        ratio = gradient(wrong, x) / gradient(right, x)
        assert torch.allclose(ratio, torch.full_like(ratio, factor if call == AT else 1.0), rtol=1e-7)


def test_a_call_in_eval_mode_does_not_count():
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    right = network()
    wrong = late_fault(copy.deepcopy(right), sort="gradient", at=1)
    wrong.eval()
    wrong(x)
    assert torch.equal(gradient(wrong.train(), x), gradient(right, x))


def test_all_other_convs_are_split():
    made = split_with_late_fault(network(), sort="gradient", at=AT)
    assert [type(made[i]).__name__ for i in (0, 2)] == ["SideBySide", "Stretched"]
    assert made.fold(dict(made.named_parameters())).keys() == dict(network().named_parameters()).keys()
