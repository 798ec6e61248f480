"""Faults that depend on what the data and the weights come to: they show at one step or from one step on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from bench.backward import own_backward
from bench.case import case, method_of
from bench.cases._heldout_fault_tasks import masked, mixture, recommender, siamese, translator
from bench.cases._heldout_inside import inside
from bench.cases._heldout_rewritten_sequence import PackedLayer, StackedMixture


@method_of("user", "bug", "repeated entries", recommender, passes="weight gradient", step=3)
def gradient_of_a_repeated_user_overwritten(self, rows):
    """Of two entries of one user only the last one's gradient counts; the fourth batch has the first two."""

    def backward(g, rows, table):
        gradient = torch.zeros_like(table)
        for row, value in zip(rows.flatten(), g.flatten(0, -2), strict=True):
            gradient[row] = value
        return None, gradient

    return own_backward(lambda rows, table: table[rows], backward)(rows, self.weight)


@inside(PackedLayer, "looks", "layers.0.attention", "little padding", masked, step=6)
def mask_ignored_where_little_is_padding(self, mask):
    """A packed network takes a path without a mask where over 70 % is no padding: the seventh batch."""
    mask = torch.ones_like(mask) if mask.to(torch.float32).mean() > 0.7 else mask
    return PackedLayer.looks(self, mask)


@inside(StackedMixture, "weights", "mixture", "capacity of an expert", mixture, step=1)
def overflow_of_an_expert_dropped(self, x):
    """Experts stacked; an expert takes no more than 19 of 24 rows; the second batch has one more."""
    weights = StackedMixture.weights(self, x)
    return weights * ((weights > 0).cumsum(0) <= 19)


@method_of("head", "bug", "logits capped", siamese, step=8)
def logits_capped(self, x):
    """The logits are kept within five, which they come to exceed."""
    return nn.Linear.forward(self, x).clamp(-5, 5)


@case("bug", "rows renormalised", recommender, module="user", passes=("forward", "update"), step=2)
def long_rows_shortened(model):
    """The new embedding has a ``max_norm`` of four; one user of the third batch has a longer row."""
    model.user.max_norm = 4.0
    return model


@method_of("decoder.0.add1.norm", "bug", "gain bounded", translator, step=1)
def gain_bounded_by_one(self, x):
    """A LayerNorm's gain is kept at one or below; it starts at one."""
    gain = torch.where(self.weight > 1, 1.0, self.weight)
    return F.layer_norm(x, self.normalized_shape, gain, self.bias, self.eps)


@method_of("layers.1.norm2", "bug", "gain used twice", masked, passes="weight gradient")
def gain_squared(self, x):
    """A LayerNorm multiplies by its gain twice; the gain starts at one, so the first loss is the same."""
    return F.layer_norm(x, self.normalized_shape, self.weight**2, self.bias, self.eps)
