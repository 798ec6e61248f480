"""An optimizer in use, made anew for copies and for the rewritten network."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import DiagnoseError
from driftlab.fold import find_fold
from driftlab.lockstep.carried import Carried
from tests.driftlab.watch.rewrites import network, rewritten

OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}


def update(module, optimizer, dtype=torch.float32):
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 20, generator=generator).to(dtype), torch.randint(5, (8,), generator=generator)
    torch.manual_seed(4)
    optimizer.zero_grad()
    F.cross_entropy(module(x), y).backward()
    optimizer.step()


def trained(make):
    model = network()
    optimizer = make([{"params": model[0].parameters()}, {"params": model[3].parameters(), "lr": 0.03}])
    for _ in range(3):
        update(model, optimizer)
    return model, optimizer


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_copy_goes_on_bit_for_bit(name):
    model, live = trained(OPTIMIZERS[name])
    other = copy.deepcopy(model)
    made = Carried(live, model, other, find_fold(model, other)).of_reference(other)
    assert type(made) is type(live)
    update(model, live), update(other, made)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_rewritten_network_goes_on_as_the_reference_does(name, dtype):
    model, live = trained(OPTIMIZERS[name])
    twin, candidate = copy.deepcopy(model), rewritten()(copy.deepcopy(model))
    fold = find_fold(model, candidate)
    carried = Carried(live, model, candidate, fold)
    twin, candidate = twin.to(dtype), candidate.to(dtype)
    own, theirs = carried.of_reference(twin), carried.of_candidate(candidate)
    before = [p.detach().clone() for p in model.parameters()]
    update(twin, own, dtype), update(candidate, theirs, dtype)
    folded = fold(dict(candidate.named_parameters()))
    within = 1e-13 if dtype is torch.float64 else 1e-5
    for parameter, p in twin.named_parameters():
        torch.testing.assert_close(folded[parameter], p, rtol=within, atol=within)
    # what is carried from is left alone
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_groups_keep_their_settings():
    model, live = trained(OPTIMIZERS["sgd"])
    candidate = rewritten()(copy.deepcopy(model))
    made = Carried(live, model, candidate, find_fold(model, candidate)).of_candidate(candidate)
    first, second = made.param_groups
    assert (first["lr"], second["lr"]) == (0.1, 0.03)
    assert {id(p) for p in first["params"]} == {id(p) for p in candidate[0].parameters()}
    assert {id(p) for p in second["params"]} == {id(p) for p in candidate[3].parameters()}


def test_what_the_optimizer_leaves_alone_stays_alone():
    model = network()
    live = torch.optim.SGD(model[3].parameters(), lr=0.1)
    candidate = rewritten()(copy.deepcopy(model))
    made = Carried(live, model, candidate, find_fold(model, candidate)).of_candidate(candidate)
    assert {id(p) for p in made.param_groups[0]["params"]} == {id(p) for p in candidate[3].parameters()}


def test_where_there_is_no_way_back_neither_has_a_state():
    model, live = trained(OPTIMIZERS["adam"])
    candidate = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in candidate.parameters():
            parameter.div_(2)
    candidate.fold = lambda tensors: {n: 2 * t for n, t in tensors.items()}
    carried = Carried(live, model, candidate, find_fold(model, candidate))
    assert "cannot be reversed" in carried.dropped
    assert not carried.of_reference(copy.deepcopy(model)).state
    assert not carried.of_candidate(candidate).state


def test_an_optimizer_of_another_network_is_refused():
    model = network()
    with pytest.raises(DiagnoseError, match="parameters that the watched network has not"):
        Carried(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), model, model, find_fold(model, model))


class Scaled(torch.nn.Module):
    """With a parameter of no dimension, as CLIP's ``logit_scale``; its factor before or behind the layer."""

    def __init__(self, behind):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.scale, self.behind = nn.Linear(20, 5), nn.Parameter(torch.tensor(1.5)), behind

    def forward(self, x):
        if self.behind:
            return self.layer(x) * self.scale
        return F.linear(x, self.layer.weight * self.scale, self.layer.bias * self.scale)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_parameter_of_no_dimension_has_its_state_in_float64_too(name):
    model, candidate = Scaled(behind=True), Scaled(behind=False)
    live = OPTIMIZERS[name](model.parameters())
    for _ in range(3):
        update(model, live)
    candidate.load_state_dict(model.state_dict())
    fold = find_fold(model, candidate)
    carried = Carried(live, model, candidate, fold)
    twin, other = copy.deepcopy(model).double(), candidate.double()
    own, theirs = carried.of_reference(twin), carried.of_candidate(other)
    update(twin, own, torch.float64), update(other, theirs, torch.float64)
    torch.testing.assert_close(other.scale, twin.scale, rtol=1e-12, atol=1e-12)
    assert twin.scale != model.scale
