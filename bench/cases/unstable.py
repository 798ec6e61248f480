"""Right rewrites under settings at which the training itself diverges, the reference's too."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of
from bench.cases._same import (
    ChannelwiseConv2d,
    HalvedLinear,
    SteppedLSTM,
    SummedLinear,
    UnfoldedConv2d,
    WrittenGRUCell,
    WrittenLayerNorm,
)
from bench.optimizers import adam, sgd
from bench.tasks import Task, autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs

HIGH, ADAM, EDGE = "learning rate too high", "Adam's rate too high", "edge of stability"


def trained(name: str, at: str, kind: str, on: Task, layer: type, optimizer, steps: int, **options) -> None:
    """A case whose module ``at`` computes as ``layer`` does, trained with settings that it cannot stand."""
    here = type(layer.__name__, (layer,), {"__module__": __name__})
    in_place_of(at, "unstable", kind, on, name, optimizer=optimizer, steps=steps, **options)(here)


# Overflows within ten steps.
trained("exploding_mlp", "fc1", HIGH, mlp, HalvedLinear, sgd(20.0), 20)
# Momentum 0.99 throws the loss up by four decades.
trained("swinging_mlp", "fc2", "momentum too high", mlp, SummedLinear, sgd(5.0, momentum=0.99), 60)
# RMSprop with momentum drives the loss past 1000.
rmsprop = partial(torch.optim.RMSprop, lr=0.1, momentum=0.9)
trained("rmsprop_mlp", "fc2", HIGH, mlp, HalvedLinear, rmsprop, 22)

trained("exploding_cnn", "conv2", HIGH, cnn, UnfoldedConv2d, sgd(20.0), 40)
trained("adam_cnn", "conv2", ADAM, cnn, ChannelwiseConv2d, adam(10.0), 20)
# The loss is summed over a batch of twelve.
summed, name = partial(F.cross_entropy, reduction="sum"), "cnn_with_a_summed_loss"
trained(name, "conv1", "loss summed, not averaged", cnn, UnfoldedConv2d, sgd(1.0), 34, loss=summed)

trained("exploding_lstm", "lstm", HIGH, recurrent, SteppedLSTM, sgd(6.0), 40)
trained("adam_recurrent", "cell", ADAM, recurrent, WrittenGRUCell, adam(10.0), 40)

# Looks healthy for 20 steps, then overflows (1.4 is stable).
trained("autoencoder_past_the_edge", "down2", EDGE, autoencoder, UnfoldedConv2d, sgd(1.6), 40)
trained("adam_autoencoder", "down2", ADAM, autoencoder, ChannelwiseConv2d, adam(2.0), 30)

# Overflows near step 30, a few steps sooner or later by rounding.
trained("transformer_past_the_edge", "blocks.0.norm2", EDGE, transformer, WrittenLayerNorm, sgd(0.5), 40)
trained("adam_transformer", "blocks.1.down", ADAM, transformer, HalvedLinear, adam(3.0), 20)

trained("exploding_resnet", "layer2.0.conv1", HIGH, resnet, ChannelwiseConv2d, sgd(60.0), 20)
# Decay 45 at rate 0.1 multiplies every weight by -3.5 a step.
decay, name = sgd(momentum=0.0, weight_decay=45.0), "resnet_with_runaway_weight_decay"
trained(name, "layer3.0.conv1", "weight decay too high", resnet, UnfoldedConv2d, decay, 20)


@in_place_of("table", "unstable", HIGH, two_inputs, "exploding_two_inputs", optimizer=sgd(10.0), steps=40)
class Halves(nn.Module):
    """The table branch's linear layer halved along its inputs, as two layers; SGD at 10."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.left, self.right = nn.Linear(3, 6, bias=False), nn.Linear(4, 6)
        with torch.no_grad():
            self.left.weight.copy_(layer.weight[:, :3])
            self.right.weight.copy_(layer.weight[:, 3:])
            self.right.bias.copy_(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x[:, :3]) + self.right(x[:, 3:])
