"""Faults in the forward pass: factors, activations, residuals, the order of things."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import (
    CNN,
    Transformer,
    TransformerBlock,
    TwoInputs,
    autoencoder,
    cnn,
    mlp,
    resnet,
    transformer,
    two_inputs,
)
from models.resnet import BasicBlock


class Gain(nn.Module):
    """A layer whose output is scaled by a constant, as when scales of a quantised copy are left in."""

    def __init__(self, layer: nn.Module, gain: float):
        super().__init__()
        self.layer, self.gain = layer, gain

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.gain


@case("bug", "wrong factor", autoencoder, module="up1", passes="forward")
def factor_a_half(model):
    """The mean of two halves where their sum belongs."""
    return replace(model, "up1", Gain(model.up1, 0.5))


@case("bug", "wrong factor", resnet, module="layer3.1.conv1", passes="forward")
def factor_off_by_a_thousandth(model):
    """A factor of 0.999 before a BatchNorm, which hides all but eps and the running statistics."""
    return replace(model, "layer3.1.conv1", Gain(model.layer3[1].conv1, 0.999))


@case("bug", "wrong factor", mlp, module="fc2", passes="forward")
def factor_off_by_a_millionth(model):
    """A factor of 1 + 1e-6."""
    return replace(model, "fc2", Gain(model.fc2, 1 + 1e-6))


@case("bug", "wrong factor", transformer, module="blocks.0.down", passes="forward")
def factor_off_by_1e_7(model):
    """A factor of 1 + 1e-7: one ulp in float32."""
    return replace(model, "blocks.0.down", Gain(model.blocks[0].down, 1 + 1e-7))


@case("bug", "wrong factor", cnn, module="fc", passes="forward")
def factor_off_by_1e_8(model):
    """A factor of 1 + 1e-8: exactly one in float32."""
    return replace(model, "fc", Gain(model.fc, 1 + 1e-8))


class ShortGELU(nn.Module):
    """GELU with 1 / sqrt(2) to a few digits."""

    def __init__(self, root: float):
        super().__init__()
        self.root = root

    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1 + torch.erf(x * self.root))


@case("bug", "constant with too few digits", transformer, module="blocks.1.act", passes="forward")
def gelu_constant_to_four_digits(model):
    """0.7071 for 1 / sqrt(2), off by 1e-5."""
    return replace(model, "blocks.1.act", ShortGELU(0.7071))


@case("bug", "constant with too few digits", cnn, module="act3", passes="forward")
def gelu_constant_to_seven_digits(model):
    """0.7071068 for 1 / sqrt(2), off by 3e-8: the same number in float32."""
    return replace(model, "act3", ShortGELU(0.7071068))


@case("bug", "GELU by tanh", transformer, module="blocks.0.act", passes="forward")
def gelu_by_tanh_in_block(model):
    """The tanh formula for the exact GELU."""
    return replace(model, "blocks.0.act", nn.GELU(approximate="tanh"))


@case("bug", "activation missing", mlp, module="act2", passes="forward")
def second_relu_missing(model):
    """The activation was lost when two layers were merged."""
    return replace(model, "act2", nn.Identity())


@case("bug", "activation missing", resnet, module="layer4.0.act1", passes="forward")
def inner_relu_missing(model):
    """One of seventeen ReLUs is gone."""
    return replace(model, "layer4.0.act1", nn.Identity())


class QuickGELU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(1.702 * x)


@case("bug", "another activation", autoencoder, module="act1", passes="forward")
def silu_with_a_slope(model):
    """x sigmoid(1.702 x) for x sigmoid(x)."""
    return replace(model, "act1", QuickGELU())


@case("bug", "another activation", mlp, module="act1", passes="forward")
def relu_with_a_leak(model):
    """A leaky ReLU of slope 1e-5."""
    return replace(model, "act1", nn.LeakyReLU(1e-5))


class WithoutAttentionResidual(TransformerBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.attention(self.norm1(x))
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


@case("bug", "residual missing", transformer, module="blocks.1", passes="forward")
def attention_residual_missing(model):
    """The block forgets to add its input to the attention."""
    return recast(model, "blocks.1", WithoutAttentionResidual)


class WithoutShortcut(BasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        return self.act2(self.bn2(self.conv2(self.act1(self.bn1(self.conv1(x))))))


@case("bug", "residual missing", resnet, module="layer3.1", passes="forward")
def shortcut_missing(model):
    """A block without its identity shortcut."""
    return recast(model, "layer3.1", WithoutShortcut)


class NormalisedResidual(TransformerBlock):
    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(x)
        x = x + self.attention(x)
        return x + self.drop(self.down(self.act(self.up(self.norm2(x)))))


@case("bug", "layers in another order", transformer, module="blocks.0", passes="forward")
def residual_taken_after_the_norm(model):
    """The residual adds the normalised input."""
    return recast(model, "blocks.0", NormalisedResidual)


class ActivationBeforeNorm(CNN):
    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act1(self.bn1(self.conv1(x))))
        x = self.bn2(self.act2(self.conv2(x)))
        x = self.act3(self.norm3(self.conv3(x)))
        return self.fc(self.avg(x).flatten(1))


@case("bug", "layers in another order", cnn, module="", passes="forward")
def activation_before_the_norm(model):
    """The network runs one activation before its BatchNorm."""
    return recast(model, "", ActivationBeforeNorm)


class TableFirst(TwoInputs):
    def forward(self, signal: Tensor, table: Tensor) -> dict[str, Tensor]:
        features = torch.cat([self.act(self.table(table)), self.act(self.conv(signal)).mean(2)], 1)
        return {"logits": self.joint(features), "features": features}


@case("bug", "concatenated in another order", two_inputs, module="", passes="forward")
def branches_joined_in_other_order(model):
    """The two branches of six features each are joined the other way round."""
    return recast(model, "", TableFirst)


class PositionFromOne(Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.position[1 : tokens.shape[1] + 1]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


@case("bug", "position off by one", transformer, module="", passes="forward")
def positions_counted_from_one(model):
    """The first token takes the second position."""
    return recast(model, "", PositionFromOne)
