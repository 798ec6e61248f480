"""Kernels that torch does not dispatch, such as Triton's: they read and write where they are told to."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.words import Verdict

# as Python asks, and as an extension in C++ does, past the tensor's class
ASKING = {"Python": lambda tensor: tensor.data_ptr(), "C++": torch._C.TensorBase.data_ptr}


class Doubled(torch.autograd.Function):
    """Twice a tensor, which is brought to its place by its address."""

    @staticmethod
    def forward(ctx, x, where):
        x = x.contiguous()
        there = torch.empty_like(x)
        ctypes.memmove(where(there), where(x), x.numel() * x.element_size())
        return there * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2, None


class ByAddress(nn.Module):
    def __init__(self, first, off, where):
        super().__init__()
        self.first, self.off, self.where = first, off, where

    def forward(self, x):
        return Doubled.apply(self.first(x), self.where) * (1 + self.off)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)

    def forward(self, x):
        return self.first(x) + self.first(x)


@pytest.mark.parametrize("asking", ASKING)
@pytest.mark.parametrize("off", [0.0, 1e-5])
def test_they_are_given_no_address_of_what_has_none(off, asking):
    torch.manual_seed(0)
    batches = [(torch.randn(6, 5), torch.randint(4, (6,))) for _ in range(2)]
    rewrite = lambda model: ByAddress(model.first, off, ASKING[asking])  # noqa: E731
    found = diagnose(Twice(), rewrite, batches, loss=F.cross_entropy, steps=3)
    right = (Verdict.BUG,) if off else (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert found.verdict in right, found
