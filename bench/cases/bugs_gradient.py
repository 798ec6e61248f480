"""Faults in the backward pass of a linear or conv layer; the forward pass is that of the reference."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import scaled_gradient
from bench.case import GRADIENTS, in_place_of, method_of
from bench.cases._bug_parts import Halves
from bench.tasks import Task, autoencoder, cnn, mlp, resnet, transformer, two_inputs


class SecondHalfDetached(Halves):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x.detach())], self.dim)


DETACHED = "one half detached from its input"
for name, at, on in (("linear_half_detached", "fc2", mlp), ("conv_half_detached", "layer2.1.conv1", resnet)):
    in_place_of(at, "bug", DETACHED, on, name, passes="input gradient")(SecondHalfDetached)


class InputGradientTimes(nn.Module):
    """A layer that sends back ``factor`` times the gradient of its input."""

    def __init__(self, layer: nn.Module, factor: float):
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(scaled_gradient(x, self.factor))


def times(name: str, at: str, on: Task, factor: float) -> None:
    make = in_place_of(at, "bug", "input gradient times a factor", on, name, passes="input gradient")
    make(lambda layer: InputGradientTimes(layer, factor))


times("input_gradient_doubled", "down2", autoencoder, 2.0)  # as if two halves of it were added twice
times("input_gradient_off_by_a_thousandth", "fc3", mlp, 0.999)
times("input_gradient_off_by_a_millionth", "conv2", cnn, 1 + 1e-6)
times("input_gradient_off_by_1e_8", "blocks.1.up", transformer, 1 + 1e-8)  # exactly one in float32


ONE_HALF, NO_WEIGHT = "output gradient times a factor in one half", "no weight gradient in one half"
NAME = "output_gradient_of_half_off_by_a_thousandth"


@in_place_of("down2", "bug", ONE_HALF, autoencoder, NAME, passes=GRADIENTS)
class HalfOfOutputGradient(Halves):
    """The gradient that enters the second half is 0.1 % too large."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.first(x), scaled_gradient(self.second(x), 1.001)
        return torch.cat([first, second], self.dim)


AVERAGED = "gradient averaged over the halves"


@in_place_of("conv", "bug", AVERAGED, two_inputs, "gradient_averaged_over_the_halves", passes=GRADIENTS)
class AveragedHalves(Halves):
    """The gradient is averaged over the two parts, as if they were replicas."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled_gradient(super().forward(x), 0.5)


NAME = "conv_half_without_weight_gradient"


@in_place_of("layer1.1.conv2", "bug", NO_WEIGHT, resnet, NAME, passes="weight gradient")
class SecondWeightDetached(Halves):
    """The weight of the second conv is detached in the forward pass."""

    def forward(self, x: Tensor) -> Tensor:
        layer = self.second
        second = F.conv2d(x, layer.weight.detach(), layer.bias, layer.stride, layer.padding)
        return torch.cat([self.first(x), second], 1)


@method_of(
    "head", "bug", "tied weight detached", transformer, module=("head", "embed"), passes="weight gradient"
)
def tied_head_detached(self, x: Tensor) -> Tensor:
    """The head uses the embedding's weight without sending it a gradient."""
    return F.linear(x, self.weight.detach())


@in_place_of(
    "blocks.0.down", "bug", "no_grad left in", transformer, "first_half_under_no_grad", passes=GRADIENTS
)
class FirstHalfWithoutGraph(Halves):
    """One half of the layer runs under a forgotten no_grad."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            first = self.first(x)
        return torch.cat([first, self.second(x)], self.dim)
