"""Constants that one network stores in float32 and the other computes, told from other constants."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.comparison import compare
from driftlab.arithmetic.constants import rounded_constants
from driftlab.arithmetic.passes import whole_network
from driftlab.fold import find_fold
from driftlab.network.calling import whole
from driftlab.network.pair import Pair

ULP = 2.0**-23


class Network(nn.Module):
    """A layer, something done with a constant, and a head."""

    def __init__(self, apply, **stored):
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head, self.apply_constant = nn.Linear(6, 8), nn.Linear(8, 3), apply
        for name, value in stored.items():
            self.register_buffer(name, value)

    def forward(self, x):
        return self.head(self.apply_constant(self, torch.tanh(self.stem(x))))


def explained(reference, candidate):
    """What is said, and whether there was anything to explain."""
    fold = find_fold(reference, candidate)
    make = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    subject = Pair(reference, candidate, fold, F.cross_entropy, make, make)
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(9, 6, generator=generator), torch.randint(3, (9,), generator=generator)
    given = whole_network(whole, F.cross_entropy, x, y)
    wrong = compare(reference, candidate, given, fold).wrong()
    return rounded_constants(subject, given, wrong), wrong


def angles(dtype):
    return torch.arange(8, dtype=dtype) * 0.7


COMPUTED = {
    "a factor": lambda _, h: h / math.sqrt(7),
    "a table": lambda _, h: h + angles(h.dtype).sin(),
    "a matrix": lambda _, h: h @ torch.outer(angles(h.dtype), angles(h.dtype) + 1).cos(),
}
STORED = {
    "a factor": (lambda m, h: h * m.c, torch.tensor(1 / math.sqrt(7))),
    "a table": (lambda m, h: h + m.c, angles(torch.float64).sin().float()),
    "a matrix": (
        lambda m, h: h @ m.c,
        torch.outer(angles(torch.float64), angles(torch.float64) + 1).cos().float(),
    ),
}


@pytest.mark.parametrize("name", STORED)
def test_what_one_stores_and_the_other_computes_is_rounding_whoever_stores_it(name):
    apply, value = STORED[name]
    for stored_by, pair in (
        ("candidate", (Network(COMPUTED[name]), Network(apply, c=value))),
        ("reference", (Network(apply, c=value), Network(COMPUTED[name]))),
    ):
        said, wrong = explained(*pair)
        assert wrong, "there is nothing to explain"
        assert f"the {stored_by}'s constants" in said
        assert f"{wrong[0].relative:.1g}" in said


def waves(dtype, first):
    """As in a positional encoding, of positions from ``first`` on."""
    rates = 10_000.0 ** (-torch.arange(8, dtype=dtype) / 8)
    return torch.outer(torch.arange(first, first + 9, dtype=dtype), rates).sin()


@pytest.mark.parametrize("first", [0, 100, 1000])
@pytest.mark.parametrize("share", [1.0, 2.0**-4, 2.0**-8])
def test_a_table_that_was_made_in_float32_beforehand_is_rounding_too(first, share):
    computed = Network(lambda _, h: h + share * waves(h.dtype, first))
    cached = Network(lambda m, h: h + share * m.c, c=waves(torch.float32, first))
    x = torch.randn(9, 6)
    assert torch.equal(computed(x), cached(x))
    said, wrong = explained(computed, cached)
    assert wrong == [] or said is not None


@pytest.mark.parametrize(("units", "right"), [(0, True), (1, True), (6, False), (16, False), (256, False)])
def test_a_stored_constant_may_be_off_by_about_a_unit_and_no_more(units, right):
    value = torch.tensor(1 / math.sqrt(7)) * (1 + units * ULP)
    said, wrong = explained(Network(COMPUTED["a factor"]), Network(STORED["a factor"][0], c=value))
    assert wrong
    assert (said is not None) is right


@pytest.mark.parametrize(
    "apply",
    [
        lambda _, h: h / math.sqrt(7) * (1 + 1e-8),
        lambda _, h: h / math.sqrt(7) * (1 + 1e-7),
        lambda _, h: h / math.sqrt(7) + 1e-8,
        lambda _, h: h / math.sqrt(7.001),
        lambda _, h: h / math.sqrt(7) * torch.tensor([1.0, 1, 1, 1, 1, 1, 1, 1.5]),
    ],
)
def test_a_wrong_constant_that_is_not_stored_is_not_explained(apply):
    said, wrong = explained(Network(COMPUTED["a factor"]), Network(apply))
    assert wrong
    assert said is None


def test_a_wrong_factor_is_not_hidden_by_a_stored_constant_somewhere_else():
    apply, value = STORED["a factor"]
    candidate = Network(lambda m, h: apply(m, h) * (1 + 1e-5), c=value)
    said, wrong = explained(Network(COMPUTED["a factor"]), candidate)
    assert wrong
    assert said is None


def test_a_difference_of_float64_alone_is_not_explained():
    apply, value = STORED["a factor"]
    candidate = Network(lambda m, h: apply(m, h) * (1 + 1e-4 * (h.dtype == torch.float64)), c=value.clone())
    reference = Network(apply, c=value.clone())
    said, wrong = explained(reference, candidate)
    assert wrong
    assert said is None


def test_what_overflows_is_not_explained():
    said, wrong = explained(Network(COMPUTED["a factor"]), Network(lambda _, h: h * 1e30 * 1e30 / 1e60))
    assert wrong
    assert said is None
