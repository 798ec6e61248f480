"""Kernels that torch does not dispatch, such as Triton's: they read and write where they are told to."""

import ctypes

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.words import Verdict


class Doubled(torch.autograd.Function):
    """Twice a tensor, which is brought to its place by its address."""

    @staticmethod
    def forward(ctx, x):
        x = x.contiguous()
        there = torch.empty_like(x)
        ctypes.memmove(there.data_ptr(), x.data_ptr(), x.numel() * x.element_size())
        return there * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class ByAddress(nn.Module):
    def __init__(self, first, off):
        super().__init__()
        self.first, self.off = first, off

    def forward(self, x):
        return Doubled.apply(self.first(x)) * (1 + self.off)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 4)

    def forward(self, x):
        return self.first(x) + self.first(x)


@pytest.mark.parametrize("off", [0.0, 1e-5])
def test_they_are_given_no_address_of_what_has_none(off):
    torch.manual_seed(0)
    batches = [(torch.randn(6, 5), torch.randint(4, (6,))) for _ in range(2)]
    found = diagnose(
        Twice(), lambda model: ByAddress(model.first, off), batches, loss=F.cross_entropy, steps=3
    )
    right = (Verdict.BUG,) if off else (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)
    assert found.verdict in right, found
