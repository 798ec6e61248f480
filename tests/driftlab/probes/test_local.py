"""Faults planted in one module of a small network: the probe must name that module and that pass."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab.probes.local import first_wrong, local_errors

THRESHOLD = 1e-12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn, self.conv2 = (
            nn.Conv2d(4, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.Conv2d(4, 4, 3, padding=1),
        )

    def forward(self, x):
        return torch.relu(x + self.conv2(torch.relu(self.bn(self.conv1(x)))))


class Unscaled(Block):
    def forward(self, x):
        return torch.relu(0.999 * x + self.conv2(torch.relu(self.bn(self.conv1(x)))))


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), Block(), Block(), nn.Flatten(), nn.Linear(4 * 36, 5))


class Wrapped(nn.Conv2d):
    """A convolution whose output, output gradient or weight gradient is off by a factor."""

    def __init__(self, conv, fault):
        super().__init__(4, 4, 3, padding=1)
        self.load_state_dict(conv.state_dict())
        self.fault = fault

    def forward(self, x):
        weight, bias = self.weight, self.bias
        if self.fault == "forward":
            weight = weight * (1 + 1e-6)
        if self.fault == "input gradient":
            x = x + (x - x.detach()) * 1e-6
        if self.fault == "weight gradient":
            weight = weight + (weight - weight.detach()) * 1e-6
        if self.fault == "eval" and not self.training:
            weight = weight * 1.001
        return F.conv2d(x, weight, bias, padding=1)


def found(candidate, fold=dict):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(6, 3, 8, 8, generator=generator)
    targets = torch.randint(0, 5, (6,), generator=generator)
    return first_wrong(local_errors(network(), candidate, fold, F.cross_entropy, inputs, targets), THRESHOLD)


def test_equal_networks_have_no_wrong_module():
    assert found(network()) is None


@pytest.mark.parametrize("fault", ["forward", "input gradient", "weight gradient", "eval"])
@pytest.mark.parametrize("place", [("1", "conv1"), ("2", "conv2")])
def test_a_planted_fault_is_found_in_its_module_and_pass(fault, place):
    candidate = network()
    block = getattr(candidate, place[0])
    setattr(block, place[1], Wrapped(getattr(block, place[1]), fault))
    assert found(candidate) == (".".join(place), fault)


def test_of_two_faults_the_first_in_execution_is_named():
    candidate = network()
    candidate[1].conv2 = Wrapped(candidate[1].conv2, "input gradient")
    candidate[2].conv1 = Wrapped(candidate[2].conv1, "forward")
    assert found(candidate) == ("1.conv2", "input gradient")


def test_a_fault_between_modules_is_that_of_their_parent():
    candidate = network()
    candidate[2].__class__ = Unscaled
    assert found(candidate) == ("2", "forward")


def test_a_wrong_buffer_update_is_found():
    candidate = network()
    candidate[1].bn.momentum = 0.2
    assert found(candidate) == ("1.bn", "buffer")


def test_neither_network_is_changed():
    reference, candidate = network(), network()
    before = [copy.deepcopy(m.state_dict()) for m in (reference, candidate)]
    inputs, targets = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
    local_errors(reference, candidate, dict, F.cross_entropy, inputs, targets)
    for module, state in zip((reference, candidate), before, strict=True):
        assert all(torch.equal(module.state_dict()[k], v) for k, v in state.items())
        assert all(p.grad is None for p in module.parameters())
