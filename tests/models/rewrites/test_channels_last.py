"""The rewrite that only stores a network otherwise: the same numbers, in another order wherever it goes."""

import copy

import pytest
import torch
from torch.optim import SGD

from driftlab import assert_equivalent
from driftlab.lockstep.arm import grow
from models.resnet import ResNet18
from models.rewrites.channels_last import channels_last
from tests.kernels import need_channels_last


@pytest.fixture(scope="module", autouse=True)
def sound_kernels():
    need_channels_last()


def networks():
    torch.manual_seed(0)
    reference = ResNet18(width=4)
    return reference, channels_last(copy.deepcopy(reference))


def test_is_the_same_function():
    reference, candidate = networks()
    assert_equivalent(reference, candidate, torch.randn(4, 3, 32, 32))


def test_is_stored_otherwise_in_the_arms_of_both_dtypes_and_in_their_gradients():
    reference, candidate = networks()
    arms = grow(
        reference,
        candidate,
        optimizer=lambda m: SGD(m.parameters(), 0.1),
        horizons={"float32": 1, "float64": 1},
    )
    for arm in arms:
        weight = arm.module.layer1[0].conv1.weight
        arm.module(torch.randn(4, 3, 32, 32, dtype=weight.dtype)).sum().backward()
        for tensor in (weight, weight.grad):
            stored_last = tensor.is_contiguous(memory_format=torch.channels_last)
            assert stored_last == (arm.role == "candidate"), arm.name
