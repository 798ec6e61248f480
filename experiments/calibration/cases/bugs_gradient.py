"""Faults in the backward pass of a linear or conv layer; the forward pass is that of the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import GradientFactor, Halves, recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, resnet, transformer, two_inputs


class SecondHalfDetached(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x.detach())], self.dim)


@case("bug", "one half detached from its input", mlp, module="fc2", passes="input gradient")
def linear_half_detached(model):
    """The second half is fed a detached input."""
    return replace(model, "fc2", SecondHalfDetached(model.fc2))


@case("bug", "one half detached from its input", resnet, module="layer2.1.conv1", passes="input gradient")
def conv_half_detached(model):
    """The second half is fed a detached input."""
    return replace(model, "layer2.1.conv1", SecondHalfDetached(model.layer2[1].conv1))


class InputGradientTimes(nn.Module):
    """A layer that sends back ``factor`` times the gradient of its input."""

    def __init__(self, layer: nn.Module, factor: float):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(GradientFactor.apply(x, self.factor))


@case("bug", "input gradient times a factor", autoencoder, module="down2", passes="input gradient")
def input_gradient_doubled(model):
    """The two halves of the input gradient are added twice."""
    return replace(model, "down2", InputGradientTimes(model.down2, 2.0))


@case("bug", "input gradient times a factor", mlp, module="fc3", passes="input gradient")
def input_gradient_off_by_a_thousandth(model):
    """A factor of 0.999."""
    return replace(model, "fc3", InputGradientTimes(model.fc3, 0.999))


@case("bug", "input gradient times a factor", cnn, module="conv2", passes="input gradient")
def input_gradient_off_by_a_millionth(model):
    """A factor of 1 + 1e-6."""
    return replace(model, "conv2", InputGradientTimes(model.conv2, 1 + 1e-6))


@case("bug", "input gradient times a factor", transformer, module="blocks.1.up", passes="input gradient")
def input_gradient_off_by_1e_8(model):
    """A factor of 1 + 1e-8: exactly one in float32."""
    return replace(model, "blocks.1.up", InputGradientTimes(model.blocks[1].up, 1 + 1e-8))


class HalfOfOutputGradient(Halves):
    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), GradientFactor.apply(self.second(x), 1.001)
        return torch.cat([first, second], self.dim)


@case(
    "bug",
    "output gradient times a factor in one half",
    autoencoder,
    module="down2",
    passes=("input gradient", "weight gradient"),
)
def output_gradient_of_half_off_by_a_thousandth(model):
    """The gradient that enters the second half is 0.1 % too large."""
    return replace(model, "down2", HalfOfOutputGradient(model.down2))


class AveragedHalves(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return GradientFactor.apply(super().forward(x), 0.5)


@case(
    "bug",
    "gradient averaged over the halves",
    two_inputs,
    module="conv",
    passes=("input gradient", "weight gradient"),
)
def gradient_averaged_over_the_halves(model):
    """The gradient is averaged over the two parts, as if they were replicas."""
    return replace(model, "conv", AveragedHalves(model.conv))


class SecondWeightDetached(Halves):
    def forward(self, x: Tensor) -> Tensor:
        layer = self.second
        second = F.conv2d(x, layer.weight.detach(), layer.bias, layer.stride, layer.padding)
        return torch.cat([self.first(x), second], 1)


@case("bug", "no weight gradient in one half", resnet, module="layer1.1.conv2", passes="weight gradient")
def conv_half_without_weight_gradient(model):
    """The weight of the second conv is detached in the forward pass."""
    return replace(model, "layer1.1.conv2", SecondWeightDetached(model.layer1[1].conv2))


class DetachedHead(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.detach())


@case("bug", "tied weight detached", transformer, module=("head", "embed"), passes="weight gradient")
def tied_head_detached(model):
    """The head uses the embedding's weight without sending it a gradient."""
    return recast(model, "head", DetachedHead)


class FirstHalfWithoutGraph(Halves):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.first(x)
        return torch.cat([first, self.second(x)], self.dim)


@case(
    "bug",
    "no_grad left in",
    transformer,
    module="blocks.0.down",
    passes=("input gradient", "weight gradient"),
)
def first_half_under_no_grad(model):
    """One half of the layer runs under a forgotten no_grad."""
    return replace(model, "blocks.0.down", FirstHalfWithoutGraph(model.blocks[0].down))
