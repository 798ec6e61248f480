"""Faults in the backward pass of norms, activations and the softmax; the forward pass is right."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import own_backward, scaled_gradient
from bench.case import GRADIENTS, method_of
from bench.cases._bug_parts import ManualAttention
from bench.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


@method_of("blocks.1.norm1", "bug", "statistics taken as constants", transformer, passes="input gradient")
def layer_norm_variance_without_gradient(self, x: Tensor) -> Tensor:
    """The variance is computed under no_grad, so the gradient lacks its term."""
    with torch.no_grad():
        variance = x.var(-1, correction=0, keepdim=True)
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@method_of("layer3.0.bn2", "bug", "statistics taken as constants", resnet, passes="input gradient")
def batch_norm_statistics_without_gradient(self, x: Tensor) -> Tensor:
    """The batch statistics are detached."""
    if not self.training:
        return nn.BatchNorm2d.forward(self, x)
    nn.BatchNorm2d.forward(self, x.detach())  # for the running statistics
    variance, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
    gain = self.weight * torch.rsqrt(variance + self.eps)
    return (x - mean[:, None, None]) * gain[:, None, None] + self.bias[:, None, None]


TERM = "term missing in a hand-written backward"


@method_of("blocks.0.act", "bug", TERM, transformer, base=nn.Module, passes="input gradient")
def gelu_backward_without_density(self, x: Tensor) -> Tensor:
    """The derivative of GELU lacks one of its two terms: x times the density."""
    return own_backward(F.gelu, lambda g, x: g * 0.5 * (1 + torch.erf(x / math.sqrt(2))))(x)


@method_of("act2", "bug", TERM, autoencoder, base=nn.Module, passes="input gradient")
def silu_backward_off_by_1e_4(self, x: Tensor) -> Tensor:
    """One term of SiLU's derivative is 1e-4 too small."""

    def backward(gradient: Tensor, x: Tensor) -> Tensor:
        gate = x.sigmoid()
        return gradient * (gate + x * gate * (1 - gate) * (1 - 1e-4))

    return own_backward(F.silu, backward)(x)


@method_of("act", "bug", "derivative at the wrong point", two_inputs, base=nn.Module, passes="input gradient")
def tanh_backward_of_its_input(self, x: Tensor) -> Tensor:
    """1 - x^2 for 1 - tanh(x)^2: the input was saved where the output belongs."""
    return own_backward(torch.tanh, lambda g, x: g * (1 - x * x))(x)


@method_of("blocks.1.attention", "bug", TERM, transformer, "softmax", ManualAttention, passes=GRADIENTS)
def softmax_backward_without_the_sum(self, scores: Tensor) -> Tensor:
    """The backward pass of the softmax lacks - weights * (gradient * weights).sum(-1)."""
    return own_backward(lambda s: s.softmax(-1), lambda g, s: g * s.softmax(-1))(scores)


@method_of("act2", "bug", "straight-through gradient", mlp, base=nn.Module, passes="input gradient")
def relu_straight_through(self, x: Tensor) -> Tensor:
    """ReLU forward, the identity backward."""
    return x + (x.relu() - x).detach()


@method_of("act2", "bug", "straight-through gradient", cnn, base=nn.Module, passes="input gradient")
def relu_leaking_backward_only(self, x: Tensor) -> Tensor:
    """ReLU forward, a leaky ReLU of slope 1e-3 backward."""
    return x.relu() - scaled_gradient((-x).relu(), 1e-3) + (-x).relu().detach()
