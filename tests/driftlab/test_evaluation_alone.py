"""``trains=False``: norms folded into weights are the same function in evaluation, and another training."""

import pytest
import torch
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from driftlab import Verdict, diagnose
from tests.driftlab.hostile import quantised


def network():
    torch.manual_seed(0)
    norm = nn.BatchNorm2d(4)
    norm.running_mean.normal_()
    norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(nn.Conv2d(3, 4, 3), norm, nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 4))


def folded(model, eps=1e-5):
    model[1].eps = eps
    return nn.Sequential(fuse_conv_bn_eval(model[0].eval(), model[1].eval()), *model[2:]).train()


def batches():
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(8, 3, 6, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator))
        for _ in range(2)
    ]


def test_folded_norms_are_named_as_what_they_are():
    found = diagnose(network(), folded, batches(), steps=2)
    assert found.verdict is Verdict.BUG
    assert "in eval mode they are the same function, which trains=False asks for alone" in found.headline


def test_in_evaluation_alone_they_are_the_same_function():
    found = diagnose(network(), folded, batches(), trains=False)
    assert found.verdict is Verdict.ROUND_OFF
    assert "in eval mode" in found.headline
    assert diagnose(network(), lambda model: model, batches(), trains=False).verdict is Verdict.BIT_IDENTICAL


@pytest.mark.parametrize("change", ["eps", "later"])
def test_a_wrong_one_is_a_bug_on_whichever_batch_it_shows(change):
    first, second = batches()
    if change == "eps":
        assert diagnose(network(), lambda m: folded(m, 1e-4), [first], trains=False).verdict is Verdict.BUG
        return

    class Clamped(nn.Module):
        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, x):
            return self.model(x.clamp(max=20.0))

    second[0][0, 0, 0, 0] = 30.0
    found = diagnose(network(), Clamped, [first, second], trains=False)
    assert found.verdict is Verdict.BUG


@pytest.mark.filterwarnings("ignore")  # torch says that it will move quantisation
def test_what_has_nothing_to_train_needs_no_optimizer():
    linear = nn.Linear(32, 10).eval()
    batch = torch.randn(16, 32, generator=torch.Generator().manual_seed(1)), torch.arange(16) % 10
    found = diagnose(nn.Sequential(linear), quantised, [batch], trains=False)
    assert found.verdict is Verdict.REDUCED_PRECISION
