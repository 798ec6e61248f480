"""Ports that come with the optimizer of where they come from."""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.optim import SGD, Adam, AdamW

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import everywhere, of
from bench.ported._signal_recurrent import CounterInKeras, counter
from bench.ported._tables_flows import Squares, deepfm
from bench.ported._tables_rules import (
    Falling,
    KerasAdam,
    KerasFalling,
    KerasNesterov,
    decay_as_it_was,
    matrices_decay,
)
from bench.ported._vision_convnext import BLOCKS, ChannelsLast, convnext
from bench.ported._vision_shapes import KerasVGG, vgg


@case(
    SAME,
    "Nesterov's momentum in Keras's form",
    vgg,
    optimizer=partial(SGD, lr=0.05, momentum=0.9, nesterov=True),
    candidate_optimizer=of(KerasNesterov),
)
def vgg_with_the_momentum_of_keras(model: nn.Module) -> nn.Module:
    return KerasVGG(model)


@case(
    SAME,
    "decoupled decay written out",
    deepfm,
    optimizer=partial(AdamW, lr=1e-2, eps=1e-5, weight_decay=0.05),
    candidate_optimizer=of(KerasAdam, hat=False, decay=0.05),
)
def deepfm_with_decay_written_out(model: nn.Module) -> nn.Module:
    return Squares(model)


@case(
    "bug",
    "epsilon of the optimizer",
    counter,
    module=everywhere(counter),
    passes="update",
    optimizer=partial(Adam, lr=1e-2, eps=1e-7),
    candidate_optimizer=of(KerasAdam, epsilon=1e-7),
)
def counter_with_the_epsilon_of_tensorflow(model: nn.Module) -> nn.Module:
    """Adam adds its epsilon to the root of the second moment before that is corrected."""
    return CounterInKeras(model)


counter_with_the_epsilon_of_tensorflow.mended = {
    "optimizer": partial(Adam, lr=1e-2, eps=1e-7),
    "candidate_optimizer": of(KerasAdam, epsilon=1e-7, hat=False),
}


@case(
    "bug",
    "rate inside the velocity",
    vgg,
    module=everywhere(vgg),
    passes="update",
    optimizer=Falling,
    candidate_optimizer=of(KerasFalling),
)
def vgg_with_the_rate_in_its_velocity(model: nn.Module) -> nn.Module:
    """The velocity keeps the rate that was in force before, which matters once the rate falls."""
    return KerasVGG(model)


vgg_with_the_rate_in_its_velocity.mended = {"optimizer": Falling, "candidate_optimizer": of(Falling)}


@case("bug", "decay by axes", convnext, module=BLOCKS, passes="update", optimizer=matrices_decay)
def convnext_whose_scale_does_not_decay(model: nn.Module) -> nn.Module:
    """Weights of one axis are not decayed; the layer scale has one here and three in the reference."""
    return ChannelsLast(model)


convnext_whose_scale_does_not_decay.mended = {
    "optimizer": matrices_decay,
    "candidate_optimizer": decay_as_it_was,
}
