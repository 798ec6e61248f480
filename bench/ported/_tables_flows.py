"""A flow of affine couplings, and a factorisation machine beside a deep network."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _task


class Coupling(nn.Module):
    def __init__(self, turned: bool):
        super().__init__()
        self.turned = turned
        self.net = nn.Sequential(nn.Linear(3, 20), nn.Tanh(), nn.Linear(20, 6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x.chunk(2, 1)
        if self.turned:
            kept, moved = moved, kept
        scale, shift = self.net(kept).chunk(2, 1)
        scale = 2 * torch.tanh(scale / 2)
        moved = moved * scale.exp() + shift
        return torch.cat([moved, kept] if self.turned else [kept, moved], 1), scale.sum(1)


class Flow(nn.Module):
    """[N, 6] -> the latent and the logarithm of the determinant."""

    def __init__(self):
        super().__init__()
        self.couplings = nn.ModuleList(Coupling(i % 2 == 1) for i in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = x.new_zeros(len(x))
        for coupling in self.couplings:
            x, log_det = coupling(x)
            total = total + log_det
        return {"latent": x, "log_det": total}


def _likelihood(output: dict | tuple, targets: Tensor) -> Tensor:
    latent, log_det = output.values() if isinstance(output, dict) else output
    return (0.5 * latent.square().sum(1) - log_det).mean() / 6


def _points() -> tuple[Tensor, Tensor]:
    x = torch.randn(8, 6)
    return x + 0.5 * x.roll(1, 1).square(), torch.zeros(8)


flow = _task("ported_flow", Flow, _points, _likelihood)


class Bijector(nn.Module):
    """Scale and shift have output layers of their own; which half moves is an index."""

    def __init__(self, coupling: Coupling, bounded: bool):
        super().__init__()
        first, last = coupling.net[0], coupling.net[2]
        self.hidden = nn.ParameterDict({"kernel": copied(first.weight.T), "bias": copied(first.bias)})
        weights, biases = last.weight.chunk(2), last.bias.chunk(2)
        self.log_scale, self.shift = (linear_of(*pair) for pair in zip(weights, biases, strict=True))
        self.moves = slice(0, 3) if coupling.turned else slice(3, 6)
        self.reads = slice(3, 6) if coupling.turned else slice(0, 3)
        self.bounded = bounded

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(x[:, self.reads] @ self.hidden["kernel"] + self.hidden["bias"])
        scale = self.log_scale(h)
        if self.bounded:
            scale = 2 * torch.tanh(scale / 2)
        y = x.clone()
        y[:, self.moves] = torch.addcmul(self.shift(h), x[:, self.moves], scale.exp())
        return y, log_det + scale.sum(1)


class Chain(nn.Module):
    def __init__(self, model: Flow, bounded: bool = True):
        super().__init__()
        self.bijectors = nn.ModuleList(
            Bijector(coupling, bounded or i != 1) for i, coupling in enumerate(model.couplings)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        log_det = torch.zeros_like(x[:, 0])
        for bijector in self.bijectors:
            x, log_det = bijector(x, log_det)
        return x, log_det


class Pairs(nn.Module):
    """The sum of the products of all pairs of fields' vectors."""

    def forward(self, vectors: Tensor) -> Tensor:
        total = vectors.new_zeros(len(vectors))
        for i in range(vectors.shape[1]):
            for j in range(i):
                total = total + (vectors[:, i] * vectors[:, j]).sum(1)
        return total


class DeepFM(nn.Module):
    """Four fields of 7 values each -> a logit."""

    def __init__(self):
        super().__init__()
        self.linear = nn.ModuleList(nn.Embedding(7, 1) for _ in range(4))
        self.vectors = nn.ModuleList(nn.Embedding(7, 8) for _ in range(4))
        self.fm = Pairs()
        self.deep = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 1))
        for embed in self.vectors:
            nn.init.normal_(embed.weight, std=0.4)

    def forward(self, fields: Tensor) -> Tensor:
        columns = list(fields.unbind(1))
        first = sum(embed(c)[:, 0] for embed, c in zip(self.linear, columns, strict=True))
        vectors = torch.stack([embed(c) for embed, c in zip(self.vectors, columns, strict=True)], 1)
        return first + self.fm(vectors) + self.deep(vectors.flatten(1))[:, 0]


deepfm = _task(
    "ported_deepfm",
    DeepFM,
    lambda: (torch.randint(7, (8, 4)), torch.randint(2, (8,)).float()),
    F.binary_cross_entropy_with_logits,
)


class Squares(nn.Module):
    """Weights of a field's value and its vector are one row; pairs by the square of the sum."""

    def __init__(self, model: DeepFM):
        super().__init__()
        rows = [torch.cat([a.weight, b.weight], 1) for a, b in zip(model.linear, model.vectors, strict=True)]
        self.table, self.dnn = copied(torch.stack(rows)), model.deep

    def forward(self, fields: Tensor) -> Tensor:
        rows = self.table[torch.arange(4, device=fields.device), fields]
        first, vectors = rows[..., 0].sum(1), rows[..., 1:]
        pairs = 0.5 * (vectors.sum(1).square() - vectors.square().sum(1)).sum(1)
        return first + pairs + self.dnn(vectors.reshape(len(rows), -1)).squeeze(-1)
