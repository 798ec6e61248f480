"""Which modules stand for which, and which were rewritten."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.fold import find_fold
from driftlab.network.modules import is_rewritten, paired_modules
from models import ResNet18
from models.rewrites.split_conv import split_conv


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU()), nn.Dropout(0.1), nn.Linear(8, 3)
    )


def pairs(reference, candidate):
    return paired_modules(reference, candidate, find_fold(reference, candidate).sources)


def names(module):
    return {n: n for n, _ in module.named_modules()}


def test_a_copy_is_paired_name_by_name():
    assert pairs(network(), network()) == names(network())


class Halves(nn.Module):
    def __init__(self, linear):
        super().__init__()
        sizes = [linear.out_features // 2, linear.out_features - linear.out_features // 2]
        self.parts = nn.ModuleList(nn.Linear(linear.in_features, size) for size in sizes)
        for part, w, b in zip(self.parts, linear.weight.split(sizes), linear.bias.split(sizes), strict=True):
            part.load_state_dict({"weight": w, "bias": b})

    def forward(self, x):
        return torch.cat([part(x) for part in self.parts], -1)


def test_a_split_module_is_paired_with_the_module_that_holds_its_parts():
    candidate = network()
    candidate[0][0] = Halves(candidate[0][0])
    assert pairs(network(), candidate) == names(network())


def test_every_split_conv_of_a_resnet_finds_its_pair():
    reference = ResNet18(width=4)
    candidate = split_conv(copy.deepcopy(reference))
    found = pairs(reference, candidate)
    assert found == names(reference)
    rewritten = {n for n in found if is_rewritten(reference.get_submodule(n), candidate.get_submodule(n))}
    convs = {n for n, m in reference.named_modules() if isinstance(m, nn.Conv2d)}
    assert convs <= rewritten
    assert not any(isinstance(reference.get_submodule(n), nn.BatchNorm2d) for n in rewritten)


class Renamed(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.head, self.body = model[2], nn.Sequential(*model[0])

    def forward(self, x):
        return self.head(self.body(x))


def test_modules_under_other_names_are_paired_by_their_tensors():
    found = pairs(network(), Renamed(network()))
    assert {n: found[n] for n in ("", "0.0", "0.1", "2")} == {
        "": "",
        "0.0": "body.0",
        "0.1": "body.1",
        "2": "head",
    }
    assert found["0"] == "body"
    assert "1" not in found


class Fused(nn.Module):
    """Two linear layers whose weights lie in one."""

    def __init__(self, model):
        super().__init__()
        self.qk = nn.Linear(4, 10)
        self.qk.weight.data.copy_(torch.cat([model.q.weight, model.k.weight]))
        self.qk.bias.data.copy_(torch.cat([model.q.bias, model.k.bias]))


def test_modules_fused_into_one_stand_for_none_of_their_own():
    reference = nn.ModuleDict({"q": nn.Linear(4, 5), "k": nn.Linear(4, 5)})
    assert pairs(reference, Fused(reference)) == {"": ""}


class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def test_a_wrapper_in_the_place_of_a_module_is_its_pair():
    candidate = network()
    candidate[2] = Wrapped(candidate[2])
    assert pairs(network(), candidate)["2"] == "2"


def test_a_module_without_tensors_is_paired_with_its_namesake_alone():
    candidate = network()
    candidate[0] = nn.Sequential(candidate[0][0], candidate[0][1])
    found = pairs(network(), candidate)
    assert found["1"] == "1"
    assert "0.2" not in found


def change(kind):
    def changed(model):
        if kind == "another class":
            model[0][2] = nn.LeakyReLU()
        if kind == "another number":
            model[1].p = 0.2
        if kind == "another flag":
            model[0][2].inplace = True
        if kind == "another mode":
            model[1].eval()
        if kind == "a forward of its own":
            model[2].forward = lambda x: F.linear(x, model[2].weight, model[2].bias)
        if kind == "a forward hook":
            model[2].register_forward_hook(lambda module, args, output: output * 2)
        if kind == "a hook before":
            model[2].register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        if kind == "a backward hook":
            model[2].register_full_backward_hook(lambda module, inner, outer: inner)
        if kind == "a hook on a weight":
            model[2].weight.register_hook(lambda gradient: 2 * gradient)
        if kind == "a hook on an accumulated gradient":
            model[2].weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.mul_(2))
        if kind == "one more module":
            model.append(nn.Identity())
        return model

    return changed


KINDS = """another class, another number, another flag, another mode, a forward of its own, a forward hook,
a hook before, a backward hook, a hook on a weight, a hook on an accumulated gradient, one more module"""


@pytest.mark.parametrize("kind", [" ".join(k.split()) for k in KINDS.split(",")])
def test_whatever_may_compute_otherwise_is_rewritten(kind):
    assert is_rewritten(network(), change(kind)(network()))


@pytest.mark.parametrize("kind", ["another class", "a forward of its own", "a hook on a weight"])
def test_what_the_rewrite_took_away_counts_too(kind):
    assert is_rewritten(change(kind)(network()), network())


class Set(nn.Module):
    def __init__(self, setting):
        super().__init__()
        self.setting = setting


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (1, 2),
        (1.0, 1.0 + 2**-52),
        ("same", "valid"),
        ((3, 3), (3, 5)),
        (None, 0.5),
        ([1, 2], [2, 1]),
        ({"size": 2}, {"size": 3}),
        (torch.float32, torch.bfloat16),
        (F.relu, F.gelu),
    ],
    ids=["int", "float", "str", "tuple", "None", "list", "dict", "dtype", "function"],
)
def test_another_setting_is_a_rewrite_and_the_same_one_is_not(one, other):
    assert is_rewritten(nn.Sequential(Set(one)), nn.Sequential(Set(other)))
    assert not is_rewritten(nn.Sequential(Set(one)), copy.deepcopy(nn.Sequential(Set(one))))


def test_other_weights_are_no_rewrite():
    other = network()
    with torch.no_grad():
        other[2].weight.add_(1)
    assert not is_rewritten(network(), other)
    assert not is_rewritten(ResNet18(width=4), ResNet18(width=4))
