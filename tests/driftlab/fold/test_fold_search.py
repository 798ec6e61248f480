"""The fold from values alone, and what it says where they do not suffice."""

import copy

import pytest
import torch
from torch import nn

from driftlab.fold import find_fold
from models import ResNet18
from models.rewrites.split_conv import split_conv
from tests.driftlab.fold.folding import Bag, assert_folds, state, without_fold


def test_renamed_tensors_keep_their_place_though_batchnorms_look_alike():
    reference = ResNet18(width=4)
    candidate = nn.ModuleDict({"backbone": copy.deepcopy(reference)})
    fold = find_fold(reference, candidate)
    assert not fold.is_identity
    with torch.no_grad():
        for tensor in state(candidate).values():
            tensor.copy_(torch.randint(1000, tensor.shape))
    folded = fold(state(candidate))
    assert all(folded[name] is not None for name in state(reference))
    assert all(torch.equal(folded[n.removeprefix("backbone.")], t) for n, t in state(candidate).items())


def test_batchnorms_behind_split_convs_keep_their_place_under_other_names():
    reference = ResNet18(width=4)
    split = split_conv(copy.deepcopy(reference), parts=3)
    expected = split.fold
    candidate = nn.ModuleDict({"backbone": without_fold(split)})
    values = {name: torch.randn(tensor.shape) for name, tensor in state(candidate).items()}
    folded = find_fold(reference, candidate)(values)
    expected = expected({name.removeprefix("backbone."): value for name, value in values.items()})
    assert folded.keys() == expected.keys()
    assert all(torch.equal(folded[name], value) for name, value in expected.items())


def test_halves_with_their_dimensions_permuted():
    reference = nn.Conv2d(4, 8, 3, bias=False)
    halves = reference.weight.detach().split(4)
    candidate = Bag({f"half{i}": half.permute(2, 3, 1, 0) for i, half in enumerate(halves)})
    assert_folds(find_fold(reference, candidate), candidate, reference)


def test_equal_numbers_are_not_told_apart_by_guessing():
    reference = Bag({"mine": torch.tensor([0.0, 0.0, 0.5, 0.7])})
    fold = find_fold(reference, Bag({"theirs": torch.tensor([0.5, 0.0, 0.7, 0.0])}))
    assert fold.unplaced == ("mine",)
    assert fold.unused == ("theirs",)


def test_no_element_serves_twice():
    square = torch.randn(8, 8)
    reference = Bag({"row_and_column": torch.stack([square[0], square[:, 0]])})
    assert find_fold(reference, Bag({"square": square})).unplaced == ("row_and_column",)


def test_a_constant_parameter_is_no_buffer():
    reference, candidate = Bag({"offset": torch.zeros(4)}), nn.Module()
    candidate.register_buffer("mean", torch.zeros(4))
    assert find_fold(reference, candidate).unplaced == ("offset",)


def test_channels_in_another_order():
    reference = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3))
    candidate, order = copy.deepcopy(reference), torch.randperm(16)
    with torch.no_grad():
        candidate[0].weight.copy_(candidate[0].weight[order])
        candidate[0].bias.copy_(candidate[0].bias[order])
        candidate[2].weight.copy_(candidate[2].weight[:, order])
    assert_folds(find_fold(reference, candidate), candidate, reference)


def test_reordered_channels_leave_constants_a_guess_and_say_so():
    reference = nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16))
    candidate = copy.deepcopy(reference)
    with torch.no_grad():
        candidate[0].weight.copy_(candidate[0].weight.flip(0))
    (note,) = find_fold(reference, candidate).notes
    assert "order" in note
    assert "1.weight" in note


def test_a_1x1_conv_as_a_transposed_linear():
    reference, candidate = nn.Conv2d(8, 6, 1), Bag({})
    candidate.kernel = nn.Parameter(reference.weight.detach().flatten(1).t().contiguous())
    candidate.offset = nn.Parameter(reference.bias.detach().clone())
    assert_folds(find_fold(reference, candidate), candidate, reference)


class Attention(nn.Module):
    """Three projections, and their biases zero as after nn.MultiheadAttention's initialisation."""

    def __init__(self, width, zero_bias=True):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in "qkv")
        for projection in (self.q, self.k, self.v) if zero_bias else ():
            nn.init.zeros_(projection.bias)


