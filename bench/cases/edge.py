"""Rewrites that look wrong and are right: other ties, ill-conditioned sums, high rates, dead code."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from bench.backward import own_backward
from bench.case import case, in_place_of, method_of
from bench.cases._edge_tasks import scaled, sensor_30, sensor_1000
from bench.cases._same import ChannelwiseConv2d, SteppedLSTM, UnfoldedConv2d, WrittenLayerNorm
from bench.optimizers import adam, sgd
from bench.surgery import recast
from bench.tasks import CNN, MLP, Task, cnn, mlp, recurrent, resnet, transformer


class OnePassNorm(nn.LayerNorm):
    """The variance as the mean of squares less the square of the mean."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) * torch.rsqrt(variance.clamp_min(0) + self.eps) * self.weight + self.bias


@method_of("pool", ("bit_identical", "round_off"), "other tie-breaking", cnn)
def max_pool_that_shares_ties(self, x):
    """Pooling by ``amax`` shares the gradient among ties; behind ReLU only zeros tie, whose gradient dies."""
    return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))


@method_of("pool", "bug", "right at even sizes alone", cnn)
def max_pool_from_the_other_corner(self, x):
    """Pooling from the other corner: at even sizes the same, at odd ones it drops the other border."""
    return nn.MaxPool2d.forward(self, x.flip(2, 3)).flip(2, 3)


@method_of("pool", ("bit_identical", "round_off"), "other tie-breaking", cnn)
def max_pool_that_multiplies_ties(self, x):
    """The backward pass counts ties several times over, which behind ReLU multiplies a zero."""

    def backward(grad, x):
        spread = [y.repeat_interleave(2, 2).repeat_interleave(2, 3) for y in (grad, F.max_pool2d(x, 2))]
        return spread[0] * (x == spread[1])

    return own_backward(lambda x: F.max_pool2d(x, 2), backward)(x)


@case("round_off", "ill-conditioned sum", sensor_30)
def one_pass_variance_off_centre(model):
    """One-pass variance of readings near 30: the same function, a thousand times the rounding."""
    return recast(model, "norm", OnePassNorm)


@case(("round_off", "reduced_precision"), "ill-conditioned sum", sensor_1000)
def one_pass_variance_far_off_centre(model):
    """One-pass variance of readings near 1000: the same function, of which float32 keeps two digits."""
    return recast(model, "norm", OnePassNorm)


def fast(name: str, at: str, on: Task, layer: type, optimizer: Callable, steps: int) -> None:
    """A case whose module ``at`` computes as ``layer`` does, at a high rate; the float32 curves part."""
    here = type(layer.__name__, (layer,), {"__module__": __name__})
    in_place_of(at, "round_off", "high but stable rate", on, name, optimizer=optimizer, steps=steps)(here)


fast("lstm_at_a_high_rate", "lstm", recurrent, SteppedLSTM, adam(0.1), 80)
fast("cnn_at_a_high_rate", "conv2", cnn, ChannelwiseConv2d, sgd(0.3), 60)
fast("resnet_at_a_high_rate", "layer2.1.conv1", resnet, UnfoldedConv2d, sgd(0.3), 30)
fast("transformer_at_a_high_rate", "blocks.1.norm1", transformer, WrittenLayerNorm, adam(0.3), 60)


@case("round_off", "nearly dead branch", scaled)
def scaled_branch_rewritten(model):
    """The 1x1 convs of a branch scaled by 1e-6, one over halves of its channels."""
    return recast(model, "block.down", ChannelwiseConv2d)


@case("bit_identical", "nothing rewritten", cnn)
def the_network_itself(model):
    """The candidate is the reference."""
    return model


@in_place_of("", "bit_identical", "renamed", recurrent, "modules_renamed")
class ModulesRenamed(nn.Module):
    """The same modules under other names, held by another class."""

    def __init__(self, net):
        super().__init__()
        self.encoder, self.step, self.classifier = net.lstm, net.cell, net.fc

    def forward(self, x):
        states, _ = self.encoder(x)
        h = x.new_zeros(len(x), self.step.hidden_size)
        for state in states.unbind(1):
            h = self.step(state, h)
        return self.classifier(h)


@case("bit_identical", "renamed", mlp)
def modules_in_a_sequential(model):
    """The layers of the network as a plain ``nn.Sequential``."""
    return nn.Sequential(*model.children())


@case("bit_identical", "dead code", mlp)
def debug_head_left_in(model):
    """A second head with weights of its own is computed and thrown away."""

    class Debugged(MLP):
        def forward(self, x):
            self.probe(x)
            return super().forward(x)

    model.probe = nn.Linear(20, 3)
    return recast(model, "", Debugged)


@case(("bit_identical", "round_off"), "dead code", cnn)
def unused_layer_times_zero(model):
    """An unused layer's weights enter the logits times zero, so that every parameter has a gradient."""

    class Touched(CNN):
        def forward(self, x):
            return super().forward(x) + 0.0 * sum(p.sum() for p in self.spare.parameters())

    model.spare = nn.Linear(16, 5)
    return recast(model, "", Touched)
