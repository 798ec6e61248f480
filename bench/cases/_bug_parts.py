"""Right rewrites that the faulty ones are made from: layers in halves, attention and others by hand."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import SelfAttention


def adopt(new: nn.Module, old: nn.Module) -> nn.Module:
    """``new`` with the parameters and buffers of ``old``."""
    new.load_state_dict(old.state_dict())
    return new


def rows_of(layer: nn.Module, start: int, stop: int | None) -> nn.Module:
    """The linear or ungrouped conv layer that computes the outputs start .. stop of ``layer``."""
    part = copy.deepcopy(layer)
    part.weight = nn.Parameter(layer.weight.detach()[start:stop].clone())
    if layer.bias is not None:
        part.bias = nn.Parameter(layer.bias.detach()[start:stop].clone())
    setattr(part, "out_features" if isinstance(layer, nn.Linear) else "out_channels", len(part.weight))
    return part


class Halves(nn.Module):
    """A linear or ungrouped conv layer, split into two along its outputs."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        middle = len(layer.weight) // 2
        self.first, self.second = rows_of(layer, 0, middle), rows_of(layer, middle, None)
        self.dim = -1 if isinstance(layer, nn.Linear) else 1

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.first(x), self.second(x)], self.dim)


class ManualAttention(SelfAttention):
    """Self-attention with its products written out."""

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])

    def visible(self, q: Tensor) -> Tensor:
        return q.new_ones(q.shape[-2], q.shape[-2], dtype=torch.bool).tril()

    def softmax(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1)

    def merge(self, mixed: Tensor) -> Tensor:
        return mixed.transpose(1, 2).flatten(2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        scores = self.scores(q, k).masked_fill(~self.visible(q), -torch.inf)
        return self.out(self.merge(self.softmax(scores) @ v))


class ManualLSTM(nn.LSTM):
    """An LSTM of one layer, stepped by hand; the first gates are those of the input, forget, cell, output."""

    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        fed = F.linear(x, self.weight_ih_l0, self.bias_ih_l0)
        return (fed + F.linear(h, self.weight_hh_l0, self.bias_hh_l0)).chunk(4, -1)

    def update(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = self.gates(x, h)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c

    def start(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x.new_zeros(len(x), self.hidden_size), x.new_zeros(len(x), self.hidden_size)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h, c = self.start(x)
        states = []
        for t in range(x.shape[1]):
            h, c = self.update(x[:, t], h, c)
            states.append(h)
        return torch.stack(states, 1), (h[None], c[None])


class ManualGRUCell(nn.GRUCell):
    """A GRU cell by hand."""

    def mix(self, r: Tensor, z: Tensor, n: Tensor, h: Tensor) -> Tensor:
        return (1 - z) * n + z * h

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        xr, xz, xn = F.linear(x, self.weight_ih, self.bias_ih).chunk(3, -1)
        hr, hz, hn = F.linear(h, self.weight_hh, self.bias_hh).chunk(3, -1)
        r, z = (xr + hr).sigmoid(), (xz + hz).sigmoid()
        return self.mix(r, z, (xn + r * hn).tanh(), h)


class _Linear(torch.autograd.Function):
    """x [M, I], weight [O, I], bias [O] -> [M, O] with the three gradients that ``rules`` gives."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, rules: dict[str, Callable]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.rules = rules
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        x, weight = ctx.saved_tensors
        return (
            ctx.rules.get("input", torch.matmul)(gradient, weight),
            ctx.rules.get("weight", lambda g, x: g.T @ x)(gradient, x),
            ctx.rules.get("bias", lambda g: g.sum(0))(gradient),
            None,
        )


class HandWrittenLinear(nn.Module):
    """A linear layer with a backward pass of its own, right but for the gradients given.

    Args:
        layer: whose weights it takes.
        rules: any of input(gradient, weight), weight(gradient, x), bias(gradient).
    """

    def __init__(self, layer: nn.Linear, **rules: Callable):
        super().__init__()
        self.weight, self.bias, self.rules = layer.weight, layer.bias, rules

    def forward(self, x: Tensor) -> Tensor:
        return _Linear.apply(x.flatten(0, -2), self.weight, self.bias, self.rules).unflatten(0, x.shape[:-1])
