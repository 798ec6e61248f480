"""Candidates that do not repeat themselves: foreign noise, random orders, clocks and counters."""

from __future__ import annotations

import itertools
import random
import time
import uuid

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


def numpy_like(x: Tensor, draw) -> Tensor:
    """``draw(shape)``, an array of numpy's, as a tensor like ``x``."""
    return torch.as_tensor(draw(tuple(x.shape)), dtype=x.dtype, device=x.device)


@case("nondeterministic", "numpy noise", mlp, module="fc2", passes="forward")
def noise_from_numpys_global_generator(model):
    """A linear layer's result with absolute noise of 1e-7."""

    class Linear(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y + 1e-7 * numpy_like(y, np.random.standard_normal)

    return recast(model, "fc2", Linear)


@case("nondeterministic", "numpy noise", autoencoder, module="up1", passes="forward")
def noise_from_a_fresh_numpy_generator(model):
    """A transposed conv's result with relative noise of 1e-7; every call makes its own generator."""

    class Conv(nn.ConvTranspose2d):
        def forward(self, x):
            y = super().forward(x)
            return y * (1 + 1e-7 * numpy_like(y, np.random.default_rng().standard_normal))

    return recast(model, "up1", Conv)


@case("nondeterministic", "own generator", cnn, module="norm3", passes="forward")
def noise_from_a_generator_seeded_by_the_clock(model):
    """GroupNorm dithers its result by 1e-6; each call makes a torch generator and seeds it by the clock."""

    class Norm(nn.GroupNorm):
        def forward(self, x):
            generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
            y = super().forward(x)
            return y + 1e-6 * torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)

    return recast(model, "norm3", Norm)


@case("nondeterministic", "random branch", recurrent, module="fc", passes="forward")
def random_choice_of_algorithm(model):
    """A coin of Python's decides whether the last layer's product is taken whole or in two halves."""

    class Linear(nn.Linear):
        def forward(self, x):
            if random.random() < 0.5:
                return super().forward(x)
            half = self.in_features // 2
            y = F.linear(x[:, half:], self.weight[:, half:])
            return y + F.linear(x[:, :half], self.weight[:, :half]) + self.bias

    return recast(model, "fc", Linear)


@case("nondeterministic", "random order of sums", resnet, module="layer2.0.conv1", passes="forward")
def channel_groups_added_in_random_order(model):
    """A conv as a sum over four groups of input channels, in an order that numpy draws at each call."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            parts = zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)
            parts = [F.conv2d(a, w, None, self.stride, self.padding) for a, w in parts]
            return sum(parts[i] for i in np.random.default_rng().permutation(4))

    return recast(model, "layer2.0.conv1", Conv)


@case("nondeterministic", "random order of sums", transformer, module="blocks.0.down", passes="forward")
def shards_added_in_the_order_of_their_keys(model):
    """A linear layer in six shards kept under random keys and summed in the order of the keys."""

    class Linear(nn.Linear):
        def forward(self, x):
            pairs = zip(x.chunk(6, -1), self.weight.chunk(6, -1), strict=True)
            shards = {uuid.uuid4().hex: F.linear(a, w) for a, w in pairs}
            return sum(shards[key] for key in sorted(shards)) + self.bias

    return recast(model, "blocks.0.down", Linear)


@case("nondeterministic", "clock", two_inputs, module="conv", passes="forward")
def algorithm_chosen_by_the_clock(model):
    """A conv whose two algorithms alternate with the clock, as a noisy autotuner's choice does."""

    class Conv(nn.Conv1d):
        def _conv_forward(self, x, weight, bias):
            if time.perf_counter_ns() // 64 % 2:
                return super()._conv_forward(x, weight, bias)
            columns = F.pad(x, (2, 2)).unfold(2, 5, 1)
            return torch.einsum("nctk,ock->not", columns, weight) + bias[:, None]

    return recast(model, "conv", Conv)


@case("nondeterministic", "rare noise", cnn, module="fc", passes="forward")
def noise_in_one_call_of_eight(model):
    """One call in eight, at random, scales the result by 1 + 1e-5."""

    class Linear(nn.Linear):
        def forward(self, x):
            y = super().forward(x)
            return y * (1 + 1e-5) if random.randrange(8) == 0 else y

    return recast(model, "fc", Linear)


CALLS = itertools.count()


@case("nondeterministic", "global counter", mlp, module="fc1", passes="forward")
def counter_shared_by_all_networks(model):
    """Two calls of five in the process, whichever network makes them, read the weight times 1 + 1e-6."""

    class Linear(nn.Linear):
        def forward(self, x):
            weight = self.weight * (1 + 1e-6) if next(CALLS) % 5 in (1, 3) else self.weight
            return F.linear(x, weight, self.bias)

    return recast(model, "fc1", Linear)


@case("nondeterministic", "stochastic rounding", recurrent, module="cell", passes="forward")
def state_rounded_at_random(model):
    """The new state is rounded to 16 bits up or down at random, as low-precision training does."""

    class Cell(nn.GRUCell):
        def forward(self, x, h):
            new = super().forward(x, h)
            dither = numpy_like(new, np.random.default_rng().random)
            return new + (torch.floor(new * 2**15 + dither) / 2**15 - new).detach()

    return recast(model, "cell", Cell)
