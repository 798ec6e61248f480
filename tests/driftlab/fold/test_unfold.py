"""The way back from a fold: its inverse where it moves entries, refused where it computes."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab.fold import FoldError, find_fold
from driftlab.fold.unfold import Unfold, floating_tensors, put_weights
from models import ResNet18
from models.rewrites.split_conv import split_conv
from tests.driftlab.fold.folding import Bag

shapes = st.lists(st.lists(st.integers(1, 4), max_size=3), min_size=1, max_size=4)


def named(prefix, sizes, generator):
    return {f"{prefix}{i}": torch.randn(s, generator=generator) for i, s in enumerate(sizes)}


def cut(vector, sizes, prefix):
    parts = vector.split([torch.Size(s).numel() for s in sizes])
    return {f"{prefix}{i}": p.view(s) for i, (p, s) in enumerate(zip(parts, sizes, strict=True))}


def flat(tensors):
    return torch.cat([t.reshape(-1) for t in tensors.values()])


@st.composite
def moves(draw):
    """Shapes of a candidate with some entries to spare, of a reference, and a fold between them."""
    theirs = draw(shapes)
    count = sum(torch.Size(s).numel() for s in theirs)
    order = torch.tensor(draw(st.permutations(range(count))))
    mine, left = [], count - draw(st.integers(0, min(3, count - 1)))
    while left:
        size = draw(st.integers(1, left))
        rows = max(d for d in (1, 2, 3) if size % d == 0)
        mine.append([rows, size // rows])
        left -= size
    taken = order[: sum(a * b for a, b in mine)]
    return theirs, mine, taken, lambda tensors: cut(flat(tensors)[taken], mine, "mine")


@settings(deadline=None, max_examples=100)
@given(moves(), st.integers(0, 2**31))
def test_the_way_back_is_the_inverse_of_a_fold_that_moves_entries(drawn, seed):
    theirs, mine, taken, fold = drawn
    generator = torch.Generator().manual_seed(seed)
    candidate, reference = named("theirs", theirs, generator), named("mine", mine, generator)
    before = copy.deepcopy(candidate)
    unfold = Unfold(fold, candidate)
    back = unfold(reference, candidate)
    assert {n: t.shape for n, t in back.items()} == {n: t.shape for n, t in candidate.items()}
    folded = fold(back)
    assert all(torch.equal(folded[n], t) for n, t in reference.items())
    spare = torch.ones(flat(candidate).numel(), dtype=torch.bool).index_fill(0, taken, False)
    assert torch.equal(flat(back)[spare], flat(candidate)[spare])
    same = unfold(fold(candidate), candidate)
    assert all(torch.equal(same[n], t) and torch.equal(before[n], t) for n, t in candidate.items())


COMPUTING = {
    "a scale": lambda t: {"a": 2 * t["x"]},
    "a sum": lambda t: {"a": t["x"] + t["y"]},
    "a mean": lambda t: {"a": t["x"].mean(0, keepdim=True)},
    "a sign": lambda t: {"a": -t["x"]},
    "a square": lambda t: {"a": t["x"] ** 2},
    "a product": lambda t: {"a": t["x"][:1, :1] * t["y"]},
    "a magnitude": lambda t: {"a": t["x"].abs()},
    "zeros filled in": lambda t: {"a": torch.cat([t["x"], torch.zeros(2, 2)])},
    "ones filled in": lambda t: {"a": torch.cat([t["x"], torch.full((2, 2), 2.0)])},
}


@pytest.mark.parametrize("fold", COMPUTING.values(), ids=COMPUTING)
def test_a_fold_that_computes_has_no_way_back(fold):
    with pytest.raises(FoldError, match="cannot be reversed"):
        Unfold(fold, {"x": torch.ones(3, 2), "y": torch.ones(3, 2)})


def test_the_way_back_keeps_the_dtypes_of_the_candidate():
    candidate = {"x": torch.zeros(2, dtype=torch.bfloat16), "y": torch.zeros(2, dtype=torch.float64)}
    unfold = Unfold(lambda t: {"b": t["y"], "a": t["x"]}, candidate)
    back = unfold({"a": torch.tensor([1.0, 2 + 2**-20]), "b": torch.tensor([3.0, 4.0])}, candidate)
    assert back["x"].dtype == torch.bfloat16
    assert back["x"].tolist() == [1.0, 2.0]
    assert back["y"].tolist() == [3.0, 4.0]


def random_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda name, tensor: torch.randn(tensor.shape, generator=generator)


@pytest.mark.parametrize("dim", ["in", "out"])
def test_both_networks_get_the_same_weights_and_compute_the_same(dim):
    reference = ResNet18(width=4)
    candidate = split_conv(copy.deepcopy(reference), dim=dim)
    fold = find_fold(reference, candidate)
    before = reference.conv1.weight.detach().clone()
    put_weights(reference, candidate, fold, random_weights(0))
    assert not torch.equal(reference.conv1.weight, before)
    folded = fold(floating_tensors(candidate, buffers=False))
    assert all(torch.equal(folded[n], p) for n, p in reference.named_parameters())
    x = torch.randn(2, 3, 16, 16)
    torch.testing.assert_close(candidate.double()(x.double()), reference.double()(x.double()))


def test_parts_of_networks_get_weights_under_the_names_of_the_whole():
    reference, candidate = nn.Sequential(nn.Linear(3, 2)), nn.Sequential(nn.Linear(3, 2))
    fold = lambda t: {n.replace("theirs", "mine"): p for n, p in t.items()}  # noqa: E731
    names = []
    put_weights(
        reference,
        candidate,
        fold,
        lambda name, t: (names.append(name), torch.full_like(t, 7.0))[1],
        ("mine", "theirs"),
    )
    assert names == ["mine.0.weight", "mine.0.bias"]
    assert all(bool((p == 7).all()) for p in (*reference.parameters(), *candidate.parameters()))


@pytest.mark.parametrize(
    ("names", "fold"),
    [
        ("a", lambda t: {"a": t["x"]}),
        ("ab", lambda t: {"a": t["x"]}),
        ("ab", lambda t: {"a": t["x"], "b": t["x"]}),
        ("ab", lambda t: {"a": t["x"], "b": t["y"], "c": t["y"]}),
        ("ab", lambda t: {"a": t["x"], "c": t["y"]}),
        ("ab", lambda t: {"a": 2 * t["x"], "b": t["y"]}),
    ],
    ids=[
        "one to spare",
        "one is left out",
        "one is taken twice",
        "one too many",
        "another name",
        "one is scaled",
    ],
)
def test_weights_without_a_place_in_the_other_are_refused(names, fold):
    reference, candidate = (Bag({n: torch.ones(3) for n in both}) for both in (names, "xy"))
    with pytest.raises(FoldError):
        put_weights(reference, candidate, fold, random_weights(0))
    assert all(bool((p == 1).all()) for p in (*reference.parameters(), *candidate.parameters()))


def test_floating_tensors_are_the_floating_parameters_and_buffers_by_name():
    module = nn.BatchNorm1d(3)
    assert list(floating_tensors(module)) == ["weight", "bias", "running_mean", "running_var"]
    assert list(floating_tensors(module, "norm", buffers=False)) == ["norm.weight", "norm.bias"]
    assert not any(t.requires_grad for t in floating_tensors(module).values())
