"""Graph attention with features of the edges, on lists of edges."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GRAPHS, NODES, HEADS, WIDTH = 6, 6, 3, 12


def gather(values: Tensor, index: Tensor, count: int) -> Tensor:
    """The sum of the values of each index."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, index, values)


class EdgeAttention(nn.Module):
    """A weight for each edge and head; those of the edges into a node sum to one."""

    def __init__(self):
        super().__init__()
        self.query, self.key = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.edge = nn.Linear(3, WIDTH, bias=False)
        self.score = nn.Parameter(0.7 * torch.randn(HEADS, WIDTH // HEADS))

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
        mixed = self.query(x)[target] + self.key(x)[source] + self.edge(edges)
        logits = (F.leaky_relu(mixed, 0.2).unflatten(1, (HEADS, -1)) * self.score).sum(2)
        index = target[:, None].expand_as(logits)
        highest = logits.new_zeros(len(x), HEADS).scatter_reduce(0, index, logits, "amax", include_self=False)
        weights = (logits - highest.detach()[target]).exp()
        return weights / gather(weights, target, len(x))[target]


class EdgeLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = EdgeAttention()
        self.value, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
        weights = self.attention(x, edges, source, target)
        sent = self.value(x).unflatten(1, (HEADS, -1))[source] * weights[:, :, None]
        return self.norm(x + self.out(gather(sent, target, len(x)).flatten(1)))


class Readout(nn.Module):
    """A gated sum over the nodes of each graph."""

    def __init__(self):
        super().__init__()
        self.gate, self.feature = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, graph: Tensor) -> Tensor:
        return gather(self.gate(x).sigmoid() * self.feature(x).tanh(), graph, GRAPHS)


class EdgeGraph(nn.Module):
    """Nodes [36, 5], edges [84, 3] from source to target -> logits [6, 4]; a graph has six nodes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(5, WIDTH)
        self.layers = nn.ModuleList(EdgeLayer() for _ in range(3))
        self.readout = Readout()
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, nodes: Tensor, edges: Tensor, ends: Tensor) -> Tensor:
        x = self.embed(nodes)
        for layer in self.layers:
            x = layer(x, edges, ends[0], ends[1])
        return self.head(self.readout(x, torch.arange(len(x)) // NODES))
