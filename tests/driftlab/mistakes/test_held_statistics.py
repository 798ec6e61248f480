"""Norms whose statistics are constants on the way back, against norms written out with detached ones."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.held_statistics import HeldStatistics
from driftlab.tracing.scopes import Scopes

torch.set_num_threads(1)
C = 4


def written_out(x, dims, eps=1e-5, centred=True):
    mean = x.mean(dims, keepdim=True).detach() if centred else 0.0
    spread = (x - mean).square().mean(dims, keepdim=True).detach()
    return (x - mean) / (spread + eps).sqrt()


def by_groups(x):
    return written_out(x.unflatten(1, (2, -1)), [2, 3, 4]).flatten(1, 2)


CASES = {
    "batch": (nn.BatchNorm2d(C), lambda x: written_out(x, [0, 2, 3])),
    "instance": (nn.InstanceNorm2d(C, affine=True), lambda x: written_out(x, [2, 3])),
    "group": (nn.GroupNorm(2, C), by_groups),
    "layer": (nn.LayerNorm([3, 5]), lambda x: written_out(x, [2, 3])),
    "root": (nn.RMSNorm([3, 5], eps=1e-3), lambda x: written_out(x, [2, 3], 1e-3, centred=False)),
}


def gradients(function, x, weights):
    y = function(x)
    return y, torch.autograd.grad((y**3).sum(), [x, *weights])


@pytest.mark.parametrize("name", CASES)
def test_it_is_what_detached_statistics_give(name):
    norm, plain = CASES[name]
    norm.double().requires_grad_()
    x = torch.randn(6, C, 3, 5, dtype=torch.float64, requires_grad=True)
    for parameter in norm.parameters():
        nn.init.uniform_(parameter, 0.5, 2.0)
    shape = (-1, 1, 1) if name in ("batch", "instance", "group") else (3, 5)
    weights = list(norm.parameters())

    def by_hand(x):
        y = plain(x) * weights[0].reshape(shape)
        return y + weights[1].reshape(shape) if len(weights) > 1 else y

    places = frozenset()
    for _ in range(2):
        with HeldStatistics(Scopes(norm), places) as mode:
            y, found = gradients(norm, x, weights)
        places = frozenset(mode.places)
    wanted_y, wanted = gradients(by_hand, x, weights)
    assert [scope for scope, _ in places] == [""]
    torch.testing.assert_close(y, wanted_y)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert not torch.allclose(gradients(norm, x, weights)[1][0], wanted[0])


def test_kept_statistics_are_constants_anyway():
    norm = nn.BatchNorm2d(C).eval()
    with HeldStatistics(Scopes(norm)) as mode:
        norm(torch.randn(2, C, 3, 3, requires_grad=True))
    assert not mode.places


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.first = nn.Linear(6, C), nn.LayerNorm(C)
        self.inner, self.second, self.head = nn.Linear(C, C), nn.LayerNorm(C), nn.Linear(C, 3)

    def forward(self, x):
        x = self.first(self.enter(x)).tanh()
        return self.head(self.second(x + self.inner(x)))


class Flat(nn.Module):
    """The same in one function; the statistics of one norm are computed without autograd."""

    def __init__(self, old, held=None):
        super().__init__()
        self.old, self.at = (
            nn.ParameterDict({n.replace(".", "_"): p for n, p in old.named_parameters()}),
            held,
        )

    def norm(self, name, x):
        w = self.old
        if name != self.at:
            return F.layer_norm(x, [C], w[name + "_weight"], w[name + "_bias"])
        return written_out(x, [-1]) * w[name + "_weight"] + w[name + "_bias"]

    def forward(self, x):
        w = self.old
        x = self.norm("first", x @ w["enter_weight"].T + w["enter_bias"]).tanh()
        x = self.norm("second", x + x @ w["inner_weight"].T + w["inner_bias"])
        return x @ w["head_weight"].T + w["head_bias"]


@pytest.mark.parametrize("name", ["first", "second"])
def test_the_norm_is_named(name):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Net(), lambda old: Flat(old, name), batches, loss=F.cross_entropy, steps=3)
    assert found.verdict is Verdict.BUG
    assert (found.where.module, found.where.pass_) == (name, "input gradient")
    assert any("statistics, held fixed" in e.details for e in found.evidence)
