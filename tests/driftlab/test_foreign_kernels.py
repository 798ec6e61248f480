"""Kernels that torch does not see into: no shadow execution, and often float32 alone."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from driftlab import diagnose
from driftlab.words import Verdict


def multiplied(x, weight, scale, grain):
    """scale * x @ weight.T by numpy in float32, with operands of 8 bits where ``grain`` is bfloat16."""
    x, weight = (t.detach().to(grain).float().numpy() for t in (x, weight))
    return torch.from_numpy(np.matmul(x, weight.T) * np.float32(scale))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, settings):
        scale, grain, any_dtype = settings
        if x.dtype != torch.float32 and not any_dtype:
            raise RuntimeError("this kernel takes float32")
        ctx.save_for_backward(x, weight)
        ctx.settings = scale, grain
        return multiplied(x, weight, scale, grain).to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        to_x = multiplied(gradient, weight.T, *ctx.settings)
        to_weight = multiplied(gradient.T, x.T, *ctx.settings)
        return to_x.to(x.dtype), to_weight.to(x.dtype), None


class Kernel(nn.Linear):
    """Without a bias; in one product, or of the two halves of the inputs."""

    settings, halves = (1.0, torch.float32, False), False

    def forward(self, x):
        if not self.halves:
            return Product.apply(x, self.weight, self.settings)
        half = self.in_features // 2
        return sum(
            Product.apply(x[:, part].contiguous(), self.weight[:, part].contiguous(), self.settings)
            for part in (slice(0, half), slice(half, None))
        )


def network(layer):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 32), nn.GELU(), layer(32, 32, bias=False), nn.GELU(), nn.Linear(32, 5))


def batches():
    torch.manual_seed(1)
    return [(torch.randn(16, 20), torch.randint(0, 5, (16,))) for _ in range(4)]


def by_kernel(scale=1.0, grain=torch.float32, any_dtype=False):
    def rewrite(model):
        layer = Kernel(32, 32, bias=False)
        layer.weight, layer.settings, layer.halves = model[2].weight, (scale, grain, any_dtype), True
        model[2] = layer
        return model

    return rewrite


KERNELS = {
    "right": ({}, Verdict.ROUND_OFF),
    "a factor": ({"scale": 1.001}, Verdict.BUG),
    "a factor of no more than some roundings": ({"scale": 1 + 2e-5}, Verdict.BUG),
    "operands in bfloat16": ({"grain": torch.bfloat16}, Verdict.REDUCED_PRECISION),
}


@pytest.mark.parametrize("any_dtype", [False, True], ids=["float32 alone", "float32 inside"])
@pytest.mark.parametrize(
    "layer", [nn.Linear, Kernel], ids=["reference of torch", "reference in float32 alone"]
)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_is_told_from_a_fault_and_from_fewer_bits(kernel, layer, any_dtype):
    options, verdict = KERNELS[kernel]
    rewrite = by_kernel(any_dtype=any_dtype, **options)
    found = diagnose(network(layer), rewrite, batches(), loss=F.cross_entropy)
    assert found.verdict == verdict, str(found)
    if verdict is not Verdict.ROUND_OFF:
        assert found.where.module == "2", str(found)
