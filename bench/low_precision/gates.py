"""Feed-forward kernels: SwiGLU, GeGLU, MLP blocks, a projection fused out of three."""

from __future__ import annotations

import copy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, group, like, matrix, normal, swap, wide

pair = group(__name__, "gated MLP")


class SiLUMul(torch.autograd.Function):
    """silu(a) * b in float32, silu recomputed in the backward pass."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (F.silu(wide(a)) * wide(b)).to(a.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        h, g = wide(a), wide(dy)
        s = torch.sigmoid(h)
        da = g * wide(b) * (h * s * (1 - s) + s)
        return da.to(a.dtype), (g * h * s).to(b.dtype)


class SwiGLU(nn.Module):
    """Llama's feed-forward block."""

    def __init__(self, d: int, hidden: int, bias: bool = False) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden, bias), nn.Linear(d, hidden, bias)
        self.down = nn.Linear(hidden, d, bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class SwiGLUByHand(SwiGLU):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(SiLUMul.apply(self.gate(x), self.up(x)))


class SwiGLUJoined(nn.Module):
    """Gate and up in one product."""

    def __init__(self, reference: SwiGLU) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.cat([reference.gate.weight, reference.up.weight]).detach())
        self.down = copy.deepcopy(reference.down)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = F.linear(x, self.gate_up).chunk(2, -1)
        return self.down(F.silu(gate) * up)


class SwiGLUTiled(SwiGLU):
    """Sixteen tokens at a time."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([SwiGLU.forward(self, part) for part in x.split(16)])


class SwiGLUWithoutBias(SwiGLU):
    """The fused kernel of the last layer takes no bias."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(F.silu(self.gate(x)) * self.up(x), self.down.weight)


class SwiGLUScaled(SwiGLU):
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x) * self.scale)


class SwiGLUInHalf(SwiGLU):
    """The hidden units arrive four at a time and are added in the output's type: 512 additions of 2048 units.

    A running sum of n equal parts in u loses sqrt(n / 2) u. The units' own
    rounding is in the reference too and hides a part: 2 to 3 bits.
    """

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.silu(self.gate(x)) * self.up(x)
        out = 0
        for part, weight in zip(hidden.split(4, -1), self.down.weight.split(4, -1), strict=True):
            out = out + F.linear(part, weight)
        return out


class GeGLU(nn.Module):
    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(d, hidden), nn.Linear(d, hidden)
        self.op = Op(geglu_exact)

    def forward(self, x: Tensor) -> Tensor:
        return self.op(self.gate(x), self.up(x))


def geglu_exact(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a) * b


def geglu_erf(a: Tensor, b: Tensor) -> Tensor:
    h = wide(a)
    return (0.5 * h * (1 + torch.erf(h * 0.5**0.5)) * wide(b)).to(b.dtype)


def geglu_tanh(a: Tensor, b: Tensor) -> Tensor:
    return F.gelu(a, approximate="tanh") * b


def qkv_apart(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.cat([F.linear(x, w) for w in (q, k, v)], -1)


def qkv_joined(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.linear(x, torch.cat([q, k, v]))


def qkv_wrong_rows(x: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The split of k and v begins a row late."""
    rows = torch.cat([q, k, v])
    return F.linear(x, torch.cat([rows[:65], rows[65:].roll(-1, 0)]))


def scaled_qkv(x: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return torch.cat([F.linear(x, q * scale), F.linear(x, k), F.linear(x, v)], -1)


def projections() -> Op:
    return Op(qkv_apart, q=matrix(64, 128), k=matrix(32, 128), v=matrix(32, 128))


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("swiglu_by_hand", "bf16-mixed", R, lambda: SwiGLU(96, 192), like(SwiGLUByHand), normal(48, 96),
         "liger swiglu"),
    pair("swiglu_joined", "bf16-mixed", R, lambda: SwiGLU(64, 160), SwiGLUJoined, normal(2, 24, 64),
         "liger swiglu"),
    pair("swiglu_tiled", "16-mixed", R, lambda: SwiGLU(64, 128, True), like(SwiGLUTiled), normal(64, 64),
         "liger swiglu"),
    pair("geglu_by_erf", "bf16-mixed", R, lambda: GeGLU(64, 128), swap(geglu_erf), normal(48, 64),
         "liger geglu"),
    pair("qkv_joined", "bf16-true", R, projections, swap(qkv_joined), normal(2, 32, 128), "torch"),
    pair("geglu_tanh_for_exact", "bf16-mixed", B, lambda: GeGLU(96, 256), swap(geglu_tanh), normal(64, 96),
         "liger geglu"),
    pair("mlp_bias_ignored", "16-mixed", B, lambda: SwiGLU(64, 128, True), like(SwiGLUWithoutBias),
         normal(48, 64), "liger swiglu"),
    pair("qkv_split_a_row_late", "16-mixed", B, projections, swap(qkv_wrong_rows), normal(2, 32, 128),
         "torch"),
    pair("swiglu_off_by_1e-3", "bf16-mixed", B, lambda: SwiGLU(64, 128), like(SwiGLUScaled, scale=1.001),
         normal(96, 64), "liger swiglu"),
    pair("query_off_by_1e-2", "bf16-true", B, projections, swap(partial(scaled_qkv, scale=1.01)),
         normal(2, 32, 128), "vllm"),
    pair("mlp_sum_in_half", "bf16-mixed", L, lambda: SwiGLU(64, 2048), like(SwiGLUInHalf), normal(24, 64),
         "liger swiglu", factor=5),
]  # fmt: skip
