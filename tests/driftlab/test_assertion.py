"""``assert_equivalent`` in somebody's unit tests."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from driftlab import assert_equivalent

torch.set_num_threads(1)
GENERATOR = np.random.default_rng()


class Halves(nn.Module):
    def __init__(self, conv, spoil=lambda x: x):
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 3, 3, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        for part, rows in ((self.first, slice(0, 3)), (self.second, slice(3, 8))):
            part.weight.data.copy_(conv.weight.data[rows])
            part.bias.data.copy_(conv.bias.data[rows])
        self.spoil = spoil

    def forward(self, x):
        return torch.cat([self.first(x), self.second(self.spoil(x))], 1)


def conv():
    torch.manual_seed(0)
    return nn.Conv2d(4, 8, 3, padding=1)


def image():
    torch.manual_seed(1)
    return torch.randn(3, 4, 9, 8)


LAYERS = {
    "conv": (conv, image),
    "linear": (lambda: nn.Linear(7, 5), lambda: torch.randn(4, 7)),
    "batch_norm": (lambda: nn.BatchNorm2d(4), image),
    "layer_norm": (lambda: nn.LayerNorm(7), lambda: torch.randn(2, 3, 7)),
    "lstm": (lambda: nn.LSTM(5, 6, batch_first=True), lambda: torch.randn(2, 4, 5)),
    "embedding": (lambda: nn.Embedding(11, 4), lambda: torch.randint(11, (3, 5))),
    "encoder": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: torch.randn(2, 4, 8),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_equivalent_to_its_copy(name):
    make, inputs = LAYERS[name]
    layer = make()
    assert_equivalent(layer, copy.deepcopy(layer), inputs())


def test_a_right_split_passes():
    assert_equivalent(conv(), Halves(conv()), image())


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda x: x.detach(), ["not the same function", "input gradient"]),
        (lambda x: x * (1 + 1e-7), ["not the same function", "forward"]),
        (lambda x: x.half().to(x.dtype), ["fewer bits", "forward"]),
        (lambda x: x.half().to(x.dtype) if x.requires_grad else x, ["fewer bits"]),
        (lambda x: x * (1 + 1e-6 * float(GENERATOR.standard_normal())), ["would mean nothing"]),
    ],
)
def test_a_wrong_split_fails_and_says_what_where_and_by_how_much(spoil, words):
    with pytest.raises(AssertionError) as error:
        assert_equivalent(conv(), Halves(conv(), spoil), image())
    assert all(word in str(error.value) for word in words)
    assert "Measured: " in str(error.value) or "determinism" in str(error.value)


def test_the_size_at_which_it_is_wrong_need_not_be_the_one_that_was_given():
    class EvenOnly(nn.Module):
        def __init__(self, pool):
            super().__init__()
            self.pool = pool

        def forward(self, x):
            return self.pool(x.flip(2, 3)).flip(2, 3)

    with pytest.raises(AssertionError, match=r"odd sizes|samples|not equal"):
        assert_equivalent(
            nn.Sequential(nn.MaxPool2d(2)), nn.Sequential(EvenOnly(nn.MaxPool2d(2))), torch.randn(2, 3, 8, 8)
        )


class Doubled(nn.Module):
    """Holds a layer's weight times ``times``, which is taken back where it is used."""

    def __init__(self, linear, times=2.0, taken=2.0):
        super().__init__()
        self.weight, self.bias = nn.Parameter(times * linear.weight.detach()), linear.bias
        self.taken = taken

    def forward(self, x):
        return F.linear(x, self.weight / self.taken, self.bias)


def test_a_matrix_in_another_form_has_another_gradient_at_every_size_and_is_right():
    def network(rewrite):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), rewrite(nn.Linear(8, 6)), nn.Linear(6, 3))

    x = torch.randn(12, 6)
    assert_equivalent(network(lambda layer: layer), network(Doubled), x)
    with pytest.raises(AssertionError, match="the forward of 2"):
        assert_equivalent(network(lambda layer: layer), network(lambda layer: Doubled(layer, taken=1.9)), x)


def test_eval_mode_counts():
    class Forgetful(nn.BatchNorm2d):
        def forward(self, x):
            return (
                F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
                if not self.training
                else super().forward(x)
            )

    with pytest.raises(AssertionError, match="eval"):
        assert_equivalent(nn.BatchNorm2d(4), Forgetful(4), image())


def test_a_norm_in_eval_mode_folded_into_its_conv_passes():
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), nn.ReLU())
    reference(2 * image() + 1)
    reference.eval()

    def folded(model):
        return nn.Sequential(fuse_conv_bn_eval(model[0], model[1]), model[2]).eval()

    assert_equivalent(reference, folded, image())
    other = copy.deepcopy(reference)
    other[1].eps *= 100
    with pytest.raises(AssertionError, match="not the same function"):
        assert_equivalent(reference, folded(other), image())


@pytest.mark.parametrize("compiled", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(3, 7))])
def test_torchscript_is_copied_as_it_is(compiled):
    layer = nn.Linear(7, 5)
    assert_equivalent(layer, compiled(copy.deepcopy(layer)), torch.randn(4, 7))


def test_inputs_and_modules_are_left_as_they_were():
    layer, x = conv(), image().requires_grad_()
    before = x.detach().clone()
    assert_equivalent(layer, Halves(layer), x)
    assert x.grad is None
    assert torch.equal(x, before)
    assert all(p.grad is None for p in layer.parameters())
