"""Right rewrites under settings at which the training itself falls over, the reference's too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.cases._same import (
    ChannelwiseConv2d,
    HalvedLinear,
    SteppedLSTM,
    SummedLinear,
    UnfoldedConv2d,
    WrittenGRUCell,
    WrittenLayerNorm,
)
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


def sgd(lr: float, momentum: float = 0.9, weight_decay: float = 0.0):
    """A maker of SGD."""
    return lambda params: torch.optim.SGD(params, lr=lr, momentum=momentum, weight_decay=weight_decay)


def adam(lr: float):
    """A maker of Adam."""
    return lambda params: torch.optim.Adam(params, lr=lr)


@case("unstable", "learning rate too high", mlp, optimizer=sgd(20.0), steps=20)
def exploding_mlp(model):
    """A linear layer halved along its inputs; SGD at 20 overflows within ten steps."""
    return recast(model, "fc1", HalvedLinear)


@case("unstable", "momentum too high", mlp, optimizer=sgd(5.0, momentum=0.99), steps=60)
def swinging_mlp(model):
    """A linear layer as a sum of products; momentum 0.99 throws the loss up by four decades."""
    return recast(model, "fc2", SummedLinear)


@case(
    "unstable",
    "learning rate too high",
    mlp,
    optimizer=lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9),
    steps=22,
)
def rmsprop_mlp(model):
    """A linear layer halved along its inputs; RMSprop with momentum at 0.1 drives the loss past 1000."""
    return recast(model, "fc2", HalvedLinear)


@case("unstable", "learning rate too high", cnn, optimizer=sgd(20.0), steps=40)
def exploding_cnn(model):
    """The strided conv as a matrix product over unfolded patches; SGD at 20."""
    return recast(model, "conv2", UnfoldedConv2d)


@case("unstable", "Adam's rate too high", cnn, optimizer=adam(10.0), steps=20)
def adam_cnn(model):
    """The strided conv as the sum over two halves of its channels; Adam at 10."""
    return recast(model, "conv2", ChannelwiseConv2d)


@case("unstable", "learning rate too high", recurrent, optimizer=sgd(6.0), steps=40)
def exploding_lstm(model):
    """The LSTM stepped by hand; SGD at 6."""
    return recast(model, "lstm", SteppedLSTM)


@case("unstable", "Adam's rate too high", recurrent, optimizer=adam(10.0), steps=40)
def adam_recurrent(model):
    """The GRU cell written out; Adam at 10."""
    return recast(model, "cell", WrittenGRUCell)


@case("unstable", "edge of stability", autoencoder, optimizer=sgd(1.6), steps=40)
def autoencoder_past_the_edge(model):
    """A conv over unfolded patches; SGD at 1.6 looks healthy for 20 steps, then overflows (1.4 is stable)."""
    return recast(model, "down2", UnfoldedConv2d)


@case("unstable", "Adam's rate too high", autoencoder, optimizer=adam(2.0), steps=30)
def adam_autoencoder(model):
    """A conv as the sum over two halves of its channels; Adam at 2."""
    return recast(model, "down2", ChannelwiseConv2d)


@case("unstable", "edge of stability", transformer, optimizer=sgd(0.5), steps=40)
def transformer_past_the_edge(model):
    """LayerNorm written out; SGD at 0.5 overflows near step 30, a few steps sooner or later by rounding."""
    return recast(model, "blocks.0.norm2", WrittenLayerNorm)


@case("unstable", "Adam's rate too high", transformer, optimizer=adam(3.0), steps=20)
def adam_transformer(model):
    """A linear layer halved along its inputs; Adam at 3."""
    return recast(model, "blocks.1.down", HalvedLinear)


@case("unstable", "learning rate too high", resnet, optimizer=sgd(60.0), steps=20)
def exploding_resnet(model):
    """A conv as the sum over two halves of its channels; SGD at 60."""
    return recast(model, "layer2.0.conv1", ChannelwiseConv2d)


@case("unstable", "weight decay too high", resnet, optimizer=sgd(0.1, 0.0, 45.0), steps=20)
def resnet_with_runaway_weight_decay(model):
    """A conv over unfolded patches; decay 45 at rate 0.1 multiplies every weight by -3.5 a step."""
    return recast(model, "layer3.0.conv1", UnfoldedConv2d)


@case(
    "unstable",
    "loss summed, not averaged",
    cnn,
    optimizer=sgd(1.0),
    steps=34,
    loss=lambda logits, targets: F.cross_entropy(logits, targets, reduction="sum"),
)
def cnn_with_a_summed_loss(model):
    """The first conv over unfolded patches; the loss is summed over a batch of twelve."""
    return recast(model, "conv1", UnfoldedConv2d)


@case("unstable", "learning rate too high", two_inputs, optimizer=sgd(10.0), steps=40)
def exploding_two_inputs(model):
    """The table branch's linear layer halved along its inputs, as two layers; SGD at 10."""

    class Halves(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.left, self.right = nn.Linear(3, 6, bias=False), nn.Linear(4, 6)
            with torch.no_grad():
                self.left.weight.copy_(layer.weight[:, :3])
                self.right.weight.copy_(layer.weight[:, 3:])
                self.right.bias.copy_(layer.bias)

        def forward(self, x):
            return self.left(x[:, :3]) + self.right(x[:, 3:])

    model.table = Halves(model.table)
    return model
