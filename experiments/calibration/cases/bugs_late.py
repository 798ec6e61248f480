"""Faults that show after some steps: counters, caches, schedules that were left in."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import (
    GradientFactor,
    Halves,
    ManualAttention,
    ManualLSTM,
    recast,
)
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer


class FastAfterWarmUp(nn.Module):
    """The exact GELU for seven training steps, then the fast one."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return F.gelu(x, approximate="tanh" if self.calls > 7 else "none")


@case("bug", "forward wrong after some calls", transformer, module="blocks.0.act", passes="forward", step=7)
def gelu_switches_after_seven_calls(model):
    """A faster formula takes over after seven calls."""
    return replace(model, "blocks.0.act", FastAfterWarmUp())


class Annealed(nn.Module):
    """A layer followed by a gain that a schedule moves by a millionth from step 10."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.steps += self.training
        return self.layer(x) * (1.0 if self.steps <= 10 else 1 + 1e-6)


@case("bug", "forward wrong after some calls", autoencoder, module="down2", passes="forward", step=10)
def gain_moves_after_ten_calls(model):
    """A schedule changes a gain of one to 1 + 1e-6."""
    return replace(model, "down2", Annealed(model.down2))


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


class DropsInputGradient(CountedHalves):
    def late(self, x: Tensor) -> Tensor:
        return self.second(x.detach() if self.calls > 12 else x)


@case(
    "bug",
    "gradient dropped from some step",
    resnet,
    module="layer2.1.conv1",
    passes="input gradient",
    step=12,
    steps=16,
)
def half_detached_from_step_12(model):
    """The second half no longer sends a gradient back."""
    return replace(model, "layer2.1.conv1", DropsInputGradient(model.layer2[1].conv1))


class Freezes(CountedHalves):
    def late(self, x: Tensor) -> Tensor:
        if self.calls > 12:
            self.second.requires_grad_(False)
        return self.second(x)


@case("bug", "frozen from some step", mlp, module="fc2", passes=("weight gradient", "update"), step=12)
def half_frozen_from_step_12(model):
    """A freezing schedule that was left in."""
    return replace(model, "fc2", Freezes(model.fc2))


class EveryFifth(nn.Module):
    """A layer whose input gradient is damped at every fifth step."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer, self.calls = layer, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return self.layer(x if self.calls % 5 else GradientFactor.apply(x, 0.999))


@case("bug", "gradient wrong now and then", mlp, module="fc3", passes="input gradient", step=4)
def gradient_damped_every_fifth_step(model):
    """0.1 % of the input gradient is missing at each fifth step."""
    return replace(model, "fc3", EveryFifth(model.fc3))


class CarriesOn(ManualLSTM):
    """Starts a training batch from the state at the end of the last one."""

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


@case("bug", "state kept between batches", recurrent, module="lstm", passes="forward", step=1)
def lstm_state_carried_to_the_next_batch(model):
    """The state is not reset between batches that have nothing to do with one another."""
    return recast(model, "lstm", CarriesOn)


class KeepsItsCache(ManualAttention):
    """Attention with a cache of keys and values that grows by each training batch."""

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


@case("bug", "cache that grows", transformer, module="blocks.1.attention", passes="forward", step=1)
def attention_cache_never_cleared(model):
    """The keys and values of former batches stay visible."""
    return recast(model, "blocks.1.attention", KeepsItsCache)


class StopsTracking(nn.BatchNorm2d):
    def forward(self, x: Tensor) -> Tensor:
        if self.training and self.num_batches_tracked >= 5:
            return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
        return super().forward(x)


@case("bug", "running statistics stop", cnn, module="bn2", passes="buffer", step=5)
def running_statistics_stop_after_five(model):
    """The running statistics are no longer updated after five batches."""
    return recast(model, "bn2", StopsTracking)
