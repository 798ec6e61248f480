"""True rewrites of sibling linear layers, in a gated MLP as in LLaMA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import in_place_of
from bench.cases._rewritten import SAME, copied
from bench.tasks import _classes, _task


class Gated(nn.Module):
    """[N, 18] -> [N, 5]: norm, SiLU(gate) * up, down, around a shortcut; then a linear layer."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(18)
        self.gate = nn.Linear(18, 40, bias=False)
        self.up = nn.Linear(18, 40, bias=False)
        self.down = nn.Linear(40, 18, bias=False)
        self.fc = nn.Linear(18, 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.fc(x + self.down(F.silu(self.gate(y)) * self.up(y)))


gated = _task("gated", Gated, lambda: (torch.randn(15, 18), _classes(15, 5)))


@in_place_of("", SAME, "sibling layers fused", gated, "siblings_fused")
class FusedSiblings(nn.Module):
    """One linear layer makes gate and up, which are then cut apart."""

    def __init__(self, model: Gated):
        super().__init__()
        self.norm, self.down, self.fc = model.norm, model.down, model.fc
        self.gate_up = nn.Linear(18, 80, bias=False)
        self.gate_up.weight = copied(torch.cat([model.gate.weight, model.up.weight]))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.fc(x + self.down(F.silu(gate) * up))


@in_place_of("", SAME, "sibling layers fused", gated, "siblings_interleaved")
class InterleavedSiblings(nn.Module):
    """One matrix whose even rows are the gate's and whose odd rows are up's."""

    def __init__(self, model: Gated):
        super().__init__()
        self.norm, self.down, self.fc = model.norm, model.down, model.fc
        self.w13 = copied(torch.stack([model.gate.weight, model.up.weight], 1).flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        pairs = (self.norm(x) @ self.w13.T).unflatten(-1, (-1, 2))
        return self.fc(x + self.down(F.silu(pairs[..., 0]) * pairs[..., 1]))


@in_place_of("", SAME, "sibling layers fused", gated, "siblings_batched")
class BatchedSiblings(nn.Module):
    """One ``bmm`` over a stack of the two transposed matrices."""

    def __init__(self, model: Gated):
        super().__init__()
        self.norm, self.down, self.fc = model.norm, model.down, model.fc
        self.experts = copied(torch.stack([model.gate.weight.T, model.up.weight.T]))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(self.norm(x).expand(2, -1, -1), self.experts)
        return self.fc(x + self.down(F.silu(gate) * up))
