"""Faults in the backward pass of norms, activations and the softmax; the forward pass is right."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import GradientFactor, ManualAttention, recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


class VarianceAsConstant(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            variance = x.var(-1, correction=0, keepdim=True)
        return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(variance + self.eps) * self.weight + self.bias


@case("bug", "statistics taken as constants", transformer, module="blocks.1.norm1", passes="input gradient")
def layer_norm_variance_without_gradient(model):
    """The variance is computed under no_grad, so the gradient lacks its term."""
    return recast(model, "blocks.1.norm1", VarianceAsConstant)


class StatisticsAsConstants(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return super().forward(x)
        super().forward(x.detach())  # for the running statistics
        variance, mean = torch.var_mean(x.detach(), (0, 2, 3), correction=0)
        gain = self.weight * torch.rsqrt(variance + self.eps)
        return (x - mean[:, None, None]) * gain[:, None, None] + self.bias[:, None, None]


@case("bug", "statistics taken as constants", resnet, module="layer3.0.bn2", passes="input gradient")
def batch_norm_statistics_without_gradient(model):
    """The batch statistics are detached."""
    return recast(model, "layer3.0.bn2", StatisticsAsConstants)


class GELUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.gelu(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * 0.5 * (1 + torch.erf(x / math.sqrt(2)))  # lacks x times the density


class SiLUFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return F.silu(x)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gate = x.sigmoid()
        return gradient * (gate + x * gate * (1 - gate) * (1 - 1e-4))


class TanhFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (1 - x * x)  # the output belongs here, the input was saved


class SoftmaxFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores: Tensor) -> Tensor:
        weights = scores.softmax(-1)
        ctx.save_for_backward(weights)
        return weights

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        (weights,) = ctx.saved_tensors
        return gradient * weights  # lacks - weights * (gradient * weights).sum(-1)


class Apply(nn.Module):
    """A function of autograd as a module."""

    def __init__(self, function: type[torch.autograd.Function]):
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x)


@case(
    "bug",
    "term missing in a hand-written backward",
    transformer,
    module="blocks.0.act",
    passes="input gradient",
)
def gelu_backward_without_density(model):
    """The derivative of GELU lacks one of its two terms."""
    return replace(model, "blocks.0.act", Apply(GELUFunction))


@case("bug", "term missing in a hand-written backward", autoencoder, module="act2", passes="input gradient")
def silu_backward_off_by_1e_4(model):
    """One term of SiLU's derivative is 1e-4 too small."""
    return replace(model, "act2", Apply(SiLUFunction))


@case("bug", "derivative at the wrong point", two_inputs, module="act", passes="input gradient")
def tanh_backward_of_its_input(model):
    """1 - x^2 for 1 - tanh(x)^2."""
    return replace(model, "act", Apply(TanhFunction))


class SoftmaxByHand(ManualAttention):
    def softmax(self, scores: Tensor) -> Tensor:
        return SoftmaxFunction.apply(scores)


@case(
    "bug",
    "term missing in a hand-written backward",
    transformer,
    module="blocks.1.attention",
    passes=("input gradient", "weight gradient"),
)
def softmax_backward_without_the_sum(model):
    """The backward pass of the softmax lacks the sum over the keys."""
    return recast(model, "blocks.1.attention", SoftmaxByHand)


class StraightThrough(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x + (x.relu() - x).detach()


@case("bug", "straight-through gradient", mlp, module="act2", passes="input gradient")
def relu_straight_through(model):
    """ReLU forward, the identity backward."""
    return replace(model, "act2", StraightThrough())


class LeakyBackward(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() - GradientFactor.apply((-x).relu(), 1e-3) + (-x).relu().detach()


@case("bug", "straight-through gradient", cnn, module="act2", passes="input gradient")
def relu_leaking_backward_only(model):
    """ReLU forward, a leaky ReLU of slope 1e-3 backward."""
    return replace(model, "act2", LeakyBackward())
