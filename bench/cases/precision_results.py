"""Reduced precision by rounding: results stored in half, weights and inputs on an eight-bit grid."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from bench.case import method_of
from bench.cases._lowbits import fake_quantise
from bench.tasks import cnn, mlp, resnet


@method_of("fc", "reduced_precision", "half logits", resnet)
def logits_stored_in_float16(self, x):
    """The last layer multiplies in full and hands its logits on in float16."""
    return nn.Linear.forward(self, x).half().to(x.dtype)


@method_of("", "reduced_precision", "half result", mlp)
def hidden_state_stored_in_bfloat16(self, x):
    """A line between two layers of the network's forward stores the hidden state in bfloat16."""
    hidden = self.act1(self.fc1(x)).bfloat16().to(x.dtype)
    return self.fc3(self.act2(self.fc2(hidden)))


@method_of("bn2", "reduced_precision", "half result", cnn)
def normalised_maps_stored_in_bfloat16(self, x):
    """BatchNorm's result is stored in bfloat16."""
    return nn.BatchNorm2d.forward(self, x).bfloat16().to(x.dtype)


@method_of("fc1", "reduced_precision", "fake quantisation", mlp)
def eight_bit_linear(self, x):
    """Weight and input on grids of eight bits with power-of-two steps; gradients pass straight through."""
    return F.linear(fake_quantise(x), fake_quantise(self.weight), self.bias)


@method_of("conv1", "reduced_precision", "fake quantisation", cnn, "_conv_forward")
def eight_bit_conv_weight(self, x, weight, bias):
    """The first conv's weight alone on a grid of eight bits."""
    return nn.Conv2d._conv_forward(self, x, fake_quantise(weight), bias)
