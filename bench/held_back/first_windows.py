"""More mixers: a Conformer's conv, T5's attention by distance, ALiBi's in blocks of keys."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._first_shared import both, later, leaf, pile
from bench.held_back._first_shell import W, ported, shell
from bench.held_back.first_retention import Alibi, alibi


class Conv(nn.Module):
    def __init__(self):
        super().__init__()
        self.point1, self.point2 = nn.Conv1d(W, 2 * W, 1), nn.Conv1d(W, W, 1)
        self.depth, self.bn = nn.Conv1d(W, W, 5, padding=2, groups=W, bias=False), nn.BatchNorm1d(W)

    def gated(self, x: Tensor) -> Tensor:
        return F.glu(x, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.point2(F.silu(self.bn(self.depth(self.gated(self.point1(x.mT)))))).mT


class Windows(nn.Module):
    """Time first; matrix products for convs of width one, unfolded windows for the other."""

    def __init__(self, m: Conv, wrong: bool):
        super().__init__()
        self.halves = pile(m.point1.weight.squeeze(2).chunk(2))
        self.shift, self.taps, self.norm = pile(m.point1.bias.chunk(2)), leaf(m.depth.weight.squeeze(1)), m.bn
        self.last, self.last_bias, self.norm.momentum = (
            leaf(m.point2.weight[..., 0].T),
            m.point2.bias,
            0.1 - 0.09 * wrong,
        )

    def forward(self, x: Tensor) -> Tensor:
        value, gate = torch.einsum("tnd,ced->ctne", x, self.halves) + self.shift[:, None, None]
        windows = F.pad(value * gate.sigmoid(), (0, 0, 0, 0, 2, 2)).unfold(0, 5, 1)
        y = self.norm(torch.einsum("tndk,dk->tnd", windows, self.taps).flatten(0, 1)).view_as(x)
        return F.silu(y) @ self.last + self.last_bias


class Spectrum(nn.Module):
    """The depthwise conv as a product of spectra."""

    def __init__(self, m: Conv, wrong: bool):
        super().__init__()
        self.ends, self.norm = nn.ModuleList([m.point1, m.point2]), m.bn
        self.response, self.room = leaf(m.depth.weight.flip(2)), 0 if wrong else 4

    def forward(self, x: Tensor) -> Tensor:
        t, y = x.shape[1], F.glu(self.ends[0](x.mT), 1)
        n = t + self.room
        waves = torch.fft.rfft(y, n) * torch.fft.rfft(self.response.squeeze(1), n)
        return self.ends[1](F.silu(self.norm(torch.fft.irfft(waves, n).roll(-2, 2)[..., :t]))).mT


class Gates(Conv):
    """The gate written out; its halves may be exchanged."""

    wrong = False

    def gated(self, x: Tensor) -> Tensor:
        value, gate = (x.roll(W, 1) if self.wrong else x).unflatten(1, (2, W)).unbind(1)
        return value / (1 + torch.exp(-gate))


class Relative(nn.Module):
    """A learned bias for each head and clipped distance."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 2)

    def forward(self, t: Tensor) -> Tensor:
        return self.table((t - t[:, None]).clamp(-3, 3) + 3).permute(2, 0, 1)


class T5(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(W, W, bias=False) for _ in range(4))
        self.bias = Relative()

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(2, (2, 8)).transpose(1, 2) for f in (self.q, self.k, self.v))
        bias = self.bias(torch.arange(x.shape[1], device=x.device))
        return self.o((F.softmax(q @ k.mT + bias, -1) @ v).transpose(1, 2).flatten(2))


class ByHead(nn.Module):
    """One pass for each head; the bias as diagonals that a one-hot of distances picks."""

    def __init__(self, m: T5, wrong: bool):
        super().__init__()
        self.w, self.o = pile(f.weight.view(2, 8, W) for f in (m.q, m.k, m.v)), leaf(m.o.weight.view(W, 2, 8))
        self.far, self.sign = leaf(m.bias.table.weight.T), -1 if wrong else 1

    def forward(self, x: Tensor) -> Tensor:
        t, total = torch.arange(len(x), device=x.device) * self.sign, 0.0
        picks = F.one_hot((t[None] - t[:, None]).clamp(-3, 3) + 3, 7).to(x.dtype)
        for i in range(2):
            q, k, v = torch.einsum("tnd,ckd->cntk", x, self.w[:, i])
            weights = torch.softmax(torch.baddbmm((picks @ self.far[i]).expand(len(q), -1, -1), q, k.mT), 2)
            total = total + (weights @ v).transpose(0, 1) @ self.o[:, i].T
        return total


class Online(nn.Module):
    """Keys in blocks of four with a running maximum and sum."""

    def __init__(self, m: Alibi, wrong: bool):
        super().__init__()
        (self.q, self.kv), self.wrong, self.out = map(leaf, m.qkv.weight.split([W, 2 * W])), wrong, m.out
        self.shift, self.bias = leaf(m.qkv.bias), m.bias

    def forward(self, x: Tensor) -> Tensor:
        whole = F.linear(x, torch.cat([self.q, self.kv]), self.shift)
        q, k, v = (t.unflatten(2, (2, 8)).transpose(1, 2) for t in whole.chunk(3, 2))
        bias = self.bias(x).masked_fill(later(x.shape[1], x.device), -torch.inf)
        top, total, mixed = q.new_full((), -torch.inf), 0.0, 0.0
        for ks, vs, bs in zip(k.split(4, 2), v.split(4, 2), bias.split(4, 2), strict=True):
            scores = q @ ks.mT * 8**-0.5 + bs
            new = torch.maximum(top, scores.detach().amax(-1, keepdim=True))
            share, shrink, top = torch.exp(scores - new), torch.exp(top - new), new
            total, mixed = (
                total * shrink + share.sum(-1, keepdim=True),
                mixed * (1 if self.wrong else shrink) + share @ vs,
            )
        return self.out((mixed / total).transpose(1, 2).flatten(2))


conv, t5 = shell("first_conv", Conv), shell("first_t5", T5)
both(conv, ported(Windows, True), "conv_by_windows", "slow_mean", "layers.0.mixer.bn", passes="buffer")
both(conv, ported(Spectrum), "conv_by_spectrum", "conv_wraps_around", "layers.0.mixer.depth")
both(conv, Gates, "gate_written_out", "value_and_gate_exchanged", "layers.1.mixer")
both(t5, ported(ByHead, True), "one_pass_a_head", "distance_negated", "layers.0.mixer.bias")
both(alibi, ported(Online), "softmax_in_blocks", "blocks_not_rescaled", "layers.0.mixer")
