"""Convolutions in parts, cumulative sums and linear recurrences."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, group, like, normal, swap, wide

pair = group(__name__, "convolution")
scan = group(__name__, "scan")


class Conv(nn.Conv2d):
    """Takes its weight and bias in parts."""

    scale: float = 1.0
    wrong_bias: bool = False


class GroupsApart(Conv):
    """Two groups as two convolutions."""

    def forward(self, x: Tensor) -> Tensor:
        weights, biases = self.weight.chunk(2), self.bias.chunk(2)
        if self.wrong_bias:
            biases = (biases[0], biases[0])
        parts = zip(x.chunk(2, 1), weights, biases, strict=True)
        return torch.cat([F.conv2d(h, w, b, padding=self.padding) for h, w, b in parts], 1)


class ChannelsApart(Conv):
    """The out channels in two parts over the same input."""

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        low, high = self.bias.chunk(2)
        parts = (first, low), (second * self.scale, high)
        return torch.cat([F.conv2d(x, w, b, padding=self.padding) for w, b in parts], 1)


class ChannelsInHalf(Conv):
    """One tap of one in channel at a time, added in the output's type: 288 additions, about 3 bits."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x, self.kernel_size, padding=self.padding)
        rows = self.weight.flatten(1)
        out = torch.zeros_like(rows @ columns)
        for i in range(rows.shape[1]):
            out = out + rows[:, i : i + 1] * columns[:, i : i + 1]
        return (out + self.bias.unsqueeze(-1)).unflatten(-1, x.shape[-2:])


def sums(x: Tensor, weight: Tensor) -> Tensor:
    return wide(x * weight).cumsum(1).to(x.dtype)


def sums_in_chunks(x: Tensor, weight: Tensor) -> Tensor:
    """Sums inside of chunks, and a float32 carry."""
    parts, carry = [], 0
    for part in wide(x * weight).split(32, 1):
        parts.append(part.cumsum(1) + carry)
        carry = parts[-1][:, -1:]
    return torch.cat(parts, 1).to(x.dtype)


def sums_in_half(x: Tensor, weight: Tensor) -> Tensor:
    """The carry in x's type: step n loses sqrt(n / 2) units, 16 at the 512th; three bits on the whole."""
    parts = [(x * weight)[:, 0]]
    for row in (x * weight)[:, 1:].unbind(1):
        parts.append(parts[-1] + row)
    return torch.stack(parts, 1)


def recurrence(x: Tensor, decay: Tensor, half: bool = False) -> Tensor:
    """h = a h + x along [batch, time, size]; in float32, or with the state in x's type."""
    a = torch.sigmoid(decay if half else wide(decay))
    state, out = torch.zeros_like(x[:, 0] if half else wide(x)[:, 0]), []
    for row in x.unbind(1):
        state = a * state + row
        out.append(state.to(x.dtype))
    return torch.stack(out, 1)


def recurrence_in_chunks(x: Tensor, decay: Tensor, size: int = 16, late: int = 1) -> Tensor:
    """A chunk as one product with the powers of a; ``late`` is the first row's power for the state before."""
    a = torch.sigmoid(wide(decay))
    steps = torch.arange(size)
    apart = (steps[:, None] - steps).clamp(min=0)
    powers = (a[:, None, None] ** apart).tril()
    state, out = torch.zeros_like(wide(x)[:, 0]), []
    for part in wide(x).split(size, 1):
        rows = torch.einsum("dts,bsd->btd", powers, part)
        rows = rows + a ** (steps[:, None] + late) * state[:, None]
        out.append(rows)
        state = rows[:, -1]
    return torch.cat(out, 1).to(x.dtype)


def slow(n: int, at: float = 2.0) -> Op:
    return Op(recurrence, decay=at + 0.3 * torch.randn(n))


def grouped() -> nn.Module:
    return nn.Conv2d(16, 16, 3, padding=1, groups=2)


def summed() -> Op:
    return Op(sums, weight=1 + 0.1 * torch.randn(24))


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("groups_apart", "16-mixed", R, grouped, like(GroupsApart), normal(2, 16, 10, 10), "torch"),
    pair("channels_apart", "bf16-mixed", R, lambda: nn.Conv2d(12, 32, 3, padding=1), like(ChannelsApart),
         normal(2, 12, 8, 8), "torch"),
    scan("sums_in_chunks", "bf16-true", R, summed, swap(sums_in_chunks), normal(2, 128, 24), "ssd"),
    scan("recurrence_in_chunks", "bf16-true", R, lambda: slow(32), swap(recurrence_in_chunks),
         normal(2, 64, 32), "mamba"),
    pair("groups_wrong_bias", "16-mixed", B, grouped, like(GroupsApart, wrong_bias=True),
         normal(2, 16, 10, 10), "torch"),
    pair("channels_off_by_1e-2", "bf16-mixed", B, lambda: nn.Conv2d(12, 32, 3, padding=1),
         like(ChannelsApart, scale=1.01), normal(2, 12, 8, 8), "torch"),
    scan("recurrence_decays_twice", "bf16-true", B, lambda: slow(32),
         swap(partial(recurrence_in_chunks, late=2)), normal(2, 64, 32), "mamba"),
    scan("sums_in_half", "bf16-true", L, summed, swap(sums_in_half), normal(2, 512, 24), "ssd", factor=9.2),
    # A state that forgets a fiftieth a step sums 25 independent roundings, and the decay itself is rounded
    # where a power of 50 of it counts: 3 bits and more.
    scan("recurrence_in_half", "16-true", L, lambda: slow(24, 4.0), swap(partial(recurrence, half=True)),
         normal(2, 256, 24, std=0.1), "mamba", factor=25),
    pair("conv_sum_in_half", "bf16-true", L, lambda: nn.Conv2d(32, 16, 3, padding=1), like(ChannelsInHalf),
         normal(2, 32, 6, 6), "causal conv", factor=11),
]  # fmt: skip
