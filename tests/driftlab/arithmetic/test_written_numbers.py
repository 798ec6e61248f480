"""An epsilon that torch rounds to float32 before it is used is the number that was written."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.arithmetic.shadow import held, shadow, shadow_arithmetic
from driftlab.arithmetic.written_numbers import MANY, as_written, table_as_written

torch.set_num_threads(1)


@settings(deadline=None)
@given(st.integers(-9999, 9999), st.integers(-20, 20))
def test_a_short_decimal_comes_back_out_of_float32(digits, power):
    number = float(f"{digits}e{power}")
    assert as_written(float(np.float32(number))) == number == as_written(number)


@pytest.mark.parametrize("number", [1 / 3, 2.0**-23, 0.5, 3, 1e300, float("inf")])
def test_other_numbers_stay(number):
    assert as_written(number) == number


def test_numbers_that_float32_made_of_no_short_decimal_stay():
    third = float(np.float32(1 / 3))
    assert as_written(third) == third


def by_hand(x, weight, eps):
    return weight * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_by_torch_is_the_norm_written_out(dtype):
    x, weight = (1e-3 * torch.randn(4, 8)).to(dtype), torch.rand(8).to(dtype)
    with shadow_arithmetic():
        found = held(F.rms_norm(shadow(x), (8,), shadow(weight), 1e-6))
    torch.testing.assert_close(found, by_hand(x.double(), weight.double(), 1e-6), rtol=1e-14, atol=0)


class Norm(nn.Module):
    """What it norms is so small that its epsilon counts."""

    def __init__(self, eps=1e-6, torchs=False):
        super().__init__()
        self.enter, self.weight, self.head = nn.Linear(6, 8), nn.Parameter(torch.rand(8)), nn.Linear(8, 3)
        self.eps, self.torchs = eps, torchs

    def forward(self, x):
        x = 1e-3 * self.enter(x)
        if self.torchs:
            return self.head(F.rms_norm(x, (8,), self.weight, self.eps))
        return self.head(by_hand(x, self.weight, self.eps))


@pytest.mark.parametrize(("eps", "verdict"), [(1e-6, Verdict.ROUND_OFF), (1.0001e-6, Verdict.BUG)])
def test_whoever_writes_it_out_has_the_same_function(eps, verdict):
    def rewritten(model):
        other = Norm(eps, torchs=True)
        other.load_state_dict(model.state_dict())
        return other

    torch.manual_seed(0)
    batches = [(torch.randn(16, 6), torch.randint(3, (16,))) for _ in range(3)]
    assert diagnose(Norm(), rewritten, batches, loss=F.cross_entropy).verdict is verdict


@settings(deadline=None)
@given(st.lists(st.integers(-9999, 9999), min_size=1, max_size=MANY), st.integers(-20, 20))
def test_a_table_of_short_decimals_comes_back_whole(digits, power):
    numbers = [float(f"{one}e{power}") for one in digits]
    assert table_as_written(torch.tensor(numbers, dtype=torch.float32)).tolist() == numbers


@pytest.mark.parametrize("numbers", [[0.485, 1 / 3], [0.485] * (MANY + 1), [float("nan")]])
def test_a_table_that_nobody_wrote_down_stays(numbers):
    table = torch.tensor(numbers, dtype=torch.float32)
    torch.testing.assert_close(table_as_written(table), table.double(), rtol=0, atol=0, equal_nan=True)


class Shifted(nn.Module):
    """Pictures around a half, shifted by each channel's mean: in numbers, or in a tensor."""

    def __init__(self, means=(0.485, 0.456, 0.406), in_tensor=False):
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 5, 3), nn.Linear(5, 3)
        self.means, self.in_tensor = means, in_tensor

    def forward(self, x):
        if self.in_tensor:
            x = 50 * (x * 1e-2 + (x.new_tensor(self.means) - 0.5)[:, None, None])
        else:
            x = torch.stack([50 * (x[:, i] * 1e-2 + (mean - 0.5)) for i, mean in enumerate(self.means)], 1)
        return self.head(self.conv(x).tanh().mean((2, 3)))


@pytest.mark.parametrize(
    ("means", "verdict"), [((0.485, 0.456, 0.406), Verdict.ROUND_OFF), ((0.485, 0.456, 0.4061), Verdict.BUG)]
)
def test_means_in_a_tensor_are_the_means_in_numbers(means, verdict):
    def rewritten(model):
        other = Shifted(means, in_tensor=True)
        other.load_state_dict(model.state_dict())
        return other

    torch.manual_seed(0)
    batches = [(torch.randn(4, 3, 6, 5), torch.randint(3, (4,))) for _ in range(3)]
    assert diagnose(Shifted(), rewritten, batches, loss=F.cross_entropy).verdict is verdict
