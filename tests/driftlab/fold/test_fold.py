"""The fold: found by tags and by value, whatever a rewrite does to the tensors, and applied."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from driftlab.fold import FoldError, find_fold
from models import ResNet18
from models.rewrites.grouped_conv import as_grouped, separate_groups
from models.rewrites.split_conv import split_conv
from tests.driftlab.fold.folding import Bag, assert_folds, halves, state, without_fold


@st.composite
def changes(draw, shape):
    """A way to store a tensor of ``shape`` in pieces: tensor -> list of tensors."""
    kinds = ["same", "permute", "reshape", "split", "shuffle", "permute and split", "split twice"]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, len(shape) - 1))
    order = draw(st.permutations(range(len(shape))))
    cut = draw(st.integers(1, max(1, shape[dim] - 1)))
    sizes = [cut, shape[dim] - cut] if shape[dim] > 1 else [1]
    slices, other = draw(st.permutations(range(shape[dim]))), (dim + 1) % len(shape)
    rest = (shape[other] + 1) // 2
    return {
        "same": lambda t: [t],
        "permute": lambda t: [t.permute(order)],
        "reshape": lambda t: [t.reshape(t.shape[0], -1)],
        "split": lambda t: list(t.split(sizes, dim)),
        "shuffle": lambda t: [t.index_select(dim, torch.tensor(slices))],
        "split twice": lambda t: [p for half in t.split(sizes, dim) for p in half.split(rest, other)],
        "permute and split": lambda t: [piece.permute(order) for piece in t.split(sizes, dim)],
    }[kind]


@st.composite
def rewrites_of_bags(draw):
    """Shapes of a reference, and a rewrite of it: tensors -> tensors."""
    shapes = draw(st.lists(st.lists(st.integers(1, 5), max_size=4), min_size=1, max_size=4))
    # Below eight elements two tensors may be confused; such ones are told apart by name in other tests.
    shapes = [[*shape, 8] for shape in shapes]
    stored = [draw(changes(shape)) for shape in shapes]

    def rewrite(tensors):
        pieces = (store(t) for store, t in zip(stored, tensors.values(), strict=True))
        return {f"piece{i}_{j}": p for i, few in enumerate(pieces) for j, p in enumerate(few)}

    return shapes, rewrite


@settings(deadline=None, max_examples=60)
@given(rewrites_of_bags(), st.booleans(), st.integers(0, 2**31))
def test_finds_what_was_done(drawn, by_tags, seed):
    shapes, rewrite = drawn
    generator = torch.Generator().manual_seed(seed)
    draw = lambda: {f"t{i}": torch.randn(s, generator=generator) for i, s in enumerate(shapes)}  # noqa: E731
    initial, later = draw(), draw()
    run = lambda bag: Bag(rewrite({n: p.detach() for n, p in bag.named_parameters()}))  # noqa: E731
    fold = find_fold(Bag(initial), Bag(rewrite(initial)), run if by_tags else None)
    assert fold.origin == ("by tags" if by_tags else "by value")
    assert fold.unused == ()
    # Other values than those that it was found with: what was found is the map, not a coincidence.
    folded = fold(rewrite(later))
    assert fold.placed == tuple(folded) == tuple(later)
    assert all(torch.equal(folded[name], tensor) for name, tensor in later.items())


REWRITES = {
    "out": split_conv,
    "three": lambda model: split_conv(model, parts=3),
    "in": lambda model: split_conv(model, dim="in"),
    "grouped": as_grouped,
    "again": lambda model: split_conv(split_conv(model), dim="in"),
}


@pytest.mark.parametrize("how", ["given", "by tags", "by value"])
@pytest.mark.parametrize("rewrite", REWRITES.values(), ids=REWRITES.keys())
def test_rewrites_of_a_resnet(rewrite, how):
    reference = ResNet18(width=8)
    candidate = rewrite(copy.deepcopy(reference))
    given = candidate.fold
    if how != "given":
        del candidate.fold
    fold = find_fold(reference, candidate, (lambda m: without_fold(rewrite(m))) if how == "by tags" else None)
    assert fold.origin == how
    assert fold.unused == ()
    assert not fold.is_identity
    assert_folds(fold, candidate, reference)
    # With other values it is the given fold still: BatchNorm's ones and zeros come from the right places too.
    other = {name: torch.randn(tensor.shape) for name, tensor in state(candidate).items()}
    found, expected = fold(other), given(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_separated_groups():
    reference = ResNet18(width=8, groups=4)
    candidate = without_fold(separate_groups(copy.deepcopy(reference)))
    assert_folds(find_fold(reference, candidate), candidate, reference)


def test_model_that_is_itself_a_conv():
    reference = nn.Conv2d(4, 6, 3)
    candidate = without_fold(split_conv(copy.deepcopy(reference), dim="in"))
    fold = find_fold(reference, candidate)
    assert_folds(fold, candidate, reference)


def test_the_same_network_is_the_identity():
    reference = ResNet18(width=4)
    fold = find_fold(reference, copy.deepcopy(reference))
    assert fold.is_identity
    assert fold.notes == fold.unused == fold.unplaced == ()
    assert_folds(fold, copy.deepcopy(reference), reference)


def test_folds_what_is_at_hand():
    fold = find_fold(*halves())
    assert fold({}) == {}
    assert fold({"bias": torch.ones(4)}).keys() == {"0.bias"}
    (weight,) = fold({"second": torch.ones(2, 3)}).values()
    assert weight.tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1], [1, 1, 1]]
    assert fold({"unknown": torch.ones(1)}) == {}


def test_refuses_tensors_of_another_shape():
    fold = find_fold(*halves())
    with pytest.raises(FoldError, match=r"second is \[3, 2\], but \[2, 3\] in the candidate"):
        fold({"second": torch.ones(3, 2)})


def test_folds_without_a_graph_and_keeps_views():
    reference = nn.Linear(3, 4)
    candidate = Bag({"kernel": reference.weight.detach().t().contiguous(), "bias": reference.bias.detach()})
    folded = find_fold(reference, candidate)(dict(candidate.named_parameters()))
    assert not folded["weight"].requires_grad
    assert folded["weight"].data_ptr() == candidate.kernel.data_ptr()


def test_reads_tensors_with_gaps():
    fused = torch.randn(8)
    reference, candidate = Bag({"a": fused[:4], "b": fused[4:]}), Bag({"fused": fused})
    gaps = {"fused": torch.stack([fused, torch.zeros(8)], dim=1)[:, 0]}
    folded = find_fold(reference, candidate)(gaps)
    assert torch.equal(folded["a"], fused[:4])
    assert torch.equal(folded["b"], fused[4:])


def test_survives_copy_and_pickle():
    reference = nn.Conv2d(3, 16, 3)
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate.weight.copy_(candidate.weight[torch.randperm(16)])
    fold = find_fold(reference, candidate)
    assert_folds(copy.deepcopy(fold), candidate, reference)
    assert_folds(pickle.loads(pickle.dumps(fold)), candidate, reference)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_follows_the_tensors_to_the_device():
    reference = nn.Conv2d(3, 16, 3)
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate.weight.copy_(candidate.weight[torch.randperm(16)])
    for fold in (find_fold(reference, candidate), find_fold(reference.cuda(), candidate.cuda())):
        assert_folds(fold, candidate.cuda(), reference.cuda())
