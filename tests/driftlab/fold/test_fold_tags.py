"""The fold from running the rewrite once more, on serial numbers for weights."""

import copy

import torch
from torch import nn

from driftlab.fold import find_fold
from models import ResNet18
from tests.driftlab.fold.folding import assert_folds, state


def permuted_everywhere(model):
    """All channels in reverse, those of BatchNorm too, which values could not tell."""
    with torch.no_grad():
        for tensor in state(model).values():
            if tensor.dim():
                tensor.copy_(tensor.flip(0))
    return model


def test_tags_follow_constants_too():
    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    candidate = permuted_everywhere(copy.deepcopy(reference))
    fold = find_fold(reference, candidate, permuted_everywhere)
    assert fold.origin == "by tags"
    assert fold({"1.weight": torch.arange(8.0)})["1.weight"].tolist() == list(range(8))[::-1]


def test_tags_leave_everything_as_it_was():
    def noisy(model):
        torch.rand(3)
        torch.manual_seed(5)
        return model

    reference = ResNet18(width=4)
    candidate, before = copy.deepcopy(reference), copy.deepcopy(state(reference))
    random_state = torch.get_rng_state()
    find_fold(reference, candidate, noisy)
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(reference).items())
    assert all(torch.equal(tensor, before[name]) for name, tensor in state(candidate).items())


def test_a_rewrite_that_refuses_tags_is_searched_by_value():
    def picky(model):
        if model[0].weight.abs().max() > 10:
            raise RuntimeError("weights out of\nrange")
        return nn.Sequential(nn.Identity(), *model)

    reference = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    candidate = picky(copy.deepcopy(reference))
    fold = find_fold(reference, candidate, picky)
    assert fold.notes == ("the rewrite raised RuntimeError on serial numbers for weights: found by value",)
    assert_folds(fold, candidate, reference)


def test_computed_weights_stay_unplaced_and_the_rest_is_found():
    """BatchNorm folded into the conv before it, as for inference."""

    def fuse(model):
        return nn.Sequential(nn.utils.fuse_conv_bn_eval(model[0].eval(), model[1].eval()), model[2])

    reference = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 4, 3))
    reference[1].running_var.uniform_(1, 2)
    candidate = fuse(copy.deepcopy(reference))
    fold = find_fold(reference, candidate, fuse)
    assert {"2.weight", "2.bias"} <= set(fold.placed)
    assert {"1.weight", "1.running_var"} <= set(fold.unplaced)


def test_tags_that_the_candidate_does_not_bear_out_give_way_to_its_values():
    def shuffled(model):
        with torch.no_grad():
            model.weight.copy_(model.weight[torch.randperm(32)])
        return model

    reference = nn.Linear(4, 32, bias=False)
    candidate = shuffled(copy.deepcopy(reference))
    fold = find_fold(reference, candidate, shuffled)
    assert fold.origin == "by value"
    assert_folds(fold, candidate, reference)


def test_tags_hold_where_the_values_were_changed_since():
    def transposed(model):
        model.weight = nn.Parameter(model.weight.detach().t().contiguous())
        return model

    reference = nn.Linear(3, 3)
    candidate = transposed(copy.deepcopy(reference))
    with torch.no_grad():
        candidate.weight[0, 0] += 1
    assert not find_fold(reference, candidate, transposed).is_identity


def test_of_several_copies_of_a_buffer_that_beside_the_weight_is_taken():
    def beside_a_copy(model):
        both = nn.Module()
        both.register_buffer("teacher", model[0].running_mean.clone())
        both.norm = model[0]
        return both

    reference = nn.Sequential(nn.BatchNorm1d(4))
    fold = find_fold(reference, beside_a_copy(copy.deepcopy(reference)), beside_a_copy)
    assert fold.sources("0.running_mean") == {"norm.running_mean"}
    assert fold.repeated == ("0.running_mean",)


def test_says_which_weights_became_several():
    def doubled(model):
        return nn.ModuleList([model, copy.deepcopy(model)])

    reference = nn.Linear(3, 3)
    fold = find_fold(reference, doubled(copy.deepcopy(reference)), doubled)
    assert fold.notes == ("in several places in the candidate, of which the first is taken: weight, bias",)
    assert fold.unused == ("1.weight", "1.bias")
    assert fold({"0.bias": torch.ones(3)}).keys() == {"bias"}
