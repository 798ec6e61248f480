"""Convolutions by other products, causal ones, pooling, and scans whose decay depends on the input."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, behind, group, like, normal, plain, swap, wide

pair = group(__name__, "convolution")
scan = group(__name__, "scan")


def causal(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Depthwise over [batch, time, size], four taps back."""
    h = F.pad(wide(x).mT, (3, 0))
    with plain():
        return F.conv1d(h, wide(weight).unsqueeze(1), wide(bias), groups=len(weight)).mT.to(x.dtype)


def causal_by_shifts(x: Tensor, weight: Tensor, bias: Tensor, size: int = 0) -> Tensor:
    """A sum of shifted inputs; with a ``size``, each chunk begins from zeros."""
    parts = []
    for part in wide(x).split(size or x.shape[1], 1):
        h = F.pad(part, (0, 0, 3, 0))
        parts.append(sum(h[:, i : i + part.shape[1]] * wide(weight)[:, i] for i in range(4)) + wide(bias))
    return torch.cat(parts, 1).to(x.dtype)


class Unfolded(nn.Conv2d):
    """One product of the columns, the bias in float32."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.kernel_size, padding=self.padding)
        out = torch.matmul(self.weight.flatten(1), columns)
        return (wide(out) + wide(self.bias).unsqueeze(-1)).to(out.dtype).unflatten(-1, x.shape[-2:])


class Pointwise(nn.Conv2d):
    """A kernel of one as a linear layer over the channels."""

    scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.flatten(1)
        last = len(weight) - 4
        weight = torch.cat([weight[:last], weight[last:] * self.scale])
        return F.linear(x.movedim(1, -1), weight, self.bias).movedim(-1, 1)


class Folded(nn.ConvTranspose2d):
    """The products first, laid in place by fold: nothing overlaps where the stride is the kernel's size."""

    def forward(self, x: Tensor) -> Tensor:
        columns = self.weight.flatten(1).mT @ x.flatten(2)
        size = tuple(2 * n for n in x.shape[-2:])
        return F.fold(columns, size, 2, stride=2) + self.bias.view(-1, 1, 1).to(columns.dtype)


def pooled(x: Tensor) -> Tensor:
    """The mean of each channel and its spread, in float32."""
    h = wide(x).flatten(2)
    return torch.cat([h.mean(-1), h.square().mean(-1)], -1).to(x.dtype)


def pooled_in_half(x: Tensor) -> Tensor:
    """A row of pixels at a time in x's type: 256 additions; squares have no sign, so the sum only grows."""
    total, squares = torch.zeros_like(x[..., 0, 0]), torch.zeros_like(x[..., 0, 0])
    for part in x.flatten(2).split(4, -1):
        total = total + part.sum(-1)
        squares = squares + (part * part).sum(-1)
    return torch.cat([total, squares], -1) / x[0, 0].numel()


def averages(x: Tensor, count: bool = True) -> Tensor:
    return F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=count)


def selective(x: Tensor, step: Tensor, rate: Tensor, skip: Tensor, times: float = 1.0) -> Tensor:
    """Mamba's recurrence with one state a channel, in float32."""
    dt = F.softplus(wide(step))
    decay, gain = torch.exp(-dt * wide(rate).exp()), dt * wide(x)
    state, out = torch.zeros_like(gain[:, 0]), []
    for a, b in zip(decay.unbind(1), gain.unbind(1), strict=True):
        state = a * state + b
        out.append(state)
    return (torch.stack(out, 1) + times * wide(skip) * wide(x)).to(x.dtype)


def selective_by_doubling(x: Tensor, step: Tensor, rate: Tensor, skip: Tensor) -> Tensor:
    """Hillis and Steele's: pairs of (decay, state) are combined at distances 1, 2, 4, ..."""
    dt = F.softplus(wide(step))
    decay, state = torch.exp(-dt * wide(rate).exp()), dt * wide(x)
    apart = 1
    while apart < x.shape[1]:
        before = F.pad(state, (0, 0, apart, 0))[:, :-apart]
        state = state + decay * before
        decay = decay * F.pad(decay, (0, 0, apart, 0))[:, :-apart]
        apart *= 2
    return (state + wide(skip) * wide(x)).to(x.dtype)


def selective_in_half(x: Tensor, step: Tensor, rate: Tensor, skip: Tensor) -> Tensor:
    """The state is stored in x's type after each of 384 steps: sqrt of its memory in units, 2 to 3 bits."""
    dt = F.softplus(wide(step))
    decay, gain = torch.exp(-dt * wide(rate).exp()), dt * wide(x)
    state, out = torch.zeros_like(x[:, 0]), []
    for a, b in zip(decay.unbind(1), gain.unbind(1), strict=True):
        state = (a * wide(state) + b).to(x.dtype)
        out.append(state)
    return (wide(torch.stack(out, 1)) + wide(skip) * wide(x)).to(x.dtype)


class Selective(nn.Module):
    """Input and step come of one projection, which autocast makes half."""

    def __init__(self, d: int, slow: float = 0.0) -> None:
        super().__init__()
        self.project = nn.Linear(d, 2 * d)
        self.op = Op(selective, rate=0.3 * torch.randn(d) - slow, skip=0.1 * torch.randn(d))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(*self.project(x).chunk(2, -1))


def depthwise() -> Op:
    return Op(causal, weight=0.5 * torch.randn(48, 4), bias=0.1 * torch.randn(48))


def pointwise() -> nn.Module:
    return nn.Conv2d(24, 40, 1)


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("causal_by_shifts", "bf16-mixed", R, lambda: behind(32, 48, depthwise()), swap(causal_by_shifts),
         normal(2, 40, 32), "causal conv"),
    pair("conv_unfolded", "16-mixed", R, lambda: nn.Conv2d(8, 16, 5, padding=2), like(Unfolded),
         normal(2, 8, 9, 9), "torch"),
    pair("conv_pointwise", "16-true", R, pointwise, like(Pointwise), normal(2, 24, 8, 8), "torch"),
    pair("transposed_folded", "bf16-mixed", R, lambda: nn.ConvTranspose2d(12, 8, 2, stride=2), like(Folded),
         normal(2, 12, 6, 6), "torch"),
    scan("selective_by_doubling", "bf16-true", R, lambda: Selective(32), swap(selective_by_doubling),
         normal(2, 64, 32), "mamba"),
    pair("causal_chunks_from_zeros", "16-mixed", B, lambda: behind(32, 48, depthwise()),
         swap(partial(causal_by_shifts, size=20)), normal(2, 40, 32), "causal conv"),
    pair("pointwise_last_off_by_1e-3", "16-true", B, pointwise, like(Pointwise, scale=1.001),
         normal(2, 24, 8, 8), "torch"),
    pair("pool_without_padding", "bf16-mixed", B, lambda: nn.Sequential(nn.Conv2d(4, 8, 3), Op(averages)),
         swap(partial(averages, count=False)), normal(2, 4, 14, 14), "torch"),
    scan("selective_without_skip", "bf16-true", B, lambda: Selective(32), swap(partial(selective, times=0.0)),
         normal(2, 64, 32), "mamba"),
    scan("selective_state_in_half", "bf16-mixed", L, lambda: Selective(24, 5.0), swap(selective_in_half),
         normal(2, 384, 24), "mamba", factor=21),
    pair("pool_in_half", "16-true", L, lambda: Op(pooled), swap(pooled_in_half),
         normal(8, 16, 32, 32, mean=0.5), "torch", factor=9.5),
]  # fmt: skip
