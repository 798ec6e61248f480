"""Candidates that draw other random numbers than the reference, or that do not repeat themselves at all."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from torch import Tensor, nn

from bench.backward import Backward
from bench.case import case, method_of
from bench.cases._heldout_fault_sequence import PrefixMean
from bench.cases._heldout_fault_tasks import preact, recommender, tagger, translator, unet
from bench.optimizers import UsualSGD, everywhere, of
from bench.surgery import recast


@method_of("history", "nondeterministic", "random order of sums", recommender)
def history_added_up_in_random_order(self, history):
    """The items of the past are kept as a set, whose order changes from call to call."""
    order = list(range(history.shape[1]))
    random.SystemRandom().shuffle(order)
    return nn.EmbeddingBag.forward(self, history[:, order])


@method_of("stages.2.norm2", "nondeterministic", "sampled statistics", preact, passes="buffer")
def running_variance_of_a_random_half(self, x):
    """The running variance is taken from a random half of the batch; nothing else is."""
    if not self.training:
        return nn.BatchNorm2d.forward(self, x)
    before = self.running_var.clone()
    y = nn.BatchNorm2d.forward(self, x)
    some = torch.from_numpy(np.random.default_rng().permutation(len(x))[: len(x) // 2])
    with torch.no_grad():
        sampled = x[some.to(x.device)].var((0, 2, 3))
        self.running_var.data.copy_(before.lerp(sampled, self.momentum))
    return y


@method_of("head", "nondeterministic", "augmented in evaluation", unet, "_conv_forward", passes="eval")
def evaluation_with_random_noise(self, x, weight, bias):
    """In evaluation a dither of 1e-4 is added to the logits; training is exact."""
    y = nn.Conv2d._conv_forward(self, x, weight, bias)
    noise = np.random.default_rng().standard_normal(tuple(y.shape))
    return y if self.training else y + 1e-4 * torch.as_tensor(noise, dtype=y.dtype, device=y.device)


@case(
    "nondeterministic", "noise in the last step's gradient", tagger, module="prefix", passes="input gradient"
)
def noise_in_the_gradient_of_one_step(model):
    """The forward pass repeats; the gradient of the last time step alone has noise of 1e-5."""

    def noisy(g: Tensor) -> Tensor:
        noise = np.random.default_rng().standard_normal(tuple(g[:, -1].shape))
        last = g[:, -1] * (1 + 1e-5 * torch.as_tensor(noise, dtype=g.dtype, device=g.device))
        return torch.cat([g[:, :-1], last[:, None]], 1)

    class Prefix(PrefixMean):
        def forward(self, x):
            return super().forward(Backward.apply(x, noisy))

    return recast(model, "prefix", Prefix)


class Dithered(UsualSGD):
    """SGD that rounds its results at random, up or down, on a grid of 2^-20."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
        for p in self.all_params():
            dither = torch.rand(p.shape, generator=generator).to(p)
            p.copy_(torch.floor(p * 2**20 + dither) / 2**20)


ROUNDED = {"module": everywhere(recommender), "candidate_optimizer": of(Dithered)}


@case("nondeterministic", "stochastic rounding in the update", recommender, passes="update", **ROUNDED)
def weights_rounded_at_random(model):
    """The network is the reference; its optimizer rounds at random, seeded by the clock."""
    return model


@case("nondeterministic", "noise from some step", translator, module="add2.norm", step=6)
def noise_after_six_calls(model):
    """A norm whose result has relative noise of 1e-6, but only after six training steps."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            self.calls += self.training
            y = super().forward(x)
            if self.calls <= 6 or not self.training:
                return y
            noise = np.random.default_rng().standard_normal(tuple(y.shape))
            return y * (1 + 1e-6 * torch.as_tensor(noise, dtype=y.dtype, device=y.device))

    return recast(model, "add2.norm", Norm, calls=0)
