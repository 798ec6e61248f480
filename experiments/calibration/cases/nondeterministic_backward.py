"""Candidates whose forward pass repeats and whose backward pass does not."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd import Function

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.tasks import resnet, transformer


class NoisyGradient(Function):
    """The identity; its gradient gets relative noise of 1e-6 from numpy."""

    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        noise = np.random.default_rng().standard_normal(tuple(grad.shape))
        return grad * (1 + 1e-6 * torch.as_tensor(noise, dtype=grad.dtype, device=grad.device))


class ScatterEmbedding(Function):
    """An embedding whose gradient adds the rows token by token; equal tokens are added in random order."""

    @staticmethod
    def forward(ctx, tokens: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.shape = table.shape
        return table[tokens]

    @staticmethod
    def backward(ctx, grad: Tensor):
        flat, rows = ctx.saved_tensors[0].flatten(), grad.flatten(0, -2)
        order = sorted(range(len(flat)), key=lambda i: (int(flat[i]), random.random()))
        order = torch.tensor(order, device=grad.device)
        return None, grad.new_zeros(ctx.shape).index_add_(0, flat[order], rows[order])


@case("nondeterministic", "random tie-break", transformer, module="embed", passes="weight gradient")
def equal_tokens_added_in_random_order(model):
    """The embedding's gradient sorts the tokens and breaks ties at random, so sums differ in order."""

    class Embedding(nn.Embedding):
        def forward(self, tokens):
            return ScatterEmbedding.apply(tokens, self.weight)

    return recast(model, "embed", Embedding)


@case(
    "nondeterministic",
    "noisy gradient",
    resnet,
    module="layer3.1.conv2",
    passes=("input gradient", "weight gradient"),
)
def noise_on_a_convs_output_gradient(model):
    """The forward pass repeats; the gradient of the conv's output has noise of 1e-6."""

    class Conv(nn.Conv2d):
        def forward(self, x):
            return NoisyGradient.apply(super().forward(x))

    return recast(model, "layer3.1.conv2", Conv)
