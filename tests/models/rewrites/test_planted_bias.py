"""The bug of ``edge_of_stability``: a linear layer in parts, each with the bias."""

import pytest
import torch
from torch import nn

from models.rewrites.planted_bias import split_linear_with_every_bias
from models.rewrites.swap import RewriteError


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 4), nn.ReLU(), nn.Linear(4, 2, bias=False)).double()


@pytest.mark.parametrize("parts", [1, 2, 3, 7])
def test_the_bias_counts_once_a_part_and_so_does_its_gradient(parts):
    right, wrong, x = (
        network()[0],
        split_linear_with_every_bias(network(), parts)[0],
        torch.randn(5, 7).double(),
    )
    expected = right(x) + (parts - 1) * right.bias
    torch.testing.assert_close(wrong(x), expected)
    expected.square().sum().backward()
    wrong(x).square().sum().backward()
    torch.testing.assert_close(wrong.bias.grad, right.bias.grad)
    assert torch.equal(wrong.bias, right.bias)
    torch.testing.assert_close(torch.cat([p.grad for p in wrong.parts], 1), right.weight.grad)


def test_layers_without_a_bias_stay_as_they_are():
    assert type(split_linear_with_every_bias(network(), 2)[2]) is nn.Linear


def test_what_cannot_be_split_is_refused():
    with pytest.raises(RewriteError, match="7 inputs: parts=8"):
        split_linear_with_every_bias(network(), 8)
    with pytest.raises(RewriteError, match="with a bias inside it"):
        split_linear_with_every_bias(nn.Sequential(nn.Conv2d(1, 1, 1)))
