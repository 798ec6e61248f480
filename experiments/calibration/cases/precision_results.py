"""Reduced precision by rounding: results stored in half, weights and inputs on an eight-bit grid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import fake_quantise, recast
from experiments.calibration.tasks import MLP, cnn, mlp, resnet


@case("reduced_precision", "half logits", resnet, module="fc", passes="forward")
def logits_stored_in_float16(model):
    """The last layer multiplies in full and hands its logits on in float16."""

    class Linear(nn.Linear):
        def forward(self, x):
            return super().forward(x).half().to(x.dtype)

    return recast(model, "fc", Linear)


@case("reduced_precision", "half result", mlp, module="", passes="forward")
def hidden_state_stored_in_bfloat16(model):
    """A line between two layers of the network's forward stores the hidden state in bfloat16."""

    class LeanMLP(MLP):
        def forward(self, x):
            hidden = self.act1(self.fc1(x)).bfloat16().to(x.dtype)
            return self.fc3(self.act2(self.fc2(hidden)))

    return recast(model, "", LeanMLP)


@case("reduced_precision", "half result", cnn, module="bn2", passes="forward")
def normalised_maps_stored_in_bfloat16(model):
    """BatchNorm's result is stored in bfloat16."""

    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            return super().forward(x).bfloat16().to(x.dtype)

    return recast(model, "bn2", Norm)


@case("reduced_precision", "fake quantisation", mlp, module="fc1", passes="forward")
def eight_bit_linear(model):
    """Weight and input on grids of eight bits with power-of-two steps; gradients pass straight through."""

    class Linear(nn.Linear):
        def forward(self, x):
            return F.linear(fake_quantise(x), fake_quantise(self.weight), self.bias)

    return recast(model, "fc1", Linear)


@case("reduced_precision", "fake quantisation", cnn, module="conv1", passes="forward")
def eight_bit_conv_weight(model):
    """The first conv's weight alone on a grid of eight bits."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, fake_quantise(weight), bias)

    return recast(model, "conv1", Conv)
