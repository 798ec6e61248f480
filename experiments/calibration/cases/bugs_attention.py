"""Faults in the forward pass of attention, LSTM and GRU written by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import ManualAttention, ManualGRUCell, ManualLSTM, recast
from experiments.calibration.tasks import Recurrent, dropout_transformer, recurrent, transformer


class SoftmaxOverQueries(ManualAttention):
    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-2)


@case("bug", "softmax over the wrong dimension", transformer, module="blocks.0.attention", passes="forward")
def softmax_over_the_queries(model):
    """The weights of a key add up to one, not those of a query."""
    return recast(model, "blocks.0.attention", SoftmaxOverQueries)


class ScaledByWidth(ManualAttention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(self.out.in_features)


@case("bug", "wrong attention scale", transformer, module="blocks.1.attention", passes="forward")
def scores_scaled_by_the_width(model):
    """sqrt(D) for sqrt(d_head)."""
    return recast(model, "blocks.1.attention", ScaledByWidth)


class ShortScale(ManualAttention):
    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) * 0.35355


@case("bug", "wrong attention scale", dropout_transformer, module="blocks.0.attention", passes="forward")
def scores_scaled_to_five_digits(model):
    """0.35355 for 1 / sqrt(8), off by 1e-5."""
    return recast(model, "blocks.0.attention", ShortScale)


class SeesTheNext(ManualAttention):
    def visible(self, q: Tensor) -> Tensor:
        return q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)


@case("bug", "causal mask", transformer, module="blocks.1.attention", passes="forward")
def mask_off_by_one(model):
    """Every position sees the one after it."""
    return recast(model, "blocks.1.attention", SeesTheNext)


class SeesAll(ManualAttention):
    def visible(self, q: Tensor) -> Tensor:
        return q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool)


@case("bug", "causal mask", dropout_transformer, module="blocks.1.attention", passes="forward")
def mask_missing(model):
    """No causal mask at all."""
    return recast(model, "blocks.1.attention", SeesAll)


class LeakyMask(ManualAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = self.scores(q, k).masked_fill(~self.visible(q), -10.0)
        return self.out(self.merge(self.softmax(scores) @ v))


@case("bug", "causal mask", transformer, module="blocks.0.attention", passes="forward")
def mask_that_leaks(model):
    """The mask fills in -10, so that 5e-5 of the weight leaks from the future."""
    return recast(model, "blocks.0.attention", LeakyMask)


class KeysAskQueries(ManualAttention):
    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        k, q, v = super().project(x)
        return q, k, v


@case("bug", "queries and keys swapped", transformer, module="blocks.0.attention", passes="forward")
def queries_and_keys_swapped(model):
    """The fused projection is read as k, q, v."""
    return recast(model, "blocks.0.attention", KeysAskQueries)


class HeadsFirst(ManualAttention):
    def project(self, x: Tensor) -> Tensor:
        n, t, d = x.shape
        return self.qkv(x).view(n, t, self.heads, 3, d // self.heads).permute(3, 0, 2, 1, 4)


@case("bug", "fused weight read in another order", transformer, module="blocks.1.attention", passes="forward")
def projection_read_heads_first(model):
    """The fused projection is read as (head, q/k/v, channel), as in another library."""
    return recast(model, "blocks.1.attention", HeadsFirst)


class MergedWithoutTranspose(ManualAttention):
    def merge(self, mixed: Tensor) -> Tensor:
        n, heads, t, d = mixed.shape
        return mixed.reshape(n, t, heads * d)


@case("bug", "reshape for a transpose", transformer, module="blocks.1.attention", passes="forward")
def heads_merged_without_transpose(model):
    """The heads are merged by a reshape that mixes positions with heads."""
    return recast(model, "blocks.1.attention", MergedWithoutTranspose)


class GatesOfAnotherLibrary(ManualLSTM):
    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        i, g, f, o = super().gates(x, h)
        return i, f, g, o


@case("bug", "gate order", recurrent, module="lstm", passes="forward")
def lstm_gates_in_another_order(model):
    """The four gates are read in TensorFlow's order: input, cell, forget, output."""
    return recast(model, "lstm", GatesOfAnotherLibrary)


class OneBias(ManualLSTM):
    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        fed = F.linear(x, self.weight_ih_l0, self.bias_ih_l0) + F.linear(h, self.weight_hh_l0)
        return fed.chunk(4, -1)


@case("bug", "second bias forgotten", recurrent, module="lstm", passes="forward")
def lstm_without_its_second_bias(model):
    """Only the first of the two biases is added."""
    return recast(model, "lstm", OneBias)


class CellStates(ManualLSTM):
    def update(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.gates(x, h)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c, c


@case("bug", "activation missing", recurrent, module="lstm", passes="forward")
def lstm_output_without_tanh(model):
    """The cell state is gated without its tanh."""
    return recast(model, "lstm", CellStates)


class MixedTheOtherWay(ManualGRUCell):
    def mix(self, r: Tensor, z: Tensor, n: Tensor, h: Tensor) -> Tensor:
        return z * n + (1 - z) * h


@case("bug", "gate order", recurrent, module="cell", passes="forward")
def gru_update_gate_complemented(model):
    """z takes the place of 1 - z, as the paper has it and PyTorch has not."""
    return recast(model, "cell", MixedTheOtherWay)


class ResetBeforeProduct(ManualGRUCell):
    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        (xr, xz, xn) = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        wr, wz, wn = self.weight_hh.chunk(3)
        br, bz, bn = self.bias_hh.chunk(3)
        r, z = (xr + F.linear(h, wr, br)).sigmoid(), (xz + F.linear(h, wz, bz)).sigmoid()
        return self.mix(r, z, (xn + F.linear(r * h, wn, bn)).tanh(), h)


@case("bug", "reset gate before the product", recurrent, module="cell", passes="forward")
def gru_reset_before_the_product(model):
    """The reset gate multiplies the state, not the product with it."""
    return recast(model, "cell", ResetBeforeProduct)


class LastStepMissing(Recurrent):
    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        h = x.new_zeros(x.shape[0], 10)
        for t in range(states.shape[1] - 1):
            h = self.cell(states[:, t], h)
        return self.fc(h)


@case("bug", "last time step missing", recurrent, module="", passes="forward")
def last_time_step_missing(model):
    """The loop over time stops one step early."""
    return recast(model, "", LastStepMissing)
