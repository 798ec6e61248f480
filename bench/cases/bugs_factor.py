"""Faults in the forward pass: factors, activations, residuals, the order of things."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from bench.case import in_place_of, method_of
from bench.tasks import Task, autoencoder, cnn, mlp, resnet, transformer, two_inputs


class Gain(nn.Module):
    """A layer whose output is scaled by a constant, as when scales of a quantised copy are left in."""

    def __init__(self, layer: nn.Module, gain: float):
        super().__init__()
        self.layer, self.gain = layer, gain

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


def gained(name: str, at: str, on: Task, gain: float) -> None:
    in_place_of(at, "bug", "wrong factor", on, name)(lambda layer: Gain(layer, gain))


gained("factor_a_half", "up1", autoencoder, 0.5)  # the mean of two halves where their sum belongs
# Before a BatchNorm, which hides all but eps and the running statistics.
gained("factor_off_by_a_thousandth", "layer3.1.conv1", resnet, 0.999)
gained("factor_off_by_a_millionth", "fc2", mlp, 1 + 1e-6)
gained("factor_off_by_1e_7", "blocks.0.down", transformer, 1 + 1e-7)  # one ulp in float32
gained("factor_off_by_1e_8", "fc", cnn, 1 + 1e-8)  # exactly one in float32


class ShortGELU(nn.Module):
    """GELU with 1 / sqrt(2) to a few digits."""

    def __init__(self, root: float):
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * self.root))


def activated(name: str, at: str, kind: str, on: Task, activation: nn.Module) -> None:
    in_place_of(at, "bug", kind, on, name)(lambda _: copy.deepcopy(activation))


SHORT, MISSING = "constant with too few digits", "activation missing"
activated(
    "gelu_constant_to_four_digits", "blocks.1.act", SHORT, transformer, ShortGELU(0.7071)
)  # off by 1e-5
# Off by 3e-8: the same number in float32.
activated("gelu_constant_to_seven_digits", "act3", SHORT, cnn, ShortGELU(0.7071068))
activated("gelu_by_tanh_in_block", "blocks.0.act", "GELU by tanh", transformer, nn.GELU(approximate="tanh"))
# The activation was lost when two layers were merged.
activated("second_relu_missing", "act2", MISSING, mlp, nn.Identity())
activated("inner_relu_missing", "layer4.0.act1", MISSING, resnet, nn.Identity())  # one of seventeen ReLUs
activated("relu_with_a_leak", "act1", "another activation", mlp, nn.LeakyReLU(1e-5))


@method_of("act1", "bug", "another activation", autoencoder, base=nn.Module)
def silu_with_a_slope(self, x: Tensor) -> Tensor:
    """x sigmoid(1.702 x) for x sigmoid(x)."""
    return x * torch.sigmoid(1.702 * x)


@method_of("blocks.1", "bug", "residual missing", transformer)
def attention_residual_missing(self, x: Tensor) -> Tensor:
    """The block forgets to add its input to the attention."""
    x = self.attention(self.norm1(x))
    return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


@method_of("layer3.1", "bug", "residual missing", resnet)
def shortcut_missing(self, x: Tensor) -> Tensor:
    """A block without its identity shortcut."""
    return self.act2(self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))))


@method_of("blocks.0", "bug", "layers in another order", transformer)
def residual_taken_after_the_norm(self, x: Tensor) -> Tensor:
    """The residual adds the normalised input."""
    x = self.norm1(x)
    x = x + self.attention(x)
    return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


@method_of("", "bug", "layers in another order", cnn)
def activation_before_the_norm(self, x: Tensor) -> Tensor:
    """The network runs one activation before its BatchNorm."""
    x = self.pool(self.act1(self.bn1(self.conv1(x))))
    x = self.bn2(self.act2(self.conv2(x)))
    x = self.act3(self.norm3(self.conv3(x)))
    return self.fc(self.avg(x).flatten(1))


@method_of("", "bug", "concatenated in another order", two_inputs)
def branches_joined_in_other_order(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
    """The two branches of six features each are joined the other way round."""
    features = torch.cat([self.act(self.table(table)), self.act(self.conv(signal)).mean(2)], 1)
    return {"logits": self.joint(features), "features": features}


@method_of("", "bug", "position off by one", transformer, "place")
def positions_counted_from_one(self, tokens: Tensor) -> Tensor:
    """The first token takes the second position."""
    return self.embed(tokens) + self.position[1 : tokens.shape[1] + 1]
