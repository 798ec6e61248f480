"""Softplus has no end at 20 where rounding is taken away; an end that shows in float32 stays."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic

torch.set_num_threads(1)
numbers = st.lists(st.floats(-300, 300), min_size=1, max_size=8)


def shadowed(x, **options):
    """The value and the gradient of its sum."""
    with shadow_arithmetic():
        given = shadow(x).requires_grad_()
        out = F.softplus(given, **options)
        out.sum().backward()
    return held(out.detach()), held(given.grad)


@settings(deadline=None)
@given(numbers, st.floats(0.25, 4))
def test_it_is_the_logarithm_of_one_and_the_exponential(values, beta):
    x = torch.tensor(values, dtype=torch.float64)
    value, gradient = shadowed(x, beta=beta)
    np.testing.assert_allclose(value, np.logaddexp(beta * x.numpy(), 0) / beta, rtol=1e-13)
    np.testing.assert_allclose(gradient, expit(beta * x.numpy()), rtol=1e-13)


@pytest.mark.parametrize("threshold", [-1.0, 0.0, 5.0])
def test_a_threshold_that_float32_shows_is_kept(threshold):
    x = torch.linspace(-8, 8, 33, dtype=torch.float64, requires_grad=True)
    value, gradient = shadowed(x.detach(), threshold=threshold)
    expected = F.softplus(x, threshold=threshold)
    expected.sum().backward()
    assert torch.equal(value, expected.detach())
    assert torch.equal(gradient, x.grad)


class Steps(nn.Module):
    def __init__(self):
        super().__init__()
        self.enter, self.out = nn.Linear(6, 16), nn.Linear(16, 3)

    def forward(self, x):
        return self.out(self.bent(12 * self.enter(x)) / 10)

    def bent(self, x):
        return F.softplus(x)


class ByLogarithms(Steps):
    def bent(self, x):
        return torch.logaddexp(x, torch.zeros_like(x))


class EndsEarly(Steps):
    def bent(self, x):
        return F.softplus(x, threshold=10)


@pytest.mark.parametrize(
    ("written", "verdict"), [(ByLogarithms, Verdict.ROUND_OFF), (EndsEarly, Verdict.BUG)]
)
def test_whoever_writes_it_out_has_the_same_function(written, verdict):
    def rewritten(model):
        other = written()
        other.load_state_dict(model.state_dict())
        return other

    torch.manual_seed(0)
    batches = [(torch.randn(32, 6), torch.randint(3, (32,))) for _ in range(3)]
    model = Steps()
    assert (12 * model.enter(batches[0][0]) > 20).any()
    assert diagnose(model, rewritten, batches, loss=F.cross_entropy).verdict is verdict
