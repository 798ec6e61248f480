"""Updates that go wrong after some steps, from what was left in the optimizer."""

from __future__ import annotations

import torch

from bench.case import case, in_place_of
from bench.cases._bug_parts import Halves
from bench.optimizers import UsualSGD, apart, everywhere, of, sgd
from bench.tasks import autoencoder, cnn, mlp


class DecayEnds(UsualSGD):
    """SGD whose weight decay ends after nine steps."""

    taken = 0

    def step(self, closure=None):
        if self.taken == 9:
            for group in self.param_groups:
                group["weight_decay"] = 0
        self.taken += 1
        return super().step(closure)


DECAY = {"optimizer": sgd(weight_decay=5e-4), "candidate_optimizer": of(DecayEnds, weight_decay=5e-4)}


@in_place_of(
    "conv2", "bug", "weight decay ends", cnn, module=everywhere(cnn), passes="update", step=9, **DECAY
)
def weight_decay_ends_at_step_9(conv):
    """A schedule of the weight decay that the reference has not."""
    return Halves(conv)


class Bounded(UsualSGD):
    """SGD that keeps the parameters of its second group within a bound, as a forgotten constraint does."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[1]["params"]:
            p.clamp_(-0.22, 0.22)


BOUND = apart("fc3", Bounded)


@case("bug", "weights bounded", mlp, module="fc3", passes="update", step=8, candidate_optimizer=BOUND)
def last_layer_bounded(model):
    """The weights of the last layer are kept within 0.22, which they reach only after some steps."""
    return model


class RateDrops(UsualSGD):
    """SGD whose second group learns 1 % slower after ten steps."""

    taken = 0

    def step(self, closure=None):
        if self.taken == 10:
            self.param_groups[1]["lr"] *= 0.99
        self.taken += 1
        return super().step(closure)


DROP = apart("down2.second", RateDrops)


@in_place_of(
    "down2", "bug", "learning rate drops", autoencoder, passes="update", step=10, candidate_optimizer=DROP
)
def rate_of_one_half_drops_at_step_10(conv):
    """A schedule that steps one group only."""
    return Halves(conv)
