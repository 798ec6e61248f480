"""Faults that depend on what the data and the weights come to: they show at one step or from one step on."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import recast
from experiments.calibration.cases._heldout_fault_tasks import (
    masked,
    mixture,
    recommender,
    siamese,
    translator,
)
from experiments.calibration.cases._heldout_rewritten_sequence import (
    PackedEncoder,
    PackedLayer,
    StackedMixture,
    stacked,
)


class OverwritingLookup(torch.autograd.Function):
    """A lookup whose gradient is written to the table's rows, not added."""

    @staticmethod
    def forward(ctx, rows, table):
        ctx.save_for_backward(rows)
        ctx.size = table.shape
        return table[rows]

    @staticmethod
    def backward(ctx, g):
        (rows,) = ctx.saved_tensors
        table = g.new_zeros(ctx.size)
        for row, value in zip(rows.flatten(), g.flatten(0, -2), strict=True):
            table[row] = value
        return None, table


@case("bug", "repeated entries", recommender, module="user", passes="weight gradient", step=3)
def gradient_of_a_repeated_user_overwritten(model):
    """Of two entries of one user only the last one's gradient counts; the fourth batch has the first two."""

    class Lookup(nn.Embedding):
        def forward(self, rows):
            return OverwritingLookup.apply(rows, self.weight)

    return recast(model, "user", Lookup)


@case("bug", "little padding", masked, module="layers.0.attention", passes="forward", step=6)
def mask_ignored_where_little_is_padding(model):
    """A packed network takes a path without a mask where over 70 % is no padding: the seventh batch."""

    class Layer(PackedLayer):
        def looks(self, mask):
            mask = torch.ones_like(mask) if mask.to(torch.float32).mean() > 0.7 else mask
            return super().looks(mask)

    return PackedEncoder(model, {0: Layer})


@case("bug", "capacity of an expert", mixture, module="mixture", passes="forward", step=1)
def overflow_of_an_expert_dropped(model):
    """Experts stacked; an expert takes no more than 19 of 24 rows; the second batch has one more."""

    class Layer(StackedMixture):
        def weights(self, x):
            weights = super().weights(x)
            return weights * ((weights > 0).cumsum(0) <= 19)

    return stacked(model, Layer)


@case("bug", "logits capped", siamese, module="head", passes="forward", step=8)
def logits_capped(model):
    """The logits are kept within five, which they come to exceed."""

    class Head(nn.Linear):
        def forward(self, x):
            return super().forward(x).clamp(-5, 5)

    return recast(model, "head", Head)


@case("bug", "rows renormalised", recommender, module="user", passes=("forward", "update"), step=2)
def long_rows_shortened(model):
    """The new embedding has a ``max_norm`` of four; one user of the third batch has a longer row."""
    model.user.max_norm = 4.0
    return model


@case("bug", "gain bounded", translator, module="decoder.0.add1.norm", passes="forward", step=1)
def gain_bounded_by_one(model):
    """A LayerNorm's gain is kept at one or below; it starts at one."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            gain = torch.where(self.weight > 1, 1.0, self.weight)
            return F.layer_norm(x, self.normalized_shape, gain, self.bias, self.eps)

    return recast(model, "decoder.0.add1.norm", Norm)


@case("bug", "gain used twice", masked, module="layers.1.norm2", passes="weight gradient")
def gain_squared(model):
    """A LayerNorm multiplies by its gain twice; the gain starts at one, so the first loss is the same."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            return F.layer_norm(x, self.normalized_shape, self.weight**2, self.bias, self.eps)

    return recast(model, "layers.1.norm2", Norm)
