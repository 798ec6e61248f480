"""A recommender and a mixture of experts for the held-out faults."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.cases._heldout_fault_sequence import feed_forward


class Recommender(nn.Module):
    """A user, an item and the items of the past (0 where there are fewer than six) -> a rating [N]."""

    def __init__(self):
        super().__init__()
        self.user, self.item = nn.Embedding(150, 8), nn.Embedding(90, 8)
        self.history = nn.EmbeddingBag(90, 8, mode="mean", padding_idx=0)
        self.user_bias = nn.Embedding(150, 1)
        self.fc1, self.act, self.fc2 = nn.Linear(24, 16), nn.SiLU(), nn.Linear(16, 1)

    def forward(self, user: Tensor, item: Tensor, history: Tensor) -> Tensor:
        u, i = self.user(user), self.item(item)
        x = self.fc2(self.act(self.fc1(torch.cat([u, i, self.history(history)], 1))))
        return x[:, 0] + self.user_bias(user)[:, 0] + 0.1 * (u * i).sum(1)


class Mixture(nn.Module):
    """Each row goes to two of four experts, weighed by the softmax of their two scores."""

    def __init__(self, width: int = 12, experts: int = 4):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(feed_forward(width) for _ in range(experts))

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        best, chosen = self.router(x).topk(2, -1)
        return best.softmax(-1), chosen

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.route(x)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, place = (chosen == index).nonzero(as_tuple=True)
            y = y.index_add(0, rows, expert(x[rows]) * weights[rows, place, None])
        return y


class MixtureNet(nn.Module):
    """[N, 10] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.enter, self.norm, self.mixture = nn.Linear(10, 12), nn.LayerNorm(12), Mixture()
        self.leave = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        return self.leave(x + self.mixture(self.norm(x)))
