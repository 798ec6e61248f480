"""What an accusation says besides: which element, how many, and what would make such a difference."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import assert_equivalent
from driftlab.mistakes.explanations import spelled

torch.set_num_threads(1)


class Own(nn.Module):
    """``forward(layer, x)`` of the same layer each time."""

    def __init__(self, layer, forward):
        super().__init__()
        self.layer, self.of = copy.deepcopy(layer), forward

    def forward(self, x):
        return self.of(self.layer, x)


torch.manual_seed(0)
SQUARE, WIDE, CONV = nn.Linear(6, 6), nn.Linear(6, 24), nn.Conv2d(4, 6, 3, padding=1)
ROWS, IMAGES = torch.randn(8, 5, 6), torch.randn(8, 4, 5, 7)
attention = F.scaled_dot_product_attention


def apply(layer, x):
    return layer(x)


def gelu(**options):
    return lambda layer, x: F.gelu(layer(x), **options)


def written_gelu(layer, x):
    h = layer(x)
    return 0.5 * h * (1 + torch.erf(h / math.sqrt(2)))


def norm(eps, inside=True):
    def forward(_, x):
        x, var = x - x.mean(-1, keepdim=True), x.var(-1, correction=0, keepdim=True)
        return x * torch.rsqrt(var + eps) if inside else x / (var.sqrt() + eps)

    return forward


def attended(function):
    return lambda layer, x: function(*layer(x).chunk(3, -1))


def masked(diagonal, scale=8**-0.5):
    def attend(q, k, v):
        allowed = torch.ones(5, 5).tril(diagonal) > 0
        return (q @ k.mT * scale).masked_fill(~allowed, -1e9).softmax(-1) @ v

    return attended(attend)


def half_detached(layer, x):
    x = torch.cat([x[:, :2], x[:, 2:].detach()], 1)
    return layer(x)


CAUSAL = attended(lambda q, k, v: attention(q, k, v, is_causal=True))
FITS = {
    "a factor": (SQUARE, ROWS, apply, lambda f, x: f(x) / 8, "a factor of 1/8 (the batch's size is 8)"),
    "a root": (SQUARE, ROWS, apply, lambda f, x: f(x) * 5**0.5, "a factor of sqrt(5)"),
    "a sign": (SQUARE, ROWS, apply, lambda f, x: -f(x), "a factor of -1"),
    "zeros": (SQUARE, ROWS, apply, lambda f, x: f(x) * 0, "zeros in its place"),
    "added": (SQUARE, ROWS, apply, lambda f, x: f(x) + 3, "+3 added to every element"),
    "no bias": (SQUARE, ROWS, apply, lambda f, x: F.linear(x, f.weight) + 0 * f.bias, "a bias left out"),
    "channels": (
        *(SQUARE, ROWS, apply, lambda f, x: f(x)[..., [1, 2, 0, 3, 5, 4]]),
        "dimension 2 in the order 1, 2, 0, 3, 5, 4",
    ),
    "transposed": (
        *(SQUARE, ROWS, apply, lambda f, x: F.linear(x, f.weight.T, f.bias)),
        "a transposed weight",
    ),
    "shifted": (
        *(SQUARE, ROWS, apply, lambda f, x: F.pad(f(x)[:, :-1], (0, 0, 1, 0))),
        "the same one position later along dimension 1",
    ),
    "detached": (CONV, IMAGES, apply, half_detached, "zeros in place of 50 % of its elements"),
    "turned": (
        *(CONV, IMAGES, apply, lambda f, x: F.conv2d(x, f.weight.flip(2, 3), f.bias, padding=1)),
        "a kernel turned round",
    ),
    "tanh": (SQUARE, ROWS, gelu(), gelu(approximate="tanh"), "gelu's tanh form would"),
    "exact": (SQUARE, ROWS, gelu(approximate="tanh"), gelu(), "gelu would do that"),
    "relu": (SQUARE, ROWS, gelu(), lambda f, x: F.relu(f(x)), "ReLU would do that"),
    "erf": (SQUARE, ROWS, written_gelu, gelu(approximate="tanh"), "gelu's tanh form, in place of erf,"),
    "eps": (SQUARE, ROWS, norm(1e-5), norm(1e-6), "an epsilon of 1e-06"),
    "outside": (SQUARE, ROWS, norm(1e-5), norm(1e-5, inside=False), "the other side of the root"),
    "inside": (SQUARE, ROWS, norm(1e-5, inside=False), norm(1e-5), "the other side of the root"),
    "no mask": (WIDE, ROWS, CAUSAL, attended(attention), "no causal mask"),
    "late mask": (WIDE, ROWS, CAUSAL, masked(1), "a mask one position later"),
    "written mask": (WIDE, ROWS, masked(0), masked(1), "a mask one position later"),
    "no scale": (WIDE, ROWS, CAUSAL, masked(0, 1.0), "not divided by sqrt(d)"),
    "written scale": (WIDE, ROWS, masked(0), masked(0, 1.0), "a constant factor left out"),
    "one of two": (
        *(SQUARE, ROWS, lambda f, x: F.gelu(f(F.gelu(f(x))))),
        *(lambda f, x: F.gelu(f(F.gelu(f(x))), approximate="tanh"), "gelu's tanh form in call 2 of 2"),
    ),
}


def said(reference, candidate, inputs):
    with pytest.raises(AssertionError) as caught:
        assert_equivalent(reference, candidate, inputs)
    return str(caught.value)


@pytest.mark.parametrize("name", FITS)
def test_a_known_explanation_is_said_with_what_it_leaves(name):
    layer, inputs, mine, theirs, words = FITS[name]
    message = said(Own(layer, mine), Own(layer, theirs), inputs)
    assert words in message
    assert "of the difference is left" in message
    left = message.split("would do that: ")[1].split(" ")[0]
    assert left == "nothing" or float(left) < 1e-9


LAYERS = {
    "layer_norm": (nn.LayerNorm(6), nn.LayerNorm(6, eps=1e-6), ROWS, "an epsilon of 1e-06"),
    "rms_norm": (nn.RMSNorm(6), nn.RMSNorm(6, eps=1e-6), ROWS, "an epsilon of 1e-06"),
    "no epsilon": (nn.RMSNorm(6, eps=0.0), nn.RMSNorm(6, eps=2**-23), ROWS, "an epsilon of 1.19e-07"),
    "group_norm": (nn.GroupNorm(2, 4), nn.GroupNorm(2, 4, eps=1e-6), IMAGES, "an epsilon of 1e-06"),
    "batch_norm": (nn.BatchNorm2d(4), nn.BatchNorm2d(4, eps=1e-3), IMAGES, "an epsilon of 0.001"),
    "momentum": (nn.BatchNorm2d(4), nn.BatchNorm2d(4, momentum=0.9), IMAGES, "a momentum of 1 - m"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_setting_of_a_layer_is_tried_in_the_reference(name):
    mine, theirs, inputs, words = LAYERS[name]
    assert words in said(mine, theirs, inputs)


UNKNOWN = {
    "another term": lambda f, x: f(x) + x.sin(),
    "two factors": lambda f, x: f(x) * torch.linspace(1, 2, 6),
    "nearly a factor": lambda f, x: f(x) / 8 + 1e-6 * x,
    "another gelu": lambda f, x: F.gelu(f(x)) * 1.01,
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_nothing_is_said_where_nothing_fits_to_rounding(name):
    message = said(Own(SQUARE, apply), Own(SQUARE, UNKNOWN[name]), ROWS)
    assert "would do that" not in message
    assert "elements" in message


def test_the_worst_element_and_how_many_exceed():
    def spoiled(layer, x):
        out = layer(x)
        return out + 0.25 * F.one_hot(torch.tensor(4), 6) * F.one_hot(torch.tensor(1), 5)[:, None]

    message = said(Own(SQUARE, apply), Own(SQUARE, spoiled), ROWS[:1])
    right = float(SQUARE(ROWS[0, 1]).detach()[4])
    assert "1 of 30 elements (3.33 %) exceed what rounding may make of one" in message
    assert f"the worst, at (0, 1, 4), is {right + 0.25:.4g}"[:-1] in message
    shapes = said(Own(SQUARE, apply), Own(SQUARE, lambda f, x: f(x)[:, :1]), ROWS)
    assert "its shape is [8, 1, 6], not [8, 5, 6]" in shapes


class Foreign(torch.autograd.Function):
    """A kernel that shadow execution cannot follow: it goes by numpy."""

    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(x.detach().numpy() * 2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Table(nn.Module):
    """Sends sparse gradients to its table, part of them by way of ``handed``."""

    def __init__(self, handed):
        super().__init__()
        torch.manual_seed(0)
        self.table, self.layer, self.handed = nn.Embedding(9, 6, sparse=True), nn.Linear(6, 6), handed

    def forward(self, x):
        h = self.table(x).mean(1)
        return Foreign.apply(h + self.layer(self.handed(h)))


def test_a_stop_is_told_of_gradients_that_come_sparse():
    tokens = torch.randint(9, (5, 7), generator=torch.Generator().manual_seed(0))
    message = said(Table(lambda h: h), Table(torch.detach), tokens)
    assert "detached there, would do that" in message


class Sequence(nn.Module):
    """A language model that makes its own loss of its labels, ``by`` positions on."""

    def __init__(self, by):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head, self.by = nn.Embedding(9, 6), nn.Linear(6, 9), by

    def forward(self, tokens, labels):
        logits = self.head(F.silu(self.embedding(tokens)))
        loss = F.cross_entropy(logits[:, : -self.by].flatten(0, 1), labels[:, self.by :].flatten())
        return {"loss": loss, "logits": logits}


def test_labels_that_are_shifted_twice():
    tokens = torch.randint(9, (3, 7), generator=torch.Generator().manual_seed(0))
    message = said(Sequence(1), Sequence(2), {"tokens": tokens, "labels": tokens})
    assert "(loss)" in message
    assert "labels shifted once more would do that" in message


@pytest.mark.parametrize(
    ("number", "text"),
    [(8, "8"), (0.125, "1/8"), (-1, "-1"), (2**0.5, "sqrt(2)"), (31 / 32, "31/32"), (8**-0.5, "1/sqrt(8)")],
)
def test_numbers_are_spelled_as_people_write_them(number, text):
    assert spelled(number) == text
    assert spelled(number * (1 + 1e-6)) is None
