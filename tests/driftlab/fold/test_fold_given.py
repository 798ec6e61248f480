"""A fold that comes with the candidate."""

import copy

import pytest
import torch
from torch import nn

from driftlab.fold import FoldError, find_fold
from models import ResNet18
from tests.driftlab.fold.folding import assert_folds, halves


def test_a_given_fold_may_know_only_whole_sets():
    reference, candidate = halves()
    candidate.fold = lambda t: {"0.weight": torch.cat([t["first"], t["second"]]), "0.bias": t["bias"]}
    fold = find_fold(reference, candidate)
    assert fold.origin == "given"
    assert not fold.is_identity
    assert_folds(fold, candidate, reference)
    assert fold({"bias": torch.ones(4)}).keys() == {"0.bias"}
    assert fold({"second": torch.ones(2, 3)})["0.weight"].sum() == 6


def test_a_given_fold_that_passes_everything_through():
    reference = ResNet18(width=4)
    candidate = copy.deepcopy(reference)
    candidate.fold = dict
    assert find_fold(reference, candidate).is_identity


def test_a_given_fold_says_what_it_does_not_use():
    reference, candidate = halves()
    candidate.extra = nn.Parameter(torch.ones(2))
    candidate.fold = lambda t: {"0.weight": torch.cat([t["first"], t["second"]]), "0.bias": t["bias"]}
    assert find_fold(reference, candidate).unused == ("extra",)


def test_a_submodule_called_fold_is_no_fold():
    reference = nn.ModuleDict({"fold": nn.Fold(2, 1), "layer": nn.Linear(2, 2)})
    assert find_fold(reference, copy.deepcopy(reference)).origin == "by value"


@pytest.mark.parametrize(
    ("fold", "message"),
    [
        (
            lambda t: {"0.weight": t["first"], "0.bias": t["bias"]},
            r"0.weight the shape \[2, 3\], which is \[4, 3\]",
        ),
        (lambda t: {"0.wait": t["first"]}, r"gives no 0.weight \[4, 3\]; it gives 0.wait$"),
        (lambda t: {"0.weight": t["third"]}, r"KeyError: 'third' \(.*:\d+\) on its own tensors$"),
        (lambda t: list(t.values()), "gives a list; return a dict of name -> tensor$"),
        (lambda t: dict(enumerate(t.values())), "gives {0: a Tensor}; return a dict of name -> tensor$"),
        (lambda t: {"0.weight": 3}, "gives {'0.weight': a int}; return a dict"),
    ],
)
def test_refuses_a_given_fold_that_does_not_fit(fold, message):
    reference, candidate = halves()
    candidate.fold = fold
    with pytest.raises(FoldError, match=message) as caught:
        find_fold(reference, candidate)
    assert "\n" not in str(caught.value)


def test_a_given_fold_must_give_integer_buffers():
    reference = nn.BatchNorm1d(3)
    candidate = copy.deepcopy(reference)
    candidate.fold = lambda t: {n: x for n, x in t.items() if x.is_floating_point()}
    with pytest.raises(FoldError, match=r"gives no num_batches_tracked \[\]"):
        find_fold(reference, candidate)


def test_refuses_a_lazy_network():
    with pytest.raises(FoldError, match="weight has no shape yet"):
        find_fold(nn.LazyLinear(3), nn.Linear(2, 3))


def test_a_given_fold_that_takes_offence_at_zeros_still_serves():
    def fold(tensors):
        if not tensors["first"].any():
            raise ValueError("all zero")
        return {"0.weight": torch.cat([tensors["first"], tensors["second"]]), "0.bias": tensors["bias"]}

    reference, candidate = halves()
    candidate.fold = fold
    assert_folds(find_fold(reference, candidate), candidate, reference)


class Unfolding(nn.Linear):
    def fold(self, windows, size):
        return windows.reshape(-1, size)


def test_a_method_called_fold_that_takes_other_arguments_is_no_fold():
    torch.manual_seed(0)
    reference, candidate = nn.Linear(3, 2), Unfolding(3, 2)
    candidate.load_state_dict(reference.state_dict())
    fold = find_fold(reference, candidate)
    assert fold.origin != "given"
    assert fold.placed == ("weight", "bias")


def test_a_function_that_was_put_there_is_a_fold_whatever_it_takes():
    reference, candidate = halves()
    candidate.fold = lambda windows, size: windows
    with pytest.raises(FoldError, match="fold raised TypeError"):
        find_fold(reference, candidate)