class Fused(nn.Module):
    def __init__(self, separate, transposed=False):
        super().__init__()
        weight = torch.cat([p.weight.detach() for p in (separate.q, separate.k, separate.v)])
        self.in_proj_weight = nn.Parameter(weight.t().contiguous() if transposed else weight)
        self.in_proj_bias = nn.Parameter(
            torch.cat([p.bias.detach() for p in (separate.q, separate.k, separate.v)])
        )


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("zero_bias", [False, True])
@pytest.mark.parametrize("fused_first", [False, True])
def test_fused_projections(transposed, zero_bias, fused_first):
    separate = Attention(8, zero_bias)
    fused = Fused(separate, transposed)
    reference, candidate = (fused, separate) if fused_first else (separate, fused)
    fold = find_fold(reference, candidate)
    assert_folds(fold, candidate, reference)
    # Where zero biases come from shows only once they differ.
    numbers = torch.arange(24.0)
    with torch.no_grad():
        fused.in_proj_bias.copy_(numbers)
        for projection, own in zip((separate.q, separate.k, separate.v), numbers.split(8), strict=True):
            projection.bias.copy_(own)
    assert_folds(fold, candidate, reference)


def test_cloned_layers_are_told_apart_by_their_order():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 3, enable_nested_tensor=False)
    candidate = nn.ModuleDict({"body": copy.deepcopy(encoder)})
    fold = find_fold(encoder, candidate)
    with torch.no_grad():
        for number, parameter in enumerate(candidate.parameters()):
            parameter.fill_(number)
    folded = fold(dict(candidate.named_parameters()))
    assert [int(folded[n].flatten()[0]) for n, _ in encoder.named_parameters()] == list(range(len(folded)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_another_dtype(dtype):
    reference = ResNet18(width=4)
    candidate = without_fold(split_conv(copy.deepcopy(reference))).to(dtype)
    fold = find_fold(reference, candidate)
    assert fold.unplaced == fold.unused == ()
    folded = fold(state(candidate))
    assert all(torch.equal(folded[n], t.to(folded[n].dtype)) for n, t in state(reference).items())


def test_reinitialised_is_placed_by_name_and_says_so():
    reference, candidate = ResNet18(width=4), ResNet18(width=4)
    fold = find_fold(reference, candidate)
    assert fold.origin == "by name"
    assert fold.is_identity
    assert fold.notes == (
        "placed by name only, for the values differ: conv1.weight, layer1.0.conv1.weight, "
        "layer1.0.conv2.weight, layer1.1.conv1.weight, layer1.1.conv2.weight and 17 more",
    )


def test_what_cannot_be_placed_and_what_is_not_used():
    reference = nn.ModuleDict({"shared": nn.Linear(4, 4), "gone": nn.Linear(3, 5)})
    candidate = nn.ModuleDict({"shared": copy.deepcopy(reference["shared"]), "new": nn.Linear(2, 7)})
    fold = find_fold(reference, candidate)
    assert fold.placed == ("shared.weight", "shared.bias")
    assert fold.unplaced == ("gone.weight", "gone.bias")
    assert fold.unused == ("new.weight", "new.bias")
    assert not fold.is_identity


def test_says_what_is_used_in_part_only():
    candidate = nn.Linear(4, 6, bias=False)
    reference = Bag({"kernel": candidate.weight.detach()[:4]})
    fold = find_fold(reference, candidate)
    assert fold.notes == ("weight [6, 4]: 8 of its elements are taken for nothing",)


def test_a_constant_keeps_its_name_whatever_its_value_became():
    reference = nn.ModuleDict({"a": nn.BatchNorm1d(4)})
    candidate = nn.ModuleDict({"a": nn.BatchNorm1d(4), "extra": nn.BatchNorm1d(4)})
    nn.init.constant_(candidate["a"].weight, 0.5)
    fold = find_fold(reference, candidate)
    assert fold({"a.weight": torch.arange(4.0)}).keys() == {"a.weight"}


class Tied(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.encoder, self.decoder = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
        with torch.no_grad():
            self.decoder.weight.copy_(self.encoder.weight)
        if tied:
            self.decoder.weight = self.encoder.weight


@pytest.mark.parametrize("tied", [True, False])
def test_weights_shared_on_one_side_only(tied):
    reference = Tied(tied)
    candidate = copy.deepcopy(Tied(not tied))
    with torch.no_grad():
        candidate.encoder.weight.copy_(reference.encoder.weight)
        candidate.decoder.weight.copy_(reference.decoder.weight)
    fold = find_fold(reference, candidate)
    sides = ("reference", "candidate") if tied else ("candidate", "reference")
    note = "decoder.weight is tied to encoder.weight in the {} but separate in the {}"
    assert fold.notes == (note.format(*sides),)
    assert fold.unused == (("decoder.weight",) if tied else ())
    assert_folds(fold, candidate, reference)


def test_weights_shared_on_both_sides():
    reference = Tied(True)
    fold = find_fold(reference, copy.deepcopy(reference))
    assert fold.notes == ()
    assert fold.placed == ("encoder.weight",)
    assert fold.is_identity
