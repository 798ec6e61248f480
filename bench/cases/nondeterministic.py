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

from bench.case import method_of
from bench.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


def numpy_like(x: Tensor, draw) -> Tensor:
    """``draw(shape)``, an array of numpy's, as a tensor like ``x``."""
    return torch.as_tensor(draw(tuple(x.shape)), dtype=x.dtype, device=x.device)


@method_of("fc2", "nondeterministic", "numpy noise", mlp)
def noise_from_numpys_global_generator(self, x):
    """A linear layer's result with absolute noise of 1e-7."""
    y = nn.Linear.forward(self, x)
    return y + 1e-7 * numpy_like(y, np.random.standard_normal)


@method_of("up1", "nondeterministic", "numpy noise", autoencoder)
def noise_from_a_fresh_numpy_generator(self, x):
    """A transposed conv's result with relative noise of 1e-7; every call makes its own generator."""
    y = nn.ConvTranspose2d.forward(self, x)
    return y * (1 + 1e-7 * numpy_like(y, np.random.default_rng().standard_normal))


@method_of("norm3", "nondeterministic", "own generator", cnn)
def noise_from_a_generator_seeded_by_the_clock(self, x):
    """GroupNorm dithers its result by 1e-6; each call makes a torch generator and seeds it by the clock."""
    generator = torch.Generator().manual_seed(time.time_ns() % 2**31)
    y = nn.GroupNorm.forward(self, x)
    return y + 1e-6 * torch.randn(y.shape, generator=generator, dtype=y.dtype).to(y.device)


@method_of("fc", "nondeterministic", "random branch", recurrent)
def random_choice_of_algorithm(self, x):
    """A coin of Python's decides whether the last layer's product is taken whole or in two halves."""
    if random.random() < 0.5:
        return nn.Linear.forward(self, x)
    half = self.in_features // 2
    y = F.linear(x[:, half:], self.weight[:, half:])
    return y + F.linear(x[:, :half], self.weight[:, :half]) + self.bias


@method_of("layer2.0.conv1", "nondeterministic", "random order of sums", resnet, "_conv_forward")
def channel_groups_added_in_random_order(self, x, weight, bias):
    """A conv as a sum over four groups of input channels, in an order that numpy draws at each call."""
    parts = zip(x.chunk(4, 1), weight.chunk(4, 1), strict=True)
    parts = [F.conv2d(a, w, None, self.stride, self.padding) for a, w in parts]
    return sum(parts[i] for i in np.random.default_rng().permutation(4))


@method_of("blocks.0.down", "nondeterministic", "random order of sums", transformer)
def shards_added_in_the_order_of_their_keys(self, x):
    """A linear layer in six shards kept under random keys and summed in the order of the keys."""
    pairs = zip(x.chunk(6, -1), self.weight.chunk(6, -1), strict=True)
    shards = {uuid.uuid4().hex: F.linear(a, w) for a, w in pairs}
    return sum(shards[key] for key in sorted(shards)) + self.bias


@method_of("conv", "nondeterministic", "clock", two_inputs, "_conv_forward")
def algorithm_chosen_by_the_clock(self, x, weight, bias):
    """A conv whose two algorithms alternate with the clock, as a noisy autotuner's choice does."""
    if time.perf_counter_ns() // 64 % 2:
        return nn.Conv1d._conv_forward(self, x, weight, bias)
    columns = F.pad(x, (2, 2)).unfold(2, 5, 1)
    return torch.einsum("nctk,ock->not", columns, weight) + bias[:, None]


@method_of("fc", "nondeterministic", "rare noise", cnn)
def noise_in_one_call_of_eight(self, x):
    """One call in eight, at random, scales the result by 1 + 1e-5."""
    y = nn.Linear.forward(self, x)
    return y * (1 + 1e-5) if random.randrange(8) == 0 else y


CALLS = itertools.count()


@method_of("fc1", "nondeterministic", "global counter", mlp)
def counter_shared_by_all_networks(self, x):
    """Two calls of five in the process, whichever network makes them, read the weight times 1 + 1e-6."""
    weight = self.weight * (1 + 1e-6) if next(CALLS) % 5 in (1, 3) else self.weight
    return F.linear(x, weight, self.bias)


@method_of("cell", "nondeterministic", "stochastic rounding", recurrent)
def state_rounded_at_random(self, x, h):
    """The new state is rounded to 16 bits up or down at random, as low-precision training does."""
    new = nn.GRUCell.forward(self, x, h)
    dither = numpy_like(new, np.random.default_rng().random)
    return new + (torch.floor(new * 2**15 + dither) / 2**15 - new).detach()
