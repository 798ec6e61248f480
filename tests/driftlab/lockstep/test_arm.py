import copy

import pytest
import torch
from torch import nn

from driftlab.blame import is_ours
from driftlab.lockstep.arm import grow
from driftlab.lockstep.control import nudge
from tests.driftlab.hostile_doors import sgd_whose


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 5))


def changed_entries(before, after):
    pairs = zip(before.state_dict().values(), after.state_dict().values(), strict=True)
    return [(a[a != b], b[a != b]) for a, b in pairs if not torch.equal(a, b)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", range(5))
def test_a_nudge_moves_one_weight_by_one_ulp(dtype, seed):
    before = network().to(dtype)
    after = copy.deepcopy(before)
    nudge(after, seed)
    ((old, new),) = changed_entries(before, after)
    assert old.numel() == 1
    up = torch.nextafter(old, torch.full_like(old, torch.inf))
    down = torch.nextafter(old, torch.full_like(old, -torch.inf))
    assert new in (up, down)
    assert new.abs() > old.abs()


def test_the_same_weight_is_nudged_in_every_dtype():
    assert {nudge(network().to(d), 7) for d in (torch.float32, torch.float64)} == {nudge(network(), 7)}
    assert len({nudge(network(), seed) for seed in range(20)}) > 10


def test_a_channels_last_weight_is_nudged_in_place():
    before = network().to(memory_format=torch.channels_last)
    after = copy.deepcopy(before)
    nudge(after, 1)
    assert len(changed_entries(before, after)) == 1


def test_a_network_of_zeros_cannot_be_nudged():
    zeros = nn.Linear(2, 2)
    nn.init.zeros_(zeros.weight)
    nn.init.zeros_(zeros.bias)
    with pytest.raises(ValueError, match="no parameter that is not zero"):
        nudge(zeros, 0)


def tree(**options):
    horizons = {"float32": 6, "float64": 3}
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    return grow(network(), network(), optimizer=sgd, horizons=horizons, **options)


def test_the_arms_form_a_tree_rooted_in_the_float64_reference():
    against = {arm.name: arm.against.name if arm.against else None for arm in tree()}
    assert against == {
        "reference.float64": None,
        "candidate.float64": "reference.float64",
        "control.float64": "reference.float64",
        "reference.float32": "reference.float64",
        "candidate.float32": "reference.float32",
        "control.float32": "reference.float32",
    }
    names = list(against)
    assert all(names.index(other) < names.index(name) for name, other in against.items() if other)


def test_arms_start_from_the_same_float32_weights():
    arms = {arm.name: arm for arm in tree()}
    narrow, wide = arms["reference.float32"].module, arms["reference.float64"].module
    for a, b in zip(narrow.parameters(), wide.parameters(), strict=True):
        assert torch.equal(a.double(), b)
    assert arms["candidate.float64"].horizon == 3
    assert arms["candidate.float32"].horizon == 6


def test_roles_can_be_left_out():
    sgd = lambda m: torch.optim.SGD(m.parameters(), lr=0.1)  # noqa: E731
    alone = grow(network(), None, optimizer=sgd, horizons={"float32": 6})
    assert {arm.role for arm in alone} == {"reference", "control"}
    assert {arm.role for arm in tree(controls=())} == {"reference", "candidate"}


@pytest.mark.parametrize("dtype", ["float32", "16-mixed"])
def test_an_error_of_a_step_is_told_as_the_optimizers(dtype):
    optimizer = sgd_whose("step")
    (arm,) = grow(
        network(), None, optimizer=lambda m: optimizer(m.parameters()), horizons={dtype: 1}, controls=()
    )
    for parameter in arm.module.parameters():
        parameter.grad = torch.zeros_like(parameter)
    if arm.scaler:
        arm.scaler.scale(torch.ones(()))  # begins it
        arm.scaler.unscale_(arm.optimizer)
    with pytest.raises(KeyError) as raised:
        arm.update()
    assert not is_ours(raised.value)
