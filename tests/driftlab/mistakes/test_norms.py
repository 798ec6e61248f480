"""torch's norms with another mean or variance, against the same written by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import Verdict, diagnose
from driftlab.mistakes.norms import normed_otherwise
from driftlab.mistakes.torch_call import Call
from tests.driftlab.flat_port import FlatPort

torch.set_num_threads(1)
X = torch.randn(5, 6, 4, generator=torch.Generator().manual_seed(0)).double() + 0.7
W, B = torch.rand(6).double() + 0.5, torch.rand(6).double()
LAST_W, LAST_B = torch.rand(4).double() + 0.5, torch.rand(4).double()


def made(function, *args, **kwargs):
    return {words: make() for words, make in normed_otherwise(Call(function, args, kwargs), [])}


def by_hand(x, dims, mean, over):
    """Normed over ``dims``, with the mean taken away or not, and a variance over n, or n - 1."""
    centred = x - x.mean(dims, keepdim=True) if mean else x
    n = x.numel() / x.mean(dims).numel()
    return centred / (centred.square().sum(dims, keepdim=True) / (n - over) + 1e-5).sqrt()


@pytest.mark.parametrize(
    ("function", "args", "x", "dims"),
    [
        (F.layer_norm, ((4,), LAST_W, LAST_B), X, (-1,)),
        (F.group_norm, (3, W, B), X, (2, 3)),
        (F.instance_norm, (None, None, W, B), X, (2,)),
    ],
)
def test_without_the_mean_and_over_one_less(function, args, x, dims):
    words = function.__name__
    found = made(function, x, *args)
    grouped = x.unflatten(1, (3, 2)) if function is F.group_norm else x
    plain = [by_hand(grouped, dims, *how).reshape(x.shape) for how in ((False, 0), (True, 1))]
    scaled = [y * LAST_W + LAST_B if words == "layer_norm" else y * W[:, None] + B[:, None] for y in plain]
    torch.testing.assert_close(found[f"no mean taken away in `{words}`"], scaled[0])
    torch.testing.assert_close(found[f"a variance over n - 1, not n, in `{words}`"], scaled[1])


def test_channels_in_other_groups():
    found = made(F.group_norm, X, 3, W, B)
    others = {n: found[f"{n} groups in `group_norm`"] for n in (1, 2, 6)}
    assert "3 groups in `group_norm`" not in found
    for groups, given in others.items():
        torch.testing.assert_close(given, F.group_norm(X, groups, W, B))


def test_a_root_mean_square_with_the_mean_taken_away_is_a_layer_norm():
    found = made(F.rms_norm, X, (4,), LAST_W, 1e-5)["the mean taken away in `rms_norm`"]
    torch.testing.assert_close(found, F.layer_norm(X, (4,), LAST_W, None, 1e-5))


@pytest.mark.parametrize("function", [F.layer_norm, F.rms_norm])
def test_what_is_joined_is_normed_in_its_parts(function):
    options = {"bias": LAST_B} if function is F.layer_norm else {}
    found = made(function, X, (4,), LAST_W, **options, eps=1e-5)
    assert sum("parts" in words for words in found) == 2
    halves = [function(half, (2,), eps=1e-5) for half in X.chunk(2, -1)]
    expected = torch.cat(halves, -1) * LAST_W + options.get("bias", 0.0)
    torch.testing.assert_close(found[f"each of 2 parts by itself in `{function.__name__}`"], expected)


@pytest.mark.parametrize(
    ("function", "args", "axes"),
    [
        (F.layer_norm, ((4,), LAST_W, LAST_B), [(1,), (1, 2), (0, 2)]),
        (F.group_norm, (2, W, B), [(1,), (2,), (0, 2)]),
        (F.instance_norm, (None, None, W, B), [(1,), (1, 2), (0, 2)]),
        (F.batch_norm, (None, None, W, B, True), [(1,), (1, 2), (2,)]),
    ],
)
def test_over_the_axes_of_another_norm(function, args, axes):
    name = function.__name__
    found = {words: y for words, y in made(function, X, *args).items() if "axes" in words}
    assert [*found] == [f"statistics over the axes {one} in `{name}`" for one in axes]
    for own, y in zip(axes, found.values(), strict=True):
        normed = by_hand(X, own, True, 0)
        scaled = normed * LAST_W + LAST_B if name == "layer_norm" else normed * W[:, None] + B[:, None]
        torch.testing.assert_close(y, scaled)


def test_a_batch_norm_moves_its_statistics_as_it_did_and_by_stored_ones_has_no_other():
    kept = torch.zeros(6).double(), torch.ones(6).double()
    own, moved = ([t.clone() for t in kept] for _ in range(2))
    F.batch_norm(X, *own, W, B, training=True)
    _, make = next(normed_otherwise(Call(F.batch_norm, (X, *moved, W, B, True), {}), []))
    make()
    torch.testing.assert_close(moved, own)
    assert not made(F.batch_norm, X, *kept, W, B, training=False)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.enter, self.first, self.inner = nn.Linear(6, 5), nn.RMSNorm(5, 1e-5), nn.Linear(5, 5)
        self.second, self.head = nn.LayerNorm(5), nn.Linear(5, 3)

    def forward(self, x):
        return self.head(self.second(self.inner(self.first(self.enter(x)).tanh())))


class Flat(FlatPort):
    def forward(self, x):
        first = by_hand(self.linear("enter", x), (-1,), self.fault == "first", 0) * self.first_weight
        x = self.linear("inner", first.tanh())
        x = by_hand(x, (-1,), self.fault != "second", int(self.fault == "unbiased"))
        return self.linear("head", x * self.second_weight + self.second_bias)


@pytest.mark.parametrize(
    ("fault", "module", "words"),
    [
        ("first", "first", "the mean taken away in `rms_norm`"),
        ("second", "second", "no mean taken away in `layer_norm`"),
        ("unbiased", "second", "a variance over n - 1, not n, in `layer_norm`"),
    ],
)
def test_the_norm_is_named(fault, module, words):
    torch.manual_seed(1)
    batches = [(torch.randn(8, 6), torch.randint(3, (8,))) for _ in range(3)]
    found = diagnose(Net(), lambda old: Flat(old, fault), batches, loss=F.cross_entropy, steps=3)
    assert (found.verdict, found.where.module) == (Verdict.BUG, module)
    assert any(words in e.details for e in found.evidence)
