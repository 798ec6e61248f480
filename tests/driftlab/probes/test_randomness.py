"""Random layers: the same distribution drawn otherwise, another distribution, no randomness at all."""

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.passes import Recorded
from driftlab.probes.random_streams import DRAWS, SIGMAS, is_random, same_distribution

GENERATOR = torch.Generator()


class Layer(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def call():
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    return Recorded((x.requires_grad_(),))


def dropout(rate):
    return lambda x: F.dropout(x, rate)


def by_hand(rate):
    return lambda x: x * (torch.rand(x.shape) >= rate) / (1 - rate)


def in_pieces(rate):
    return lambda x: torch.cat([F.dropout(part, rate) for part in x.flip(0).split(2)]).flip(0)


def of_its_own(x):
    return x * torch.bernoulli(torch.full(x.shape, 0.5), generator=GENERATOR) * 2


@pytest.mark.parametrize(
    "function",
    [
        dropout(0.3),
        by_hand(0.3),
        lambda x: x + torch.randn_like(x),
        of_its_own,
        lambda x: x * random.random(),
    ],
    ids=["dropout", "by hand", "noise", "a generator of its own", "python's numbers"],
)
def test_a_layer_that_draws_numbers_is_random(function):
    assert is_random(Layer(function), call())


@pytest.mark.parametrize(
    "module",
    [Layer(torch.tanh), nn.Dropout(0.0), nn.Dropout(0.5).eval(), nn.BatchNorm1d(8), nn.Linear(8, 3)],
)
def test_a_layer_that_draws_none_is_not(module):
    assert not is_random(module, call())


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (dropout(0.3), dropout(0.3)),
        (dropout(0.3), by_hand(0.3)),
        (dropout(0.3), in_pieces(0.3)),
        (dropout(0.5), of_its_own),
        (lambda x: x + torch.randn(x.shape), lambda x: x - torch.randn(x.shape)),
        (lambda x: x + torch.rand(x.shape), lambda x: x + 1 - torch.rand(x.shape)),
        (lambda x: x * torch.randn(1), lambda x: x * torch.randn(2)[1]),
    ],
)
def test_the_same_distribution_in_another_order_is_the_same(mine, theirs):
    found = same_distribution(Layer(mine), Layer(theirs), call())
    assert 0 < found <= SIGMAS


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (dropout(0.3), dropout(0.4)),
        (dropout(0.3), dropout(0.2)),
        (dropout(0.3), lambda x: F.dropout(x, 0.3) * 0.7),
        (dropout(0.3), lambda x: x),
        (lambda x: x, dropout(0.3)),
        (dropout(0.3), lambda x: x * (torch.rand(x.shape[0], 1) >= 0.3) / 0.7),
        (lambda x: x + torch.randn(x.shape), lambda x: x + 1.2 * torch.randn(x.shape)),
        (lambda x: x + torch.randn(x.shape), lambda x: x + torch.randn(x.shape) + 1),
        (lambda x: x + torch.randn(x.shape), lambda x: x + torch.randn(x.shape[0], 1)),
        (dropout(0.3), lambda x: F.dropout(x, 0.3)[:, :-1]),
    ],
    ids=[
        "a higher rate",
        "a lower rate",
        "not scaled",
        "left out",
        "added",
        "by sample",
        "more spread",
        "moved",
        "shared",
        "another shape",
    ],
)
def test_another_distribution_is_another(mine, theirs):
    found = same_distribution(Layer(mine), Layer(theirs), call())
    assert found > SIGMAS


def test_a_shift_shows_in_as_many_standard_errors_as_it_has():
    shift = 1.0
    single = Recorded((torch.zeros(1),))
    mine = Layer(lambda x: x + torch.randn(1))
    theirs = Layer(lambda x: x + torch.randn(1) + shift)
    expected = shift / (2 / DRAWS) ** 0.5
    found = same_distribution(mine, theirs, single)
    assert found == pytest.approx(expected, abs=3)


def test_two_that_draw_nothing_and_differ_by_rounding_are_the_same():
    torch.manual_seed(0)
    x, w = torch.randn(6, 8), torch.randn(8, 8)
    mine, theirs = Layer(lambda x: x @ w), Layer(lambda x: x[:, :4] @ w[:4] + x[:, 4:] @ w[4:])
    assert not torch.equal(mine(x), theirs(x))
    assert same_distribution(mine, theirs, Recorded((x,))) <= SIGMAS


def test_modules_and_inputs_are_left_as_they_were():
    given, module = call(), nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(0.5), nn.ReLU(inplace=True))
    before, x = {n: t.clone() for n, t in module.state_dict().items()}, given.args[0].detach().clone()
    same_distribution(module, module, given)
    assert all(torch.equal(before[n], t) for n, t in module.state_dict().items())
    assert torch.equal(given.args[0], x)


class Moving(nn.Module):
    """What it gives depends on how often it was called, and on no random number."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return x - self.mean


def test_statistics_that_move_are_no_random_numbers():
    assert not is_random(Moving(), call())
