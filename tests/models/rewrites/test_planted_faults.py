"""Each planted fault is wrong in the pass it says, by as much, and right to the bit in all others."""

import copy

import pytest
import torch
from torch import nn

from models.rewrites.planted_faults import (
    batch_norm_with_other_eps,
    split_with_frozen_half,
    split_with_scaled_gradient,
    split_with_swapped_halves,
)
from models.rewrites.split_conv import split_conv
from models.rewrites.swap import RewriteError

HALF = 3  # of the output channels
SPLITS = (split_with_frozen_half, split_with_scaled_gradient, split_with_swapped_halves)


def passes(conv, rewrite):
    """Output, input gradient and folded weight gradient of integers: exact in any order."""
    generator = torch.Generator().manual_seed(1)

    def integers(*shape):
        return torch.randint(-3, 4, shape, generator=generator).double()

    network = rewrite(copy.deepcopy(conv))
    x = integers(2, conv.in_channels, 5, 5).requires_grad_()
    output = network(x)
    output.backward(integers(*output.shape))
    gradients = {n: p.grad for n, p in network.named_parameters() if p.grad is not None}
    return {"output": output.detach(), "input": x.grad} | network.fold(gradients)


@pytest.fixture(params=[{}, {"groups": 2}, {"bias": False, "stride": 2, "padding": 1}], ids=str)
def conv(request):
    conv = nn.Conv2d(4, 2 * HALF, 3, dtype=torch.float64, **request.param)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in conv.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    return conv


def assert_equal_but(right, wrong, *names):
    assert right.keys() == wrong.keys()
    assert {n for n in right if not torch.equal(right[n], wrong[n])} == set(names)


def test_scaled_gradient_is_off_in_the_second_half_of_the_weight_gradient_alone(conv):
    right, wrong = (passes(conv, r) for r in (_right_split, split_with_scaled_gradient))
    assert_equal_but(right, wrong, "weight")
    assert torch.equal(wrong["weight"][:HALF], right["weight"][:HALF])
    torch.testing.assert_close(wrong["weight"][HALF:], 1.001 * right["weight"][HALF:], rtol=1e-15, atol=0)


def test_frozen_half_gets_no_gradient_and_passes_one_on(conv):
    right, wrong = (passes(conv, r) for r in (_right_split, split_with_frozen_half))
    assert_equal_but(right, wrong, *(n for n in ("weight", "bias") if n in right))
    for name in right.keys() - {"output", "input"}:
        assert torch.equal(wrong[name][:HALF], right[name][:HALF])
        assert not wrong[name][HALF:].any()


def test_swapped_halves_have_the_right_channels_in_the_wrong_places(conv):
    right, wrong = (passes(conv, r)["output"] for r in (_right_split, split_with_swapped_halves))
    assert torch.equal(wrong, torch.cat([right[:, HALF:], right[:, :HALF]], dim=1))
    assert not torch.equal(wrong, right)


def _right_split(model):
    return split_conv(model, sizes=[HALF, HALF])


@pytest.mark.parametrize("rewrite", SPLITS)
def test_the_fold_gives_back_the_weights(conv, rewrite):
    network = rewrite(copy.deepcopy(conv))
    folded = network.fold(network.state_dict())
    assert folded.keys() == conv.state_dict().keys()
    assert all(torch.equal(folded[n], t) for n, t in conv.state_dict().items())


@pytest.mark.parametrize("rewrite", SPLITS)
def test_only_matching_convs_change_and_one_channel_is_refused(rewrite):
    network = rewrite(nn.Sequential(nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, 1)), match="1")
    assert type(network[0]) is nn.Conv2d
    assert len(network[1].parts) == 2
    with pytest.raises(RewriteError, match=f"{rewrite.__name__}: .* has 1 output channel"):
        rewrite(nn.Conv2d(2, 1, 1))


def test_eps_is_that_of_the_matching_norms():
    network = nn.Sequential(nn.BatchNorm2d(2), nn.ReLU(), nn.BatchNorm2d(2))
    norm = batch_norm_with_other_eps(network, match="2")[2].double()
    x = torch.randn(4, 2, 3, 3, dtype=torch.float64)
    variance, mean = torch.var_mean(x, dim=(0, 2, 3), correction=0, keepdim=True)
    torch.testing.assert_close(norm(x), (x - mean) / (variance + 1e-3).sqrt(), rtol=1e-12, atol=1e-12)
    assert network[0].eps == 1e-5
    batch_norm_with_other_eps(network, eps=0.5)
    assert network[0].eps == network[2].eps == 0.5


@pytest.mark.parametrize("network", [nn.Linear(1, 1), nn.BatchNorm2d(1)])
def test_eps_of_no_norm_is_refused(network):
    with pytest.raises(RewriteError, match=r"match='x' names no nn\.BatchNorm2d"):
        batch_norm_with_other_eps(network, match="x")
