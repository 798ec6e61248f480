"""Right gradients of many kinds pass, far below the limit: a sample of the calibration in ``kinds``."""

import pytest
import torch

from driftlab import gradient_check
from driftlab.finite.differences import LIMIT
from tests.driftlab.finite.kinds import KINDS, Net, checked

SEEDS = range(4)


@pytest.mark.parametrize("kind", KINDS)
def test_a_right_gradient_passes_far_below_the_limit(kind):
    for seed in SEEDS:
        found = checked(kind, seed)
        assert found.outcome == "pass", (seed, found)
        assert max(d.ratio for d in found.differences) < LIMIT / 2, (seed, found)
        assert found.sees <= 1e-3


def test_what_is_off_is_about_its_own_uncertainty():
    ratios = [
        d.ratio for k in ("perceptron", "layer norm", "gru") for s in SEEDS for d in checked(k, s).differences
    ]
    ratios.sort()
    assert 0.05 < ratios[len(ratios) // 2] < 1
    assert ratios[-1] < 4


def test_a_sum_over_a_million_numbers_is_seen_to_a_millionth():
    net = Net(lambda s, x: (s.w * x).sin(), w=torch.tensor(0.7))
    torch.manual_seed(0)
    found = gradient_check(net, torch.randn(1_000_000), torch.sum, directions=2)
    assert found.outcome == "pass"
    assert found.sees < 1e-6
