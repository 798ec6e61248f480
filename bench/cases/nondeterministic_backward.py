"""Candidates whose forward pass repeats and whose backward pass does not."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor, nn

from bench.backward import Backward, own_backward
from bench.case import GRADIENTS, method_of
from bench.tasks import resnet, transformer


@method_of("embed", "nondeterministic", "random tie-break", transformer, passes="weight gradient")
def equal_tokens_added_in_random_order(self, tokens):
    """The embedding's gradient sorts the tokens and breaks ties at random, so sums differ in order."""

    def backward(grad: Tensor, tokens: Tensor, table: Tensor) -> tuple[None, Tensor]:
        flat, rows = tokens.flatten(), grad.flatten(0, -2)
        order = sorted(range(len(flat)), key=lambda i: (int(flat[i]), random.random()))
        order = torch.tensor(order, device=grad.device)
        return None, torch.zeros_like(table).index_add_(0, flat[order], rows[order])

    return own_backward(lambda tokens, table: table[tokens], backward)(tokens, self.weight)


@method_of("layer3.1.conv2", "nondeterministic", "noisy gradient", resnet, passes=GRADIENTS)
def noise_on_a_convs_output_gradient(self, x):
    """The forward pass repeats; the gradient of the conv's output has noise of 1e-6."""

    def noisy(grad: Tensor) -> Tensor:
        noise = np.random.default_rng().standard_normal(tuple(grad.shape))
        return grad * (1 + 1e-6 * torch.as_tensor(noise, dtype=grad.dtype, device=grad.device))

    return Backward.apply(nn.Conv2d.forward(self, x), noisy)
