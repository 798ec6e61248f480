"""Both optimizers on the same gradients: equal rules, other settings, late changes, fewer bits."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.fold import find_fold
from driftlab.network.pair import Pair
from driftlab.probes.update import THRESHOLD, wrong_update
from tests.driftlab.arithmetic.layers import Halves
from tests.driftlab.probes.optimizers import Kept, Late, Narrow, Normed, Seen


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3))


def split(model):
    model[0] = Halves(model[0])
    return model


def sgd(module, groups=None, **options):
    settings = {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-2} | options
    return torch.optim.SGD(groups or module.parameters(), **settings)


def subject(own=sgd, other=None, rewrite=lambda m: m, reference=None):
    reference = reference or network()
    candidate = rewrite(copy.deepcopy(reference))
    fold = find_fold(reference, candidate)
    return Pair(reference, candidate, fold, F.cross_entropy, own, other or own)


MAKES = {
    "SGD": sgd,
    "Adam": lambda m: torch.optim.Adam(m.parameters(), lr=1e-2, weight_decay=1e-2, amsgrad=True),
    "AdamW": lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2),
    "RMSprop": lambda m: torch.optim.RMSprop(m.parameters(), lr=1e-2, centered=True),
    "NAdam": lambda m: torch.optim.NAdam(m.parameters()),
}


@pytest.mark.parametrize("in_shadow", [False, True], ids=["float64", "shadow"])
@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
def test_rules_that_act_entry_by_entry_move_a_split_layer_alike(make, in_shadow):
    assert wrong_update(subject(make, rewrite=split), 8, in_shadow) is None


def test_another_learning_rate_is_off_by_its_share_of_the_update():
    kept = []
    own = lambda m: kept.append(Seen(m.parameters(), lr=0.1)) or kept[0]  # noqa: E731
    found = wrong_update(subject(own, lambda m: torch.optim.SGD(m.parameters(), lr=0.3)), 1)
    expected = [float(0.2 * g.norm() / (w - 0.1 * g).norm()) for w, g in kept[0].first]
    assert found.measured == pytest.approx(max(expected))
    assert found.place.step == 0
    assert found.place.pass_ == "update"
    assert found.why.endswith("has lr 0.3 instead of 0.1")


SETTINGS = {
    "lr": {"lr": 0.1 * (1 + 1e-9)},
    "momentum": {"momentum": 0.91},
    "weight_decay": {"weight_decay": 0.0},
    "dampening": {"dampening": 0.1},
    "nesterov": {"nesterov": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_named(name):
    found = wrong_update(subject(other=lambda m: sgd(m, **SETTINGS[name])), 4)
    assert found.measured > THRESHOLD
    assert f"has {name} {SETTINGS[name][name]} instead of" in found.why
    assert found.tensor.rpartition(".")[0] == found.place.module


def grouped(module, **last):
    names = dict(module.named_parameters())
    others = [p for n, p in names.items() if n != "3.weight"]
    return sgd(module, groups=[{"params": others}, {"params": [names["3.weight"]]} | last])


def test_a_group_of_other_settings_is_found_with_its_tensor():
    found = wrong_update(subject(other=lambda m: grouped(m, lr=0.05)), 3)
    assert (found.tensor, found.place.module, found.place.step) == ("3.weight", "3", 0)
    assert found.why == "3.weight has lr 0.05 instead of 0.1"


def all_but_the_last(module):
    return sgd(module, list(module.parameters())[:-1])


def test_a_parameter_that_the_optimizer_was_not_given_is_found():
    found = wrong_update(subject(other=all_but_the_last), 3)
    assert found.tensor == "3.bias"
    assert found.why == "3.bias is in no parameter group of the candidate's optimizer"
    assert wrong_update(subject(all_but_the_last, sgd), 3).tensor == "3.bias"


def test_another_optimizer_is_named():
    both = (
        lambda m, make=make: make(m.parameters(), lr=0.01) for make in (torch.optim.Adam, torch.optim.RMSprop)
    )
    assert wrong_update(subject(*both), 3).why == "the optimizers are Adam and RMSprop"


@pytest.mark.parametrize("start", [0, 1, 5])
def test_a_change_is_found_at_the_step_where_it_sets_in(start):
    late = lambda m: Late(m.parameters(), start)  # noqa: E731
    both = subject(lambda m: sgd(m, weight_decay=0.0), late)
    assert wrong_update(both, 6).place.step == start
    assert wrong_update(both, start) is None


def test_a_rule_that_looks_at_whole_tensors_does_otherwise_once_one_is_split():
    normed = lambda m: Normed(m.parameters(), lr=0.1)  # noqa: E731
    assert wrong_update(subject(normed), 4) is None
    found = wrong_update(subject(normed, rewrite=split), 4)
    assert found.tensor.startswith("0.")
    assert "looks at whole tensors" in found.why
    assert all(f"0.parts.{i}." in found.why for i in (0, 1))


def test_a_state_in_fewer_bits_is_off_in_float64_and_not_in_shadow():
    both = subject(sgd, lambda m: Narrow(m.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2))
    assert 1e-5 < wrong_update(both, 8).measured < 1e-2
    assert wrong_update(both, 8, in_shadow=True) is None


def test_frozen_parameters_are_left_out_on_both_sides():
    reference = network()
    reference[0].requires_grad_(False)
    assert wrong_update(subject(reference=reference), 4) is None
    found = wrong_update(subject(other=lambda m: sgd(m, lr=0.2), reference=reference), 4)
    assert not found.tensor.startswith("0.")


def test_the_networks_and_their_weights_are_left_as_they_were():
    both = subject(other=lambda m: sgd(m, lr=0.2))
    before = [copy.deepcopy(m.state_dict()) for m in (both.reference, both.candidate)]
    wrong_update(both, 3)
    for module, state in zip((both.reference, both.candidate), before, strict=True):
        assert all(torch.equal(state[n], t) for n, t in module.state_dict().items())
        assert all(p.grad is None for p in module.parameters())


def test_weights_that_start_from_zero_decay_too():
    reference = network()
    nn.init.zeros_(reference[3].weight)
    both = subject(other=lambda m: grouped(m, weight_decay=0.0), reference=reference)
    assert wrong_update(both, 1).tensor == "3.weight"


@pytest.mark.parametrize("in_shadow", [False, True], ids=["float64", "shadow"])
def test_an_optimizer_written_by_hand_does_as_torchs_own(in_shadow):
    both = subject(lambda m: sgd(m, weight_decay=0.0), lambda m: Kept(m.parameters(), lr=0.1))
    assert wrong_update(both, 4, in_shadow) is None


class Backbone(nn.Module):
    """Frozen, its norm in eval mode; only the head is trained."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8).eval(), nn.Linear(8, 4)
        for tensor in (self.norm.weight.data, self.norm.running_var):
            tensor.uniform_(0.5, 2)
        for part in (self.conv, self.norm):
            part.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x):
        return self.head(self.norm(self.conv(x)).relu().mean((2, 3)))


def folded_norm(model):
    model.conv = torch.nn.utils.fuse_conv_bn_eval(model.conv.eval(), model.norm).requires_grad_(False)
    model.norm = nn.Identity()
    return model


@pytest.mark.parametrize("make", [sgd, MAKES["AdamW"]], ids=["SGD", "AdamW"])
def test_a_frozen_backbone_with_folded_norms_moves_alike(make):
    assert wrong_update(subject(make, rewrite=folded_norm, reference=Backbone()), 4) is None


def test_a_fault_says_how_many_of_the_trained_tensors_it_touches():
    halved = lambda m: sgd(m, lr=0.05)  # noqa: E731
    found = wrong_update(subject(other=halved, rewrite=folded_norm, reference=Backbone()), 4)
    assert (found.place.module, found.touched, found.compared) == ("head", 2, 2)
    found = wrong_update(subject(other=lambda m: grouped(m, lr=0.05)), 3)
    assert (found.touched, found.compared) == (1, 6)
