"""Dropout whose random numbers are drawn otherwise: the same law, other masks from the same seed."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from bench.case import case, in_place_of, method_of
from bench.tasks import TransformerBlock, dropout_transformer


@method_of("blocks.0.drop", "nondeterministic", "dropout in halves", dropout_transformer)
def dropout_drawn_in_two_halves(self, x):
    """The two halves of the width draw their masks one after the other."""
    return torch.cat([nn.Dropout.forward(self, half) for half in x.chunk(2, -1)], -1)


@method_of("blocks.1.drop", "nondeterministic", "dropout transposed", dropout_transformer)
def dropout_on_a_transposed_copy(self, x):
    """The mask is drawn for the tensor with time and width exchanged."""
    return nn.Dropout.forward(self, x.transpose(1, 2).contiguous()).transpose(1, 2)


BLOCK = ("blocks.0", "blocks.0.drop")
NAME = "unused_draw_before_dropout"


@in_place_of("blocks.0", "nondeterministic", "extra draw", dropout_transformer, NAME, module=BLOCK)
class UnusedDrawBeforeDropout(TransformerBlock):
    """A block draws a number that it does not use (a layer drop switched off), so every later mask moves."""

    layer_drop = 0.0

    def forward(self, x):
        if self.training and torch.rand(()) < self.layer_drop:
            return x
        return super().forward(x)


@method_of("blocks.0.drop", "nondeterministic", "dropout by hand", dropout_transformer)
def dropout_by_comparing_uniform_numbers(self, x):
    """The mask comes from ``torch.rand_like(x) >= p``."""
    if not self.training:
        return x
    return x * (torch.rand_like(x) >= self.p) / (1 - self.p)


@method_of("blocks.1.drop", "nondeterministic", "dropout by hand", dropout_transformer)
def dropout_by_a_tensor_of_probabilities(self, x):
    """The mask comes from ``torch.bernoulli`` of a full tensor, which in float32 draws otherwise."""
    if not self.training:
        return x
    keep = 1 - self.p
    return x * torch.bernoulli(torch.full_like(x, keep)) / keep


@case("nondeterministic", "own generator", dropout_transformer, module="blocks.1.drop")
def dropout_with_a_generator_of_its_own(model):
    """The second block's masks come from a generator that lives in the layer, seeded once."""

    class Dropout(nn.Module):
        def __init__(self, p: float):
            super().__init__()
            self.p = p
            self.generator = torch.Generator().manual_seed(1234)

        def forward(self, x):
            if not self.training:
                return x
            keep = torch.rand(x.shape, generator=self.generator, dtype=x.dtype).to(x.device) >= self.p
            return x * keep / (1 - self.p)

    model.blocks[1].drop = Dropout(model.blocks[1].drop.p)
    return model


@method_of("blocks.0.drop", "nondeterministic", "dropout from numpy", dropout_transformer)
def dropout_with_masks_from_numpy(self, x):
    """The masks are drawn by a numpy generator that nobody seeds."""
    if not self.training:
        return x
    keep = torch.from_numpy(np.random.default_rng().random(tuple(x.shape)) >= self.p)
    return x * keep.to(x.device) / (1 - self.p)


@method_of("blocks.0", "nondeterministic", "dropout moved", dropout_transformer, module=BLOCK)
def dropout_drawn_ahead_of_time(self, x):
    """The mask is drawn at the block's start, for the whole batch of 8 that the pipeline is built for."""
    if not self.training:
        return TransformerBlock.forward(self, x)
    ones = torch.ones(8, *x.shape[1:], dtype=x.dtype, device=x.device)
    mask = F.dropout(ones, self.drop.p)[-len(x) :]
    x = x + self.attention(self.norm1(x))
    return x + mask * self.down(self.act(self.up(self.norm2(x))))
