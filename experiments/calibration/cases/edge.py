"""Rewrites that look wrong and are right: other ties, ill-conditioned sums, high rates, dead code."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import Function

from experiments.calibration.case import case
from experiments.calibration.cases._edge_tasks import scaled, sensor_30, sensor_1000
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.cases._same import (
    ChannelwiseConv2d,
    SteppedLSTM,
    UnfoldedConv2d,
    WrittenLayerNorm,
)
from experiments.calibration.tasks import CNN, MLP, cnn, mlp, recurrent, resnet, transformer


class OnePassNorm(nn.LayerNorm):
    """The variance as the mean of squares less the square of the mean."""

    def forward(self, x):
        mean = x.mean(-1, keepdim=True)
        variance = x.square().mean(-1, keepdim=True) - mean.square()
        return (x - mean) * torch.rsqrt(variance.clamp_min(0) + self.eps) * self.weight + self.bias


class MaskedPool(Function):
    """2x2 max-pool that gives the gradient to every entry equal to the maximum, each the whole of it."""

    @staticmethod
    def forward(ctx, x):
        y = F.max_pool2d(x, 2)
        ctx.save_for_backward(x == y.repeat_interleave(2, 2).repeat_interleave(2, 3))
        return y

    @staticmethod
    def backward(ctx, grad):
        return grad.repeat_interleave(2, 2).repeat_interleave(2, 3) * ctx.saved_tensors[0]


@case(("bit_identical", "round_off"), "other tie-breaking", cnn)
def max_pool_that_shares_ties(model):
    """Pooling by ``amax`` shares the gradient among ties; behind ReLU only zeros tie, whose gradient dies."""

    class Pool(nn.MaxPool2d):
        def forward(self, x):
            return x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).amax((3, 5))

    return recast(model, "pool", Pool)


@case("bug", "right at even sizes alone", cnn, module="pool", passes="forward")
def max_pool_from_the_other_corner(model):
    """Pooling from the other corner: at even sizes the same, at odd ones it drops the other border."""

    class Pool(nn.MaxPool2d):
        def forward(self, x):
            return super().forward(x.flip(2, 3)).flip(2, 3)

    return recast(model, "pool", Pool)


@case(("bit_identical", "round_off"), "other tie-breaking", cnn)
def max_pool_that_multiplies_ties(model):
    """The backward pass counts ties several times over, which behind ReLU multiplies a zero."""

    class Pool(nn.MaxPool2d):
        def forward(self, x):
            return MaskedPool.apply(x)

    return recast(model, "pool", Pool)


@case("round_off", "ill-conditioned sum", sensor_30)
def one_pass_variance_off_centre(model):
    """One-pass variance of readings near 30: the same function, a thousand times the rounding."""
    return recast(model, "norm", OnePassNorm)


@case(("round_off", "reduced_precision"), "ill-conditioned sum", sensor_1000)
def one_pass_variance_far_off_centre(model):
    """One-pass variance of readings near 1000: the same function, of which float32 keeps two digits."""
    return recast(model, "norm", OnePassNorm)


@case(
    "round_off",
    "high but stable rate",
    recurrent,
    steps=80,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.1),
)
def lstm_at_a_high_rate(model):
    """The LSTM stepped by hand, Adam at 0.1; the float32 curves part."""
    return recast(model, "lstm", SteppedLSTM)


@case(
    "round_off",
    "high but stable rate",
    cnn,
    steps=60,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
)
def cnn_at_a_high_rate(model):
    """The strided conv over halves of its channels, at three times the usual rate."""
    return recast(model, "conv2", ChannelwiseConv2d)


@case(
    "round_off",
    "high but stable rate",
    resnet,
    steps=30,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.3, momentum=0.9),
)
def resnet_at_a_high_rate(model):
    """A conv over unfolded patches at three times the usual rate; the float32 curves part."""
    return recast(model, "layer2.1.conv1", UnfoldedConv2d)


@case(
    "round_off",
    "high but stable rate",
    transformer,
    steps=60,
    optimizer=lambda params: torch.optim.Adam(params, lr=0.3),
)
def transformer_at_a_high_rate(model):
    """LayerNorm written out, Adam at 0.3; the float32 curves part."""
    return recast(model, "blocks.1.norm1", WrittenLayerNorm)


@case("round_off", "nearly dead branch", scaled)
def scaled_branch_rewritten(model):
    """The 1x1 convs of a branch scaled by 1e-6, one over halves of its channels."""
    return recast(model, "block.down", ChannelwiseConv2d)


@case("bit_identical", "nothing rewritten", cnn)
def the_network_itself(model):
    """The candidate is the reference."""
    return model


@case("bit_identical", "renamed", recurrent)
def modules_renamed(model):
    """The same modules under other names, held by another class."""

    class Renamed(nn.Module):
        def __init__(self, net):
            super().__init__()
            self.encoder, self.step, self.classifier = net.lstm, net.cell, net.fc

        def forward(self, x):
            states, _ = self.encoder(x)
            h = x.new_zeros(len(x), self.step.hidden_size)
            for state in states.unbind(1):
                h = self.step(state, h)
            return self.classifier(h)

    return Renamed(model)


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
