"""Integers through a module and its rewrite: exact or not, and how many bits a kernel keeps."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.arithmetic.integers import IntegerPair, operand_bits
from driftlab.arithmetic.passes import Recorded
from driftlab.fold import FoldError
from tests.driftlab.arithmetic.layers import Halves, Scaled, joined, plain


class Linear(nn.Linear):
    def __init__(self, *sizes, cut=plain, on_input=plain, on_weight=plain, on_result=plain):
        super().__init__(*sizes)
        self.cut, self.on_input, self.on_weight, self.on_result = cut, on_input, on_weight, on_result

    def forward(self, x):
        x, w = self.on_input(x), self.on_weight(self.weight)
        return self.on_result(F.linear(self.cut(x), self.cut(w), self.bias))


class Conv(nn.Conv2d):
    def __init__(self, *sizes, cut=plain, **options):
        super().__init__(*sizes, **options)
        self.cut = cut

    def forward(self, x):
        return F.conv2d(
            self.cut(x),
            self.cut(self.weight),
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
        )


def call(module, *shape):
    """What a module is recorded to have been given in training."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).requires_grad_()
    return Recorded((x,), gradients={"": torch.randn(module(x).shape, generator=generator)})


def pair(mine, theirs, fold=dict):
    return IntegerPair(mine, theirs, fold, ("", ""))


def asked(mine, theirs, given, fold=dict):
    both = pair(mine, theirs, fold)
    both.set_weights(both.small)
    return both.exactness(both.inputs(given, both.small))


def tf32(x):
    """The upper 11 bits of float32's 24, with the gradient of all of them."""
    if x.dtype != torch.float32:
        return x
    cut = (x.detach().contiguous().view(torch.int32) & -8192).view(torch.float32)
    return x + (cut - x).detach()


CUTS = {
    "bfloat16": (lambda x: x.bfloat16().to(x.dtype), 8),
    "float16": (lambda x: x.half().to(x.dtype), 11),
    "TF32": (tf32, 11),
    "float32": (plain, 20),
}


@pytest.mark.parametrize(
    "make",
    [lambda cut: Linear(12, 5, cut=cut), lambda cut: Conv(4, 6, 3, cut=cut)],
    ids=["linear", "conv"],
)
@pytest.mark.parametrize("name", CUTS)
def test_the_bits_that_a_kernel_keeps_of_its_operands_are_counted(name, make):
    cut, bits = CUTS[name]
    mine, theirs = make(plain), make(cut)
    given = call(mine, 4, 12) if isinstance(mine, nn.Linear) else call(mine, 2, 4, 9, 9)
    assert operand_bits(pair(mine, theirs), given) == bits


@pytest.mark.parametrize("operand", ["on_input", "on_weight"])
def test_the_narrower_operand_counts(operand):
    mine, theirs = Linear(12, 5), Linear(12, 5, **{operand: CUTS["bfloat16"][0]})
    assert operand_bits(pair(mine, theirs), call(mine, 4, 12)) == 8


def reordered(x):
    return x.flip(1)


RIGHT = {
    "a copy": lambda: (Linear(12, 5), Linear(12, 5), (4, 12)),
    "another order of the sum": lambda: (
        Linear(12, 5),
        Linear(12, 5, on_input=reordered, on_weight=reordered),
        (4, 12),
    ),
    "bfloat16": lambda: (Linear(12, 5), Linear(12, 5, cut=CUTS["bfloat16"][0]), (4, 12)),
    "a factor of four and its inverse": lambda: (
        Linear(12, 5),
        Linear(12, 5, on_input=lambda x: x / 4, on_weight=lambda w: w * 4),
        (4, 12),
    ),
    "a strided conv": lambda: (
        Conv(4, 6, 3, stride=2, groups=2),
        Conv(4, 6, 3, stride=2, groups=2),
        (2, 4, 9, 8),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_rewrite_gives_the_same_integers_in_every_pass(name):
    mine, theirs, shape = RIGHT[name]()
    assert asked(mine, theirs, call(mine, *shape)) == ()


WRONG = {
    "forward": ({"on_result": lambda y: torch.cat([y[:, :-1], y[:, -1:] + 1], 1)}, ("forward",)),
    "input gradient": ({"on_input": Scaled.apply}, ("input gradient",)),
    "weight gradient": ({"on_weight": Scaled.apply}, ("weight gradient",)),
    "a factor": ({"on_result": lambda y: 1.5 * y}, ("forward", "input gradient", "weight gradient")),
    "a smallest factor": ({"on_result": lambda y: y * (1 + 2**-23)}, ("forward",)),
}


@pytest.mark.parametrize("name", WRONG)
def test_the_passes_that_are_off_are_named(name):
    options, passes = WRONG[name]
    mine, theirs = Linear(12, 5), Linear(12, 5, **options)
    found = asked(mine, theirs, call(mine, 4, 12))
    assert set(passes) <= set(found)
    assert "forward" in passes or "forward" not in found


@pytest.mark.parametrize("make", [lambda: nn.LayerNorm(7), lambda: nn.Sequential(nn.Linear(7, 3), nn.Tanh())])
def test_what_is_not_exact_in_integers_itself_is_not_asked(make):
    mine = make()
    given = call(mine, 4, 7)
    assert asked(mine, copy.deepcopy(mine), given) is None
    assert operand_bits(pair(mine, copy.deepcopy(mine)), given) == 0


def test_both_get_the_same_integers_through_the_fold_and_the_originals_keep_their_weights():
    mine = nn.Linear(12, 5)
    theirs, fold = Halves(mine), joined()
    before = mine.weight.detach().clone()
    both = pair(mine, theirs, fold)
    both.set_weights(both.small)
    folded = fold(dict(both.theirs.named_parameters()))
    for name, parameter in both.mine.named_parameters():
        assert torch.equal(folded[name], parameter)
        assert torch.equal(parameter, parameter.round().clamp(-3, 3))
        assert parameter.any()
    assert torch.equal(mine.weight, before)
    assert asked(mine, theirs, call(mine, 4, 12), fold) == ()


def test_a_fold_without_a_way_back_is_refused():
    both = pair(nn.Linear(12, 5), nn.Linear(12, 5), lambda t: {n: 2 * p for n, p in t.items()})
    with pytest.raises(FoldError):
        both.set_weights(both.small)


def test_integers_that_the_module_is_given_as_indices_stay_as_they_are():
    mine = nn.Embedding(9, 4)
    given = Recorded((torch.tensor([[1, 8], [3, 0]]),), gradients={"": torch.randn(2, 2, 4)})
    both = pair(mine, copy.deepcopy(mine))
    assert torch.equal(both.inputs(given, both.small).args[0], given.args[0])
    assert asked(mine, copy.deepcopy(mine), given) == ()
