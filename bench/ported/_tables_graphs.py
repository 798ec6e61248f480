"""Graph convolutions over lists of edges, against dense matrices of the same graphs."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _classes, _task

NODES = 12


def graph() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Features of 12 nodes, 18 edges in both directions, a class for each node."""
    pairs = torch.combinations(torch.arange(NODES))
    edges = pairs[torch.randperm(len(pairs))[:18]].T
    return (torch.randn(NODES, 8), torch.cat([edges, edges.flip(0)], 1)), _classes(NODES, 4)


class GCNConv(nn.Module):
    """Adds self-loops, weighs an edge by the roots of both degrees, and sums at its target."""

    def __init__(self, before: int, width: int):
        super().__init__()
        self.lin = nn.Linear(before, width, bias=False)
        self.bias = nn.Parameter(0.1 * torch.randn(width))

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(len(x), device=x.device)
        source, target = torch.cat([edges, torch.stack([loops, loops])], 1)
        degree = x.new_zeros(len(x)).index_add(0, target, x.new_ones(len(target)))
        weight = degree[source].rsqrt() * degree[target].rsqrt()
        x = self.lin(x)
        return torch.zeros_like(x).index_add(0, target, weight[:, None] * x[source]) + self.bias


class GCN(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.conv2, self.conv3 = GCNConv(8, 16), GCNConv(16, 16), GCNConv(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = self.conv1(x, edge_index).relu()
        return self.conv3(self.conv2(x, edge_index).relu(), edge_index)


gcn = _task("ported_gcn", GCN, graph)


class KipfLayer(nn.Module):
    def __init__(self, conv: GCNConv):
        super().__init__()
        self.kernel, self.offset = copied(conv.lin.weight.T), copied(conv.bias)

    def forward(self, features: Tensor, support: Tensor) -> Tensor:
        return support @ (features @ self.kernel) + self.offset


class Kipf(nn.Module):
    """A matrix of the whole graph, made once for all layers."""

    def __init__(self, model: GCN, rows: bool = False):
        super().__init__()
        self.gc = nn.ModuleList(KipfLayer(conv) for conv in (model.conv1, model.conv2, model.conv3))
        self.rows = rows

    def support(self, x: Tensor, edges: Tensor) -> Tensor:
        matrix = torch.eye(len(x), dtype=x.dtype, device=x.device)
        matrix[edges[1], edges[0]] = 1
        degree = matrix.sum(1)
        if self.rows:
            return matrix / degree[:, None]
        root = degree.pow(-0.5).diag()
        return root @ matrix @ root

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        support = self.support(x, edge_index)
        for i, layer in enumerate(self.gc):
            x = layer(x.relu() if i else x, support)
        return x


class GATConv(nn.Module):
    """Each target weighs its sources by a softmax over its edges, self-loops included."""

    def __init__(self, before: int, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(before, heads * width, bias=False)
        self.att = nn.Parameter(0.5 * torch.randn(heads, 2 * width))
        self.bias = nn.Parameter(0.1 * torch.randn(heads * width))
        self.act = nn.LeakyReLU(0.2)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        loops = torch.arange(len(x), device=x.device)
        source, target = torch.cat([edges, torch.stack([loops, loops])], 1)
        h = self.lin(x).unflatten(1, (self.heads, -1))
        pairs = torch.cat([h[target], h[source]], -1)
        score = self.act((pairs * self.att).sum(-1)).exp()
        total = score.new_zeros(len(x), self.heads).index_add(0, target, score)
        share = score / total[target]
        return torch.zeros_like(h).index_add(0, target, share[..., None] * h[source]).flatten(1) + self.bias


class GAT(nn.Module):
    def __init__(self):
        super().__init__()
        self.gat1, self.gat2 = GATConv(8, 8, 2), GATConv(16, 16, 1)
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        x = F.elu(self.gat1(x, edge_index))
        return self.out(F.elu(self.gat2(x, edge_index)))


gat = _task("ported_gat", GAT, graph)


class DenseAttention(nn.Module):
    """A layer of its own for each head, scores in a masked matrix [target, source]."""

    def __init__(self, conv: GATConv, slope: float):
        super().__init__()
        self.project = nn.ModuleList(linear_of(w) for w in conv.lin.weight.chunk(conv.heads))
        to, come = conv.att.chunk(2, 1)
        self.att_dst, self.att_src = copied(to.T), copied(come.T)
        self.bias, self.slope = copied(conv.bias), slope

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        heads = []
        for i, project in enumerate(self.project):
            h = project(x)
            score = (h @ self.att_dst[:, i])[:, None] + (h @ self.att_src[:, i])[None]
            score = F.leaky_relu(score, self.slope).masked_fill(~seen, float("-inf"))
            heads.append(score.softmax(1) @ h)
        return torch.cat(heads, 1) + self.bias


class DenseGAT(nn.Module):
    def __init__(self, model: GAT, slope: float = 0.2):
        super().__init__()
        self.attentions = nn.ModuleList(DenseAttention(conv, slope) for conv in (model.gat1, model.gat2))
        self.classify = model.out

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        seen = torch.eye(len(x), dtype=torch.bool, device=x.device)
        seen[edge_index[1], edge_index[0]] = True
        for layer in self.attentions:
            x = F.elu(layer(x, seen))
        return self.classify(x)
