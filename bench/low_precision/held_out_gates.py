"""Feed-forward kernels of other shapes: squared ReLU, low-rank adapters, experts, a sum in two parts."""

from __future__ import annotations

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.low_precision._pairs import Op, group, like, matrix, normal, plain, swap, wide

pair = group(__name__, "gated MLP")


class SquaredReLU(torch.autograd.Function):
    """relu(x)^2; its slope is ``times`` relu(x)."""

    @staticmethod
    def forward(ctx, x: Tensor, times: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.times = times
        return F.relu(wide(x)).square().to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return (ctx.times * F.relu(wide(x)) * wide(dy)).to(x.dtype), None


class TanhGELU(torch.autograd.Function):
    """gelu(a) * b by the tanh formula, both derivatives written out."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return (F.gelu(wide(a), approximate="tanh") * wide(b)).to(a.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        a, b = ctx.saved_tensors
        h, c = wide(a), math.sqrt(2 / math.pi)
        t = torch.tanh(c * (h + 0.044715 * h**3))
        slope = 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * c * (1 + 3 * 0.044715 * h * h)
        da, db = wide(dy) * wide(b) * slope, wide(dy) * 0.5 * h * (1 + t)
        return da.to(a.dtype), db.to(b.dtype)


class SiLUMul(torch.autograd.Function):
    """silu(a) * b; ``whole`` counts the slope of the sigmoid as well."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor, whole: bool) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.whole = whole
        return (F.silu(wide(a)) * wide(b)).to(a.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple:
        a, b = ctx.saved_tensors
        h, s = wide(a), torch.sigmoid(wide(a))
        slope = s + h * s * (1 - s) * ctx.whole
        return (wide(dy) * wide(b) * slope).to(a.dtype), (wide(dy) * h * s).to(b.dtype), None


class MLP(nn.Module):
    """Two layers and what stands between them."""

    def __init__(self, d: int, hidden: int, op: Op, times: int = 1) -> None:
        super().__init__()
        self.up, self.op, self.down = nn.Linear(d, times * hidden), op, nn.Linear(hidden, d)
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.op(*self.up(x).chunk(self.times, -1)))


class TwoSums(MLP):
    """The down product as two, added in float32."""

    scale: float = 1.0

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.op(*self.up(x).chunk(self.times, -1))
        kind = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else hidden.dtype
        with plain():
            weights = wide(self.down.weight.to(kind)).chunk(2, -1)
            parts = (wide(h) @ w.mT for h, w in zip(hidden.chunk(2, -1), weights, strict=True))
            return ((sum(parts) + wide(self.down.bias)) * self.scale).to(kind)


def squared(x: Tensor) -> Tensor:
    return F.relu(x).square()


def gelu_mul(a: Tensor, b: Tensor, approximate: str = "tanh") -> Tensor:
    return F.gelu(a, approximate=approximate) * b


def silu_mul(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def adapted(x: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float = 2.0) -> Tensor:
    """A low-rank adapter beside a layer."""
    return F.linear(x, weight) + scale * F.linear(F.linear(x, down), up)


def merged(x: Tensor, weight: Tensor, down: Tensor, up: Tensor) -> Tensor:
    """The adapter is added to the weight before the product, in float32."""
    with plain():
        whole = wide(weight) + 2.0 * wide(up) @ wide(down)
    return F.linear(x, whole.to(weight.dtype))


class Experts(nn.Module):
    """Four experts, each token a mixture of all; a loop over them."""

    def __init__(self, d: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.stack([matrix(hidden, d) for _ in range(4)]))
        self.down = nn.Parameter(torch.stack([matrix(d, hidden) for _ in range(4)]))

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        parts = [F.linear(F.silu(F.linear(x, u)), d) for u, d in zip(self.up, self.down, strict=True)]
        return (torch.stack(parts, 1) * weights.unsqueeze(-1)).sum(1)


class BatchedExperts(Experts):
    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        hidden = F.silu(torch.matmul(x, self.up.mT))
        return torch.einsum("etd,te->td", wide(hidden @ self.down.mT), wide(weights)).to(weights.dtype)


class StoredTransposed(nn.Module):
    """The experts' weights lie the other way round; a token's weight comes before the second product."""

    def __init__(self, reference: Experts) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(w.detach().mT.contiguous()) for w in (reference.up, reference.down)
        )

    def forward(self, x: Tensor, weights: Tensor) -> Tensor:
        tokens = zip(self.up, self.down, weights.mT, strict=True)
        parts = (wide(F.silu(x @ u) * w.unsqueeze(-1) @ d) for u, d, w in tokens)
        return sum(parts).to(weights.dtype)


def router(x: Tensor, weight: Tensor) -> Tensor:
    """Probabilities of the experts, in float32 whatever autocast says."""
    with plain():
        return F.linear(wide(x), wide(weight)).softmax(-1)


def router_in_half(x: Tensor, weight: Tensor) -> Tensor:
    """Logits and probabilities in half: 2^-9 where it had 2^-24, twelve bits and more."""
    return wide(F.linear(x, weight).softmax(-1))


def low_rank() -> Op:
    return Op(adapted, weight=matrix(64, 96), down=matrix(8, 96), up=0.3 * matrix(64, 8))


def mixture() -> tuple[Tensor, Tensor]:
    return torch.randn(40, 48), torch.randn(40, 4).softmax(-1)


R, B, L = "right", "bug", "fewer_bits"
CASES = [
    pair("squared_relu_by_hand", "bf16-true", R, lambda: MLP(64, 160, Op(squared)),
         swap(lambda x: SquaredReLU.apply(x, 2.0)), normal(48, 64), "torch"),
    pair("geglu_tanh_by_hand", "16-true", R, lambda: MLP(48, 128, Op(gelu_mul), 2), swap(TanhGELU.apply),
         normal(48, 48), "liger geglu"),
    pair("adapter_merged", "bf16-mixed", R, low_rank, swap(merged), normal(2, 24, 96), "torch"),
    pair("experts_batched", "16-mixed", R, lambda: Experts(48, 64), like(BatchedExperts), mixture, "vllm"),
    pair("experts_transposed", "bf16-mixed", R, lambda: Experts(48, 64), StoredTransposed, mixture, "vllm"),
    pair("down_in_two_sums", "16-mixed", R, lambda: MLP(64, 256, Op(silu_mul), 2), like(TwoSums),
         normal(40, 64), "torch"),
    pair("gelu_exact_for_tanh", "16-true", B, lambda: MLP(64, 160, Op(gelu_mul), 2),
         swap(partial(gelu_mul, approximate="none")), normal(48, 64), "liger geglu"),
    pair("silu_slope_incomplete", "bf16-true", B, lambda: MLP(48, 96, Op(silu_mul), 2),
         swap(lambda a, b: SiLUMul.apply(a, b, False)), normal(48, 48), "liger swiglu"),
    pair("adapter_off_by_1e-1", "bf16-mixed", B, low_rank, swap(partial(adapted, scale=2.2)),
         normal(2, 24, 96), "torch"),
    pair("mlp_off_by_1e-4", "16-mixed", B, lambda: MLP(64, 256, Op(silu_mul), 2), like(TwoSums, scale=1.0001),
         normal(96, 64), "torch"),
    pair("router_in_half", "bf16-mixed", L, lambda: Op(router, weight=2 * matrix(16, 64)),
         swap(router_in_half), normal(64, 64), "vllm", factor=22000),
]  # fmt: skip
