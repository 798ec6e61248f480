"""The a-priori bound against sums taken in random order, and against its closed form."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab.arithmetic.passes import Passes, Recorded, run
from driftlab.probes.rounding_bound import SUMS_OF_PRODUCTS, rounding_bounds

U = 2.0**-24


def in_any_order(products, generator):
    """The float32 sum over the first dimension, two random ones of what is left at a time."""
    parts = list(products)
    while len(parts) > 1:
        i, j = torch.randperm(len(parts), generator=generator)[:2].tolist()
        total = parts[i] + parts[j]
        parts = [p for n, p in enumerate(parts) if n not in (i, j)] + [total]
    return parts[0]


def linear_in_any_order(layer, x, g, generator):
    w, b = layer.weight.detach(), layer.bias.detach()
    forward = [w[:, k] * x[:, k, None] for k in range(x.shape[1])] + [b.expand(len(x), -1)]
    return {
        "forward": {"": forward},
        "input gradient": {"0": [g[:, o, None] * w[o] for o in range(len(w))]},
        "weight gradient": {"weight": [g[n, :, None] * x[n] for n in range(len(x))], "bias": list(g)},
    }, lambda parts: in_any_order(parts, generator).double()


def setting(seed, rows, inside, outside, positive=False):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(shape, generator=generator)  # noqa: E731
    layer, x, g = nn.Linear(inside, outside), draw(rows, inside), draw(rows, outside)
    for parameter in layer.parameters():
        parameter.data.copy_(draw(*parameter.shape))
    if positive:
        x, g = x.abs(), g.abs()
        for parameter in layer.parameters():
            parameter.data.abs_()
    return layer, x, g, generator


def call(x, g):
    return Recorded((x.clone().requires_grad_(),), gradients={"": g})


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 30), st.integers(1, 5), st.booleans())
def test_no_order_of_summation_exceeds_the_bound_and_a_factor_does(seed, rows, inside, outside, positive):
    layer, x, g, generator = setting(seed, rows, inside, outside, positive)
    products, summed = linear_in_any_order(layer, x, g, generator)
    two = [
        Passes({pass_: {n: summed(p) for n, p in named.items()} for pass_, named in products.items()})
        for _ in (0, 1)
    ]
    bounds = rounding_bounds(layer, call(x, g), *two)
    assert [b.pass_ for b in bounds] == ["forward", "input gradient", "weight gradient"]
    assert all(b.share <= 1 for b in bounds)
    if positive:
        wrong = Passes({p: {n: (1 + 1e-4) * t for n, t in d.items()} for p, d in two[1].tensors.items()})
        assert all(b.share > 1 for b in rounding_bounds(layer, call(x, g), two[0], wrong))


def test_the_share_is_that_of_the_closed_form():
    layer, x, g, _ = setting(0, 4, 7, 3)
    own = run(layer, call(x, g), "float32", evaluate=False)
    moved = {p: {n: t + 1e-6 for n, t in own.tensors[p].items()} for p in own.tensors}
    found = {b.pass_: b for b in rounding_bounds(layer, call(x, g), own, Passes(moved))}
    w, b, x, g = (t.detach().double().abs() for t in (layer.weight, layer.bias, x, g))
    for pass_, terms, sums in [
        ("forward", 8, x @ w.T + b),
        ("input gradient", 3, g @ w),
        ("weight gradient", 4, torch.cat([(g.T @ x).flatten(), g.sum(0)])),
    ]:
        gamma = terms * U / (1 - terms * U)
        assert found[pass_].terms == terms
        assert found[pass_].share == pytest.approx(1e-6 / (2 * gamma * float(sums.min())), rel=1e-6)
        assert 2.0 ** -found[pass_].bits == pytest.approx(1e-6 / float(sums.min()), rel=1e-6)


LAYERS = {
    nn.Linear: (nn.Linear(4, 3), (2, 4), 5, 3, 2),
    nn.Conv1d: (nn.Conv1d(4, 6, 3, groups=2, bias=False), (2, 4, 9), 6, 9, 14),
    nn.Conv2d: (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 6), 37, 54, 60),
    nn.Conv3d: (nn.Conv3d(2, 3, 2, stride=2), (2, 2, 4, 4, 4), 17, 3, 16),
    nn.ConvTranspose1d: (nn.ConvTranspose1d(4, 6, 3), (2, 4, 9), 13, 18, 22),
    nn.ConvTranspose2d: (nn.ConvTranspose2d(4, 6, 2, stride=2), (2, 4, 3, 3), 5, 24, 72),
    nn.ConvTranspose3d: (nn.ConvTranspose3d(2, 3, 2), (1, 2, 3, 3, 3), 17, 24, 64),
}


def flipped(layer):
    """The same sums over the channels from the last to the first."""
    twin = copy.deepcopy(layer)
    dim = 0 if layer.transposed else 1
    twin.weight.data.copy_(layer.weight.flip(dim))
    return twin


@pytest.mark.parametrize("kind", SUMS_OF_PRODUCTS)
def test_every_sum_of_products_has_its_longest_sum_and_keeps_its_bound(kind):
    layer, shape, *terms = LAYERS[kind]
    x = torch.rand(shape, generator=torch.Generator().manual_seed(0)) + 0.1
    g = torch.rand(layer(x).shape, generator=torch.Generator().manual_seed(1)) + 0.1
    own = run(layer, call(x, g), "float32", evaluate=False)
    exact = run(layer, call(x, g), "float64", evaluate=False)
    bounds = rounding_bounds(layer, call(x, g), own, exact)
    assert [b.terms for b in bounds] == terms
    assert all(b.share <= 1 and b.bits > 20 for b in bounds)
    for pass_ in ("forward", "input gradient", "weight gradient"):
        wrong = dict(own.tensors)
        wrong[pass_] = {n: t + 1e-3 * t.abs().max() for n, t in wrong[pass_].items()}
        shares = {b.pass_: b.share for b in rounding_bounds(layer, call(x, g), own, Passes(wrong))}
        assert [p for p, share in shares.items() if share > 1] == [pass_]


@pytest.mark.parametrize("groups", [1, 2])
def test_channels_summed_the_other_way_round_stay_within(groups):
    layer = nn.Conv2d(8, 4, 3, groups=groups, bias=False)
    x, g = torch.randn(2, 8, 6, 6), torch.randn(2, 4, 4, 4)
    by_group = x.unflatten(1, (groups, -1)).flip(2).flatten(1, 2)
    own = run(layer, call(x, g), "float32", evaluate=False)
    other = run(flipped(layer), call(by_group, g), "float32", evaluate=False)
    (forward,) = [b for b in rounding_bounds(layer, call(x, g), own, other) if b.pass_ == "forward"]
    assert forward.share <= 1
    assert forward.bits > 18


def test_equal_results_agree_in_all_bits_and_one_rounding_leaves_24():
    layer, x, g, _ = setting(3, 5, 1, 4)
    layer.bias.data.zero_()
    own = run(layer, call(x, g), "float32", evaluate=False)
    assert {(b.share, b.bits) for b in rounding_bounds(layer, call(x, g), own, own)} == {(0.0, 53.0)}
    exact = run(layer, call(x, g), "float64", evaluate=False)
    forward = rounding_bounds(layer, call(x, g), own, exact)[0]
    assert 24 <= forward.bits < 26


def test_tensors_that_only_one_has_are_left_out():
    layer, x, g, _ = setting(4, 3, 2, 2)
    own = run(layer, call(x, g), "float32", evaluate=False)
    part = Passes(own.tensors | {"input gradient": {}, "weight gradient": {}})
    assert [b.pass_ for b in rounding_bounds(layer, call(x, g), own, part)] == ["forward"]
