"""Faults in the forward pass of attention, LSTM and GRU written by hand."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import method_of
from bench.cases._bug_parts import ManualAttention, ManualGRUCell, ManualLSTM
from bench.tasks import Recurrent, dropout_transformer, recurrent, transformer


@method_of(
    "blocks.0.attention", "bug", "softmax over the wrong dimension", transformer, "softmax", ManualAttention
)
def softmax_over_the_queries(self, scores: Tensor) -> Tensor:
    """The weights of a key add up to one, not those of a query."""
    return scores.softmax(-2)


@method_of("blocks.1.attention", "bug", "wrong attention scale", transformer, "scores", ManualAttention)
def scores_scaled_by_the_width(self, q: Tensor, k: Tensor) -> Tensor:
    """sqrt(D) for sqrt(d_head)."""
    return q @ k.transpose(-2, -1) / math.sqrt(self.out.in_features)


@method_of(
    "blocks.0.attention", "bug", "wrong attention scale", dropout_transformer, "scores", ManualAttention
)
def scores_scaled_to_five_digits(self, q: Tensor, k: Tensor) -> Tensor:
    """0.35355 for 1 / sqrt(8), off by 1e-5."""
    return q @ k.transpose(-2, -1) * 0.35355


@method_of("blocks.1.attention", "bug", "causal mask", transformer, "visible", ManualAttention)
def mask_off_by_one(self, q: Tensor) -> Tensor:
    """Every position sees the one after it."""
    return q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril(1)


@method_of("blocks.1.attention", "bug", "causal mask", dropout_transformer, "visible", ManualAttention)
def mask_missing(self, q: Tensor) -> Tensor:
    """No causal mask at all."""
    return q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool)


@method_of("blocks.0.attention", "bug", "causal mask", transformer, base=ManualAttention)
def mask_that_leaks(self, x: Tensor) -> Tensor:
    """The mask fills in -10, so that 5e-5 of the weight leaks from the future."""
    q, k, v = self.project(x)
    scores = self.scores(q, k).masked_fill(~self.visible(q), -10.0)
    return self.out(self.merge(self.softmax(scores) @ v))


@method_of("blocks.0.attention", "bug", "queries and keys swapped", transformer, "project", ManualAttention)
def queries_and_keys_swapped(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The fused projection is read as k, q, v."""
    k, q, v = ManualAttention.project(self, x)
    return q, k, v


@method_of(
    "blocks.1.attention", "bug", "fused weight read in another order", transformer, "project", ManualAttention
)
def projection_read_heads_first(self, x: Tensor) -> Tensor:
    """The fused projection is read as (head, q/k/v, channel), as in another library."""
    n, t, d = x.shape
    return self.qkv(x).view(n, t, self.heads, 3, d // self.heads).permute(3, 0, 2, 1, 4)


@method_of("blocks.1.attention", "bug", "reshape for a transpose", transformer, "merge", ManualAttention)
def heads_merged_without_transpose(self, mixed: Tensor) -> Tensor:
    """The heads are merged by a reshape that mixes positions with heads."""
    n, heads, t, d = mixed.shape
    return mixed.reshape(n, t, heads * d)


@method_of("lstm", "bug", "gate order", recurrent, "gates", ManualLSTM)
def lstm_gates_in_another_order(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """The four gates are read in TensorFlow's order: input, cell, forget, output."""
    i, g, f, o = ManualLSTM.gates(self, x, h)
    return i, f, g, o


@method_of("lstm", "bug", "second bias forgotten", recurrent, "gates", ManualLSTM)
def lstm_without_its_second_bias(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """Only the first of the two biases is added."""
    fed = F.linear(x, self.weight_ih_l0, self.bias_ih_l0) + F.linear(h, self.weight_hh_l0)
    return fed.chunk(4, -1)


@method_of("lstm", "bug", "activation missing", recurrent, "update", ManualLSTM)
def lstm_output_without_tanh(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """The cell state is gated without its tanh."""
    i, f, g, o = self.gates(x, h)
    c = f.sigmoid() * c + i.sigmoid() * g.tanh()
    return o.sigmoid() * c, c


@method_of("cell", "bug", "gate order", recurrent, "mix", ManualGRUCell)
def gru_update_gate_complemented(self, r: Tensor, z: Tensor, n: Tensor, h: Tensor) -> Tensor:
    """z takes the place of 1 - z, as the paper has it and PyTorch has not."""
    return z * n + (1 - z) * h


@method_of("cell", "bug", "reset gate before the product", recurrent, base=ManualGRUCell)
def gru_reset_before_the_product(self, x: Tensor, h: Tensor) -> Tensor:
    """The reset gate multiplies the state, not the product with it."""
    (xr, xz, xn) = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
    wr, wz, wn = self.weight_hh.chunk(3)
    br, bz, bn = self.bias_hh.chunk(3)
    r, z = (xr + F.linear(h, wr, br)).sigmoid(), (xz + F.linear(h, wz, bz)).sigmoid()
    return self.mix(r, z, (xn + F.linear(r * h, wn, bn)).tanh(), h)


@method_of("", "bug", "last time step missing", recurrent, "states")
def last_time_step_missing(self, x: Tensor) -> Tensor:
    """The loop over time stops one step early."""
    return Recurrent.states(self, x)[:, :-1]
