"""Retention and linear attention: all positions at once, chunk by chunk, or step by step."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._mixing_shell import HEADS, MIXERS, WIDTH, Trunk, decays, linear_attention, retention
from bench.ported._text import dense, kept, stacked


class Retained(nn.Module):
    """q, k, v and the gate out of one projection; subclasses say how the past is summed."""

    def __init__(self, own: nn.Module):
        super().__init__()
        self.qkvg = stacked(own.q_proj, own.k_proj, own.v_proj, own.g_proj)
        self.o = kept(own.out_proj.weight.T)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v, gate = self.qkvg(x).chunk(4, -1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)) for part in (q, k, v))
        y = self.summed(q, k * k.shape[-1] ** -0.5, v)
        y = F.layer_norm(y, y.shape[-1:], eps=1e-2).flatten(2)
        return (F.silu(gate) * y) @ self.o


class Recurrent(Retained):
    def summed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share, state, seen = decays(q)[:, None, None], 0.0, []
        for t in range(q.shape[1]):
            state = share * state + torch.einsum("nhi,nhj->nhij", k[:, t], v[:, t])
            seen.append(torch.einsum("nhi,nhij->nhj", q[:, t], state))
        return torch.stack(seen, 1)


class Chunked(Retained):
    """Four positions at a time, what was before them in a state."""

    def __init__(self, own: nn.Module, early: bool = False):
        super().__init__(own)
        self.early = early

    def summed(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        share, state, outputs = decays(q), q.new_zeros(len(q), HEADS, q.shape[-1], v.shape[-1]), []
        for q4, k4, v4 in zip(q.split(4, 1), k.split(4, 1), v.split(4, 1), strict=True):
            at = torch.arange(q4.shape[1], device=q.device)
            ago = (at[:, None] - at)[..., None]
            inner = torch.where(ago >= 0, share ** ago.clamp(min=0), 0.0)
            y = torch.einsum("nthi,nshi,tsh,nshj->nthj", q4, k4, inner, v4)
            since = share ** (at[:, None] + (0 if self.early else 1))
            outputs.append(y + torch.einsum("nthi,th,nhij->nthj", q4, since, state))
            to_end = share ** (len(at) - 1 - at)[:, None]
            state = (share ** len(at))[:, None, None] * state + torch.einsum(
                "nshi,sh,nshj->nhij", k4, to_end, v4
            )
        return torch.cat(outputs, 1)


@case(SAME, "step by step", retention, optimizer=sgd(0.005))
def retention_step_by_step(model: nn.Module) -> nn.Module:
    return Trunk(model, Recurrent)


@case(SAME, "chunk by chunk", retention, optimizer=sgd(0.005))
def retention_chunk_by_chunk(model: nn.Module) -> nn.Module:
    return Trunk(model, Chunked)


@case("bug", "decay off by one", retention, module=MIXERS, optimizer=sgd(0.005))
def retention_state_read_before_it_decays(model: nn.Module, wrong: bool = True) -> nn.Module:
    """What the chunks before left decays by one step too few when it is read."""
    return Trunk(model, lambda own: Chunked(own, early=wrong))


class Quadratic(nn.Module):
    """Linear attention with all pairs of positions written out; kernels of [D, heads, d]."""

    def __init__(self, own: nn.Module, detached: bool = False):
        super().__init__()
        layers = (own.query, own.key, own.value)
        self.w = kept(torch.stack([layer.weight.T.unflatten(1, (HEADS, -1)) for layer in layers]))
        self.b = kept(torch.stack([layer.bias.unflatten(0, (HEADS, -1)) for layer in layers]))
        self.to_out, self.detached = dense(own.out_proj.weight, own.out_proj.bias), detached

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.einsum("ntd,cdhk->cnhtk", x, self.w) + self.b[:, None, :, None]
        q, k = (torch.where(part > 0, part + 1, part.clamp(max=0).exp()) for part in (q, k))
        pairs = (q @ k.mT).tril()
        total = pairs.sum(-1, keepdim=True) + 1e-6
        y = (pairs @ v) / (total.detach() if self.detached else total)
        return self.to_out(y.transpose(1, 2).reshape(len(x), -1, WIDTH))


@case(SAME, "all pairs written out", linear_attention, optimizer=sgd(0.02))
def linear_attention_over_all_pairs(model: nn.Module) -> nn.Module:
    return Trunk(model, Quadratic)


@case(
    "bug",
    "detached branch",
    linear_attention,
    module=MIXERS,
    passes=("input gradient", "weight gradient"),
    optimizer=sgd(0.02),
)
def linear_attention_with_a_constant_sum(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The sum that the weights are divided by is detached: no gradient flows through it."""
    return Trunk(model, lambda own: Quadratic(own, detached=wrong))
