"""What the gradient check promises for every network: scaling, renaming, closed forms, sizes of faults."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab import gradient_check
from driftlab.finite.differences import Slope
from driftlab.finite.point import Point, random_direction

torch.set_num_threads(1)
seeds = st.integers(0, 2**31)
few = settings(max_examples=25, deadline=None)


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def squares(outputs):
    return outputs.square().mean()


def network(seed, factor=1.0, leaf="2.weight"):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.SiLU(), nn.Linear(8, 3))
    net.get_parameter(leaf).register_hook(lambda g: factor * g)
    return net


class Quadratic(nn.Module):
    """x'Ax / 2 + b'x, whose derivative along v is v'(Ax + b), A symmetric."""

    def __init__(self, size, seed):
        super().__init__()
        a = drawn(size, size, seed=seed)
        self.register_buffer("a", a + a.T)
        self.register_buffer("b", drawn(size, seed=seed + 1))

    def forward(self, x):
        return x @ self.a @ x / 2 + self.b @ x


@few
@given(st.integers(1, 40), seeds)
def test_a_quadratic_forms_derivative_is_measured(size, seed):
    form, x = Quadratic(size, seed % 1000), drawn(size, seed=seed)
    point = Point(form, x, lambda value: value, 0)
    generator = torch.Generator().manual_seed(seed)
    move = random_direction(point, generator)
    found = Slope(point, point.gradient()).best(move)
    closed = float(move["input"] @ (form.a @ x + form.b))
    size = max(abs(closed), found.size)
    assert abs(found.autograd - closed) <= 1e-13 * size * len(x)
    assert abs(found.measured - closed) <= 16 * found.uncertain + 1e-10 * size


@few
@given(seeds, st.integers(-40, 40), st.sampled_from([1.0, 1.01, 0.0]))
def test_a_loss_scaled_by_a_power_of_two_scales_everything_and_keeps_the_outcome(seed, exponent, factor):
    x, scale = drawn(6, 5, seed=seed), 2.0**exponent
    plain, scaled = (
        gradient_check(network(seed, factor), x, lambda o, c=c: c * squares(o), seed=seed)
        for c in (1.0, scale)
    )
    assert plain.outcome == scaled.outcome == ("pass" if factor == 1 else "fail")
    for one, other in zip(plain.differences, scaled.differences, strict=True):
        assert other.autograd == scale * one.autograd
        assert other.off == scale * one.off
        assert other.ratio == one.ratio
    assert scaled.sees == plain.sees


@few
@given(seeds, st.floats(1e-12, 1e12), st.sampled_from([1.0, 1.01]))
def test_a_scaled_loss_keeps_the_outcome(seed, scale, factor):
    x = drawn(6, 5, seed=seed)
    found = gradient_check(network(seed, factor), x, lambda o: scale * squares(o), seed=seed)
    assert found.outcome == ("pass" if factor == 1 else "fail")
    if factor != 1:
        assert found.suspect.leaf == "2.weight"


class Renamed(nn.Module):
    """The layers of ``net`` by other names, registered in another order."""

    def __init__(self, net, order):
        super().__init__()
        self.layers = list(net)
        for place in order:
            self.add_module(f"layer_{place}", net[place])

    def forward(self, x):
        for place in range(len(self.layers)):
            x = getattr(self, f"layer_{place}")(x)
        return x


@few
@given(seeds, st.permutations(range(5)), st.sampled_from([1.0, 1.01, 0.0]))
def test_other_names_in_another_order_change_nothing_but_the_name(seed, order, factor):
    x, net = drawn(6, 5, seed=seed), network(seed, factor)
    plain, renamed = (gradient_check(m, x, squares, seed=seed) for m in (net, Renamed(net, order)))
    assert plain.outcome == renamed.outcome
    if factor != 1:
        assert (plain.suspect.leaf, renamed.suspect.leaf) == ("2.weight", "layer_2.weight")


LEAVES = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]


def share(net, x, leaf):
    """Of the whole gradient's size, in units of each number's typical size, that a leaf has."""
    point = Point(net, x, squares, 0)
    sizes = {n: float(g.norm() * point.base[n].square().mean().sqrt()) for n, g in point.gradient().items()}
    return sizes[leaf] / math.sqrt(sum(s * s for s in sizes.values()))


@few
@given(seeds, st.sampled_from(LEAVES), st.floats(0, 2))
def test_a_fault_well_above_what_the_check_sees_is_found_in_its_leaf(seed, leaf, decades):
    x = drawn(6, 5, seed=seed)
    right = gradient_check(network(seed), x, squares, seed=seed)
    assert right.outcome == "pass"
    size = 100 * 10**decades * right.sees / share(network(seed), x, leaf)
    found = gradient_check(network(seed, 1 + size, leaf), x, squares, seed=seed)
    assert (found.outcome, found.suspect.leaf) == ("fail", leaf)


@few
@given(seeds, st.sampled_from(LEAVES), st.floats(0, 3))
def test_a_fault_well_below_what_the_check_sees_passes(seed, leaf, decades):
    x = drawn(6, 5, seed=seed)
    right = gradient_check(network(seed), x, squares, seed=seed)
    size = 0.01 * 10**-decades * right.sees
    assert gradient_check(network(seed, 1 + size, leaf), x, squares, seed=seed).outcome == "pass"


@pytest.mark.parametrize(
    ("count", "factor"), [(100, -1.0), (100, 0.0), (10_000, 1.5), (100_000, -1.0), (1_000_000, -1.0)]
)
def test_one_wrong_element_of_many_is_found(count, factor):
    place = count // 3

    def wrong(g):
        g = g.clone()
        g[place] *= factor
        return g

    weight = nn.Parameter(drawn(count))
    weight.register_hook(wrong)
    found = gradient_check(Scaled(weight), drawn(count, seed=2), lambda o: o.sin().sum())
    assert (found.outcome, found.suspect.leaf, found.suspect.index) == ("fail", "weight", (place,))


class Scaled(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return self.weight * x


@few
@given(seeds, st.integers(2, 6))
def test_a_check_repeats_itself(seed, directions):
    x = drawn(6, 5, seed=seed)
    one, other = (
        gradient_check(network(seed, 1.5), x, squares, directions=directions, seed=seed) for _ in range(2)
    )
    assert (one.reading, one.differences) == (other.reading, other.differences)
    assert len(one.differences) == directions
