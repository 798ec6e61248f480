"""Updates that go wrong after some steps, from what was left in the optimizer."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import Halves
from experiments.calibration.cases._swap import replace
from experiments.calibration.cases.bugs_update import DECAYED, apart, everywhere
from experiments.calibration.tasks import autoencoder, cnn, mlp


class DecayEnds(torch.optim.SGD):
    """SGD whose weight decay ends after nine steps."""

    taken = 0

    def step(self, closure=None):
        if self.taken == 9:
            for group in self.param_groups:
                group["weight_decay"] = 0
        self.taken += 1
        return super().step(closure)


@case(
    "bug",
    "weight decay ends",
    cnn,
    module=everywhere(cnn),
    passes="update",
    step=9,
    optimizer=DECAYED,
    candidate_optimizer=lambda model: partial(DecayEnds, lr=0.1, momentum=0.9, weight_decay=5e-4)(
        model.parameters()
    ),
)
def weight_decay_ends_at_step_9(model):
    """A schedule of the weight decay that the reference has not."""
    return replace(model, "conv2", Halves(model.conv2))


class Bounded(torch.optim.SGD):
    """SGD that keeps the parameters of its second group within a bound, as a forgotten constraint does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[1]["params"]:
            p.clamp_(-0.22, 0.22)


def _bounded(model: nn.Module) -> torch.optim.Optimizer:
    rest = [p for name, p in model.named_parameters() if not name.startswith("fc3")]
    return Bounded([{"params": rest}, {"params": list(model.fc3.parameters())}], lr=0.1, momentum=0.9)


@case(
    "bug",
    "weights bounded",
    mlp,
    module="fc3",
    passes="update",
    step=8,
    candidate_optimizer=_bounded,
)
def last_layer_bounded(model):
    """The weights of the last layer are kept within 0.22, which they reach only after some steps."""
    return model


class RateDrops(torch.optim.SGD):
    """SGD whose second group learns 1 % slower after ten steps."""

    taken = 0

    def step(self, closure=None):
        if self.taken == 10:
            self.param_groups[1]["lr"] *= 0.99
        self.taken += 1
        return super().step(closure)


@case(
    "bug",
    "learning rate drops",
    autoencoder,
    module="down2",
    passes="update",
    step=10,
    candidate_optimizer=apart("down2.second", partial(RateDrops, lr=0.1, momentum=0.9)),
)
def rate_of_one_half_drops_at_step_10(model):
    """A schedule that steps one group only."""
    return replace(model, "down2", Halves(model.down2))
