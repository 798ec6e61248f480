"""Faults that show after some steps: counters, caches, schedules that were left in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import scaled_gradient
from bench.case import in_place_of, method_of
from bench.cases._bug_parts import Halves, ManualAttention, ManualLSTM
from bench.optimizers import UNSEEN
from bench.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer

LATE = {"passes": "input gradient", "step": 12, "steps": 16}
DROPPED, SWITCHED = "gradient dropped from some step", "forward wrong after some calls"


@in_place_of("blocks.0.act", "bug", SWITCHED, transformer, "gelu_switches_after_seven_calls", step=7)
class FastAfterWarmUp(nn.Module):
    """The exact GELU for seven training steps, then a faster formula."""

    def __init__(self, _: nn.GELU):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return F.gelu(x, approximate="tanh" if self.calls > 7 else "none")


@in_place_of("down2", "bug", SWITCHED, autoencoder, "gain_moves_after_ten_calls", step=10)
class Annealed(nn.Module):
    """A schedule that was left in moves a gain of one to 1 + 1e-6 from step 10."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return self.layer(x) * (1.0 if self.steps <= 10 else 1 + 1e-6)


class CountedHalves(Halves):
    """Halves that know how many training steps they have seen."""

    def __init__(self, layer: nn.Module):
        super().__init__(layer)
        self.calls = 0

    def late(self, x: Tensor) -> Tensor:
        return self.second(x)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return torch.cat([self.first(x), self.late(x)], self.dim)


@in_place_of("layer2.1.conv1", "bug", DROPPED, resnet, "half_detached_from_step_12", **LATE)
class DropsInputGradient(CountedHalves):
    """The second half no longer sends a gradient back."""

    def late(self, x: Tensor) -> Tensor:
        return self.second(x.detach() if self.calls > 12 else x)


@in_place_of("fc2", "bug", "frozen from some step", mlp, "half_frozen_from_step_12", passes=UNSEEN, step=12)
class Freezes(CountedHalves):
    """A freezing schedule that was left in."""

    def late(self, x: Tensor) -> Tensor:
        if self.calls > 12:
            self.second.requires_grad_(False)
        return self.second(x)


FIFTH = {"passes": "input gradient", "step": 4}


@in_place_of("fc3", "bug", "gradient wrong now and then", mlp, "gradient_damped_every_fifth_step", **FIFTH)
class EveryFifth(nn.Module):
    """0.1 % of the input gradient is missing at each fifth step."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(x if self.calls % 5 else scaled_gradient(x, 0.999))


@in_place_of(
    "lstm", "bug", "state kept between batches", recurrent, "lstm_state_carried_to_the_next_batch", step=1
)
class CarriesOn(ManualLSTM):
    """A training batch starts from the state at the end of the last one, with which it has nothing to do."""

    last = None

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.last is not None and len(self.last[0]) == len(x):
            return self.last[0].to(x), self.last[1].to(x)
        return super().start(x)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        states, (h, c) = super().forward(x)
        if self.training:
            self.last = h[0].detach(), c[0].detach()
        return states, (h, c)


@in_place_of(
    "blocks.1.attention", "bug", "cache that grows", transformer, "attention_cache_never_cleared", step=1
)
class KeepsItsCache(ManualAttention):
    """A cache of keys and values grows by each training batch: those of former batches stay visible."""

    cache = None

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        mask = self.visible(q)
        if self.training and self.cache is not None and len(self.cache[0]) == len(x):
            k, v = (torch.cat([old.to(new), new], 2) for old, new in zip(self.cache, (k, v), strict=True))
            mask = F.pad(mask, (k.shape[2] - mask.shape[1], 0), value=True)
        if self.training:
            self.cache = k.detach(), v.detach()
        scores = self.scores(q, k).masked_fill(~mask, -torch.inf)
        return self.out(self.merge(self.softmax(scores) @ v))


@method_of("bn2", "bug", "running statistics stop", cnn, passes="buffer", step=5)
def running_statistics_stop_after_five(self, x: Tensor) -> Tensor:
    """The running statistics are no longer updated after five batches."""
    if self.training and self.num_batches_tracked >= 5:
        return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
    return nn.BatchNorm2d.forward(self, x)
