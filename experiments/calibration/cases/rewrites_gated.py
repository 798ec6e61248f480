"""True rewrites of sibling linear layers, in a gated MLP as in LLaMA."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME, copied
from experiments.calibration.tasks import Task


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


def _network() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gated()


def _batches() -> list:
    source = torch.Generator().manual_seed(1)
    return [
        (torch.randn(15, 18, generator=source), torch.randint(5, (15,), generator=source)) for _ in range(8)
    ]


gated = Task("gated", _network, _batches)


class FusedSiblings(nn.Module):
    """``gate`` and ``up`` in one matrix, one after the other."""

    def __init__(self, model: Gated):
        super().__init__()
        self.norm, self.down, self.fc = model.norm, model.down, model.fc
        self.gate_up = nn.Linear(18, 80, bias=False)
        self.gate_up.weight = copied(torch.cat([model.gate.weight, model.up.weight]))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(self.norm(x)).chunk(2, -1)
        return self.fc(x + self.down(F.silu(gate) * up))


class InterleavedSiblings(nn.Module):
    """``gate`` and ``up`` in one matrix, row by row in turn."""

    def __init__(self, model: Gated):
        super().__init__()
        self.norm, self.down, self.fc = model.norm, model.down, model.fc
        self.w13 = copied(torch.stack([model.gate.weight, model.up.weight], 1).flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        pairs = (self.norm(x) @ self.w13.T).unflatten(-1, (-1, 2))
        return self.fc(x + self.down(F.silu(pairs[..., 0]) * pairs[..., 1]))


class BatchedSiblings(nn.Module):
    """``gate`` and ``up`` as the two matrices of one batched product."""

    def __init__(self, model: Gated):
        super().__init__()
        self.norm, self.down, self.fc = model.norm, model.down, model.fc
        self.experts = copied(torch.stack([model.gate.weight.T, model.up.weight.T]))

    def forward(self, x: Tensor) -> Tensor:
        gate, up = torch.bmm(self.norm(x).expand(2, -1, -1), self.experts)
        return self.fc(x + self.down(F.silu(gate) * up))


@case(SAME, "sibling layers fused", on=gated)
def siblings_fused(model: nn.Module) -> nn.Module:
    """One linear layer makes gate and up, which are then cut apart."""
    return FusedSiblings(model)


@case(SAME, "sibling layers fused", on=gated)
def siblings_interleaved(model: nn.Module) -> nn.Module:
    """One matrix whose even rows are the gate's and whose odd rows are up's."""
    return InterleavedSiblings(model)


@case(SAME, "sibling layers fused", on=gated)
def siblings_batched(model: nn.Module) -> nn.Module:
    """One ``bmm`` over a stack of the two transposed matrices."""
    return BatchedSiblings(model)
