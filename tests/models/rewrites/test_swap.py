"""Which convs are replaced, and what is kept of them."""

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from models import ResNet18
from models.rewrites.grouped_conv import RepeatedInput, as_grouped, separate_groups
from models.rewrites.split_conv import SideBySide, equal_sizes, sizes_for_groups, split_conv


class Shared(nn.Module):
    """One conv under two names, and a second time through a shared block."""

    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(4, 4, 3, padding=1)
        self.again = self.first
        self.block = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.twin = self.block

    def forward(self, x):
        return self.twin(self.again(self.block(self.first(x))))


def rewritten_names(model, kind=SideBySide):
    return [name for name, module in model.named_modules() if isinstance(module, kind)]


def assert_folds_back(candidate, reference):
    folded = candidate.fold(candidate.state_dict())
    assert folded.keys() == reference.state_dict().keys()
    assert all(torch.equal(folded[name], tensor) for name, tensor in reference.state_dict().items())


def test_every_conv_without_match():
    model = split_conv(ResNet18(width=4))
    assert len(rewritten_names(model)) == 20


@pytest.mark.parametrize(
    ("match", "names"),
    [
        ("conv1", ["conv1"]),
        ("layer4.*.conv2", ["layer4.0.conv2", "layer4.1.conv2"]),
        (["conv1", "*shortcut*"], ["conv1", *(f"layer{i}.0.shortcut.0" for i in (2, 3, 4))]),
    ],
)
def test_the_convs_that_match(match, names):
    reference = ResNet18(width=4)
    candidate = split_conv(copy.deepcopy(reference), match=match)
    assert rewritten_names(candidate) == names
    assert_folds_back(candidate, reference)


def test_folded_names_keep_their_order():
    reference = ResNet18(width=4)
    candidate = split_conv(copy.deepcopy(reference), match="layer*")
    assert list(candidate.fold(dict(candidate.named_parameters()))) == [
        n for n, _ in reference.named_parameters()
    ]


def test_a_shared_conv_stays_shared():
    reference = Shared()
    candidate = split_conv(copy.deepcopy(reference))
    assert candidate.first is candidate.again
    assert candidate.block[0] is candidate.twin[0]
    x = torch.randn(2, 4, 5, 5)
    torch.testing.assert_close(candidate(x), reference(x))
    assert_folds_back(candidate, reference)
    parameters = candidate.fold(dict(candidate.named_parameters()))
    assert parameters.keys() == dict(reference.named_parameters()).keys()


def test_a_shared_conv_goes_by_either_name():
    candidate = split_conv(Shared(), match="again")
    assert candidate.first is candidate.again
    assert isinstance(candidate.first, SideBySide)


def test_a_model_that_is_itself_a_conv():
    reference = nn.Conv2d(4, 6, 3)
    candidate = split_conv(copy.deepcopy(reference), parts=3)
    assert isinstance(candidate, SideBySide)
    assert_folds_back(candidate, reference)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_keeps_dtype_mode_and_what_is_frozen(dtype):
    reference = nn.Sequential(nn.Conv2d(4, 4, 3, dtype=dtype)).eval()
    reference[0].weight.requires_grad_(False)
    for rewrite in (split_conv, as_grouped, lambda model: split_conv(model, dim="in")):
        parts = [m for m in rewrite(copy.deepcopy(reference)).modules() if isinstance(m, nn.Conv2d)]
        assert {p.weight.dtype for p in parts} == {dtype}
        assert {p.weight.requires_grad for p in parts} == {False}
        assert {p.bias.requires_grad for p in parts if p.bias is not None} == {True}
        assert {p.training for p in parts} == {False}


def test_keeps_the_memory_format():
    reference = nn.Conv2d(4, 4, 3).to(memory_format=torch.channels_last)
    for part in split_conv(copy.deepcopy(reference), dim="in").parts:
        assert part.weight.is_contiguous(memory_format=torch.channels_last)


def test_draws_no_random_numbers():
    model, before = ResNet18(width=4), torch.get_rng_state()
    split_conv(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_parts_are_parameters_of_their_own():
    reference = nn.Sequential(nn.Conv2d(2, 4, 1))
    candidate = split_conv(copy.deepcopy(reference))
    with torch.no_grad():
        candidate[0].parts[0].weight.zero_()
    assert candidate[0].parts[1].weight.any()


def test_fold_survives_copy_and_pickle():
    reference = ResNet18(width=4)
    candidate = split_conv(copy.deepcopy(reference), dim="in", match="layer1.0.conv1")
    assert_folds_back(copy.deepcopy(candidate), reference)
    assert_folds_back(pickle.loads(pickle.dumps(candidate)), reference)


def test_folds_compose():
    reference = ResNet18(width=8, groups=2)
    candidate = separate_groups(copy.deepcopy(reference))
    candidate = split_conv(candidate, dim="in", match="layer1.0.conv1.parts.1")
    candidate = as_grouped(candidate, match="layer1.0.conv1.parts.0")
    assert rewritten_names(candidate, RepeatedInput) == ["layer1.0.conv1.parts.0"]
    assert_folds_back(candidate, reference)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(candidate(x), reference(x))


def test_fold_counts_a_piece_without_gradient_as_zero():
    candidate = split_conv(nn.Sequential(nn.Conv2d(1, 3, 1), nn.ReLU()), sizes=[1, 2])
    folded = candidate.fold({"0.parts.1.weight": torch.ones(2, 1, 1, 1)})
    assert list(folded) == ["0.weight"]
    assert folded["0.weight"].flatten().tolist() == [0, 1, 1]


def test_match_none_passes_over_what_does_not_fit():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 1), parametrizations.weight_norm(nn.Conv2d(4, 4, 1))
    )
    assert rewritten_names(split_conv(copy.deepcopy(model), parts=4)) == ["0", "1"]
    assert [
        n for n, m in split_conv(model, dim="in").named_modules() if type(m).__name__ == "SummedSlices"
    ] == ["1"]


@pytest.mark.parametrize(
    ("total", "parts", "sizes"), [(513, 2, [257, 256]), (7, 3, [3, 2, 2]), (3, 3, [1, 1, 1])]
)
def test_equal_sizes(total, parts, sizes):
    assert equal_sizes(total, parts) == sizes


@pytest.mark.parametrize(
    ("channels", "groups", "parts", "sizes"),
    [(6, 3, 2, [4, 2]), (6, 2, 3, [2, 1, 3]), (8, 2, 2, [4, 4]), (6, 2, 6, [1] * 6)],
)
def test_sizes_for_groups(channels, groups, parts, sizes):
    assert sizes_for_groups(channels, groups, parts) == sizes


def test_one_against_the_rest():
    parts = split_conv(nn.Conv2d(2, 513, 2, bias=False), sizes=[1, -1]).parts
    assert [part.out_channels for part in parts] == [1, 512]
