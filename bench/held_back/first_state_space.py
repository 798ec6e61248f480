"""Mamba's mixer: the scan by doubling, with a backward of its own, as a masked matrix."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import BACK, both, later, leaf
from bench.held_back._first_shell import W, ported, shell


class Mamba(nn.Module):
    """Three states for each channel, step sizes of rank two."""

    def __init__(self):
        super().__init__()
        self.in_proj, self.out_proj = nn.Linear(W, 2 * W, bias=False), nn.Linear(W, W, bias=False)
        self.conv = nn.Conv1d(W, W, 3, groups=W, padding=2)
        self.x_proj, self.dt_proj = nn.Linear(W, 8, bias=False), nn.Linear(2, W)
        self.A_log, self.D = (
            nn.Parameter(torch.arange(1.0, 4).log().repeat(W, 1)),
            nn.Parameter(torch.ones(W)),
        )

    def sizes(self, dt: Tensor) -> Tensor:
        return F.softplus(self.dt_proj(dt))

    def scan(self, decay: Tensor, drive: Tensor) -> Tensor:
        state, states = torch.zeros_like(drive[:, 0]), []
        for t in range(drive.shape[1]):
            state = decay[:, t] * state + drive[:, t]
            states.append(state)
        return torch.stack(states, 1)

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.in_proj(x).chunk(2, -1)
        u = F.silu(self.conv(u.mT)[..., : x.shape[1]].mT)
        dt, b, c = self.x_proj(u).split([2, 3, 3], -1)
        dt = self.sizes(dt)[..., None]
        states = self.scan(torch.exp(-dt * self.A_log.exp()), dt * u[..., None] * b[:, :, None])
        return self.out_proj(((states * c[:, :, None]).sum(-1) + u * self.D) * F.silu(z))


mamba = shell("first_mamba", Mamba)


class Doubling(nn.Module):
    """Split projections, the conv as a sum of shifts, log T steps of the scan."""

    def __init__(self, m: Mamba, wrong: bool):
        super().__init__()
        self.ahead, (inner, gate) = int(wrong), m.in_proj.weight.chunk(2)
        self.inner, self.gate, self.taps = leaf(inner), leaf(gate), leaf(m.conv.weight.squeeze(1).T)
        self.conv_bias, self.rates, self.skip = leaf(m.conv.bias), leaf(m.A_log), leaf(m.D)
        self.dt, self.b, self.c = (leaf(part) for part in m.x_proj.weight.split([2, 3, 3]))
        self.widen, self.last = m.dt_proj, m.out_proj

    def forward(self, x: Tensor) -> Tensor:
        t, u = x.shape[1], F.pad(F.linear(x, self.inner), (0, 0, 2, 1))
        parts = [u[:, k + self.ahead : k + self.ahead + t] * tap for k, tap in enumerate(self.taps)]
        u = F.silu(sum(parts) + self.conv_bias)
        dt = F.softplus(self.widen(F.linear(u, self.dt)))
        a = torch.exp(torch.einsum("nte,es->ntes", dt, -self.rates.exp()))
        h, reach = torch.einsum("nte,nts->ntes", dt * u, F.linear(u, self.b)), 1
        while reach < t:
            h = torch.cat([h[:, :reach], h[:, reach:] + a[:, reach:] * h[:, :-reach]], 1)
            a = torch.cat([a[:, :reach], a[:, reach:] * a[:, :-reach]], 1)
            reach *= 2
        y = torch.einsum("ntes,nts->nte", h, F.linear(u, self.c)) + u * self.skip
        return self.last(y * F.silu(F.linear(x, self.gate)))


class Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx, decay: Tensor, drive: Tensor, wrong: bool) -> Tensor:
        states = [drive[0]]
        for a, b in zip(decay[1:], drive[1:], strict=True):
            states.append(a * states[-1] + b)
        states, ctx.wrong = torch.stack(states), wrong
        ctx.save_for_backward(decay, states)
        return states

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        decay, states = ctx.saved_tensors
        flow = grad.clone()
        for t in reversed(range(len(flow) - 1)):
            flow[t] += decay[t + 1] * flow[t + 1]
        before = states if ctx.wrong else torch.cat([torch.zeros_like(states[:1]), states[:-1]])
        return flow * before, flow, None


class OwnBackward(nn.Module):
    """Time first, with the scan's backward by hand."""

    def __init__(self, m: Mamba, wrong: bool):
        super().__init__()
        self.m, self.wrong = (
            nn.ModuleDict({"in": m.in_proj, "out": m.out_proj, "dt": m.dt_proj, "x": m.x_proj}),
            wrong,
        )
        self.kernel, self.shift, self.log, self.d = (
            leaf(m.conv.weight),
            leaf(m.conv.bias),
            leaf(m.A_log.T),
            leaf(m.D),
        )

    def forward(self, x: Tensor) -> Tensor:
        u, z = self.m["in"](x).split(W, 2)
        u = F.conv1d(F.pad(u.permute(1, 2, 0), (2, 0)), self.kernel, self.shift, groups=W).permute(2, 0, 1)
        u = u * u.sigmoid()
        dt, b, c = self.m["x"](u).tensor_split([2, 5], 2)
        dt = F.softplus(self.m["dt"](dt))[:, :, None]
        h = Scan.apply((-dt * self.log.exp()).exp(), dt * u[:, :, None] * b[..., None], self.wrong)
        return self.m["out"]((torch.einsum("tnse,tns->tne", h, c) + u * self.d) * F.silu(z))


class AsMatrix(Mamba):
    """All pairs of steps at once; the step's bias may come in twice."""

    wrong = False

    def sizes(self, dt: Tensor) -> Tensor:
        return F.softplus(self.dt_proj(dt) + int(self.wrong) * self.dt_proj.bias)

    def scan(self, decay: Tensor, drive: Tensor) -> Tensor:
        logs = decay.log().cumsum(1)
        hidden = later(logs.shape[1], logs.device)[..., None, None]
        weights = (logs[:, :, None] - logs[:, None]).masked_fill(hidden, -torch.inf).exp()
        return torch.einsum("nqkes,nkes->nqes", weights, drive)


CONV = ("layers.0.mixer", "layers.0.mixer.conv")
both(mamba, ported(Doubling), "scan_by_doubling", "conv_looks_ahead", CONV)
both(mamba, ported(OwnBackward, True), "own_backward", "backward_a_step_late", "layers.1.mixer", passes=BACK)
both(mamba, AsMatrix, "scan_as_a_masked_matrix", "step_bias_added_twice", "layers.1.mixer")
