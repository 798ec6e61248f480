"""A graph network over many graphs in one list of edges: attention with bonds, a virtual node, jumps."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LAYERS, GRAPHS = 8, 2, 3, 10


def gather_sum(values: Tensor, owner: Tensor, count: int) -> Tensor:
    """The sum of the rows of each owner."""
    return values.new_zeros(count, *values.shape[1:]).index_add(0, owner, values)


def spread_out(module: nn.Module) -> None:
    """Start with larger weights, so that nodes and graphs differ from the first step."""
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight, gain=0.8)


class SegmentSoftmax(nn.Module):
    """Shares of rows [R, H] among those of one owner."""

    def forward(self, scores: Tensor, owner: Tensor, count: int) -> Tensor:
        rows = owner[:, None].expand_as(scores)
        top = scores.new_full((count, scores.shape[1]), -torch.inf)
        top = top.scatter_reduce(0, rows, scores.detach(), "amax")
        high = (scores - top[owner]).exp()
        return high / gather_sum(high, owner, count)[owner]


class Neighbours(nn.Module):
    """Attention of each node over those whose edges end in it; bonds add to keys and values; a gated skip."""

    def __init__(self):
        super().__init__()
        self.q, self.v, self.skip = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.k, self.bond = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
        self.beta = nn.Linear(3 * WIDTH, 1)
        self.softmax = SegmentSoftmax()

    def forward(self, h: Tensor, edges: Tensor, bonds: Tensor) -> Tensor:
        of, to = edges
        bond = self.bond(bonds)
        q, k, v = (
            rows.unflatten(1, (HEADS, -1))
            for rows in (self.q(h)[to], self.k(h)[of] + bond, self.v(h)[of] + bond)
        )
        shares = self.softmax((q * k).sum(2) * (WIDTH // HEADS) ** -0.5, to, len(h))
        mixed = gather_sum((shares[..., None] * v).flatten(1), to, len(h))
        skip = self.skip(h)
        beta = self.beta(torch.cat([mixed, skip, mixed - skip], 1)).sigmoid()
        return beta * skip + (1 - beta) * mixed


class GraphNorm(nn.Module):
    """Over the nodes of each graph, less a learnt part of their mean."""

    def __init__(self, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.part = nn.Parameter(0.5 + 0.5 * torch.rand(WIDTH))
        self.weight, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

    def forward(self, h: Tensor, owner: Tensor, sizes: Tensor) -> Tensor:
        mean = gather_sum(h, owner, len(sizes)) / sizes[:, None]
        h = h - self.part * mean[owner]
        spread = gather_sum(h.square(), owner, len(sizes)) / sizes[:, None]
        return self.weight * h / (spread[owner] + self.eps).sqrt() + self.bias


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.norm = Neighbours(), GraphNorm()
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.SiLU(), nn.Linear(2 * WIDTH, WIDTH))

    def forward(self, h: Tensor, edges: Tensor, bonds: Tensor, owner: Tensor, sizes: Tensor) -> Tensor:
        h = h + F.silu(self.norm(self.attention(h, edges, bonds), owner, sizes))
        return h + self.mlp(h)


class Virtual(nn.Module):
    """What the virtual node [G, C] of each graph becomes once it has read its nodes."""

    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH)
        )

    def forward(self, virtual: Tensor, h: Tensor, owner: Tensor) -> Tensor:
        return virtual + self.mlp(virtual + gather_sum(h, owner, len(virtual)))


class Jump(nn.Module):
    """Each node's own mixture of what the layers gave it."""

    def __init__(self):
        super().__init__()
        self.score = nn.Linear(WIDTH, 1, bias=False)

    def forward(self, states: list[Tensor]) -> Tensor:
        stacked = torch.stack(states, 1)
        return (self.score(stacked).softmax(1) * stacked).sum(1)


class Readout(nn.Module):
    """A weighed and a plain mean of the nodes of each graph."""

    def __init__(self):
        super().__init__()
        self.gate, self.value = nn.Linear(WIDTH, 1, bias=False), nn.Linear(WIDTH, WIDTH)
        self.softmax = SegmentSoftmax()
        self.head = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2))

    def forward(self, h: Tensor, owner: Tensor, sizes: Tensor) -> Tensor:
        shares = self.softmax(self.gate(h), owner, len(sizes))
        weighed = gather_sum(shares * self.value(h), owner, len(sizes))
        return self.head(torch.cat([weighed, gather_sum(h, owner, len(sizes)) / sizes[:, None]], 1))


class Graphs(nn.Module):
    """Nodes [V, 5], edges [2, E] from and to, bonds [E, 3] and each node's graph [V] -> [G, 2]."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, WIDTH)
        self.bond = nn.Sequential(nn.Linear(3, WIDTH), nn.SiLU())
        self.start = nn.Parameter(0.3 * torch.randn(1, WIDTH))
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.virtuals = nn.ModuleList(Virtual() for _ in range(LAYERS - 1))
        self.jump, self.readout = Jump(), Readout()
        self.apply(spread_out)

    def forward(self, nodes: Tensor, edges: Tensor, bonds: Tensor, owner: Tensor) -> Tensor:
        sizes = torch.bincount(owner)
        h, bonds, virtual = self.lift(nodes), self.bond(bonds), self.start.expand(len(sizes), -1)
        states = []
        for i, layer in enumerate(self.layers):
            h = layer(h + virtual[owner], edges, bonds, owner, sizes)
            states.append(h)
            if i < LAYERS - 1:
                virtual = self.virtuals[i](virtual, h, owner)
        return self.readout(self.jump(states), owner, sizes)


def graphs() -> tuple[dict[str, Tensor], Tensor]:
    """Directed graphs of three to seven nodes; some nodes have no edge that ends in them."""
    sizes = torch.randint(3, 8, (GRAPHS,))
    owner = torch.arange(GRAPHS).repeat_interleave(sizes)
    allowed = (owner[:, None] == owner) & ~torch.eye(len(owner), dtype=torch.bool)
    edges = (allowed & (torch.rand(allowed.shape) < 0.45)).nonzero().T
    edges = edges[:, torch.randperm(edges.shape[1])]
    nodes, bonds = torch.randn(len(owner), 5), torch.randn(edges.shape[1], 3)
    sent = gather_sum(nodes[edges[0], 0] * bonds[:, 0], owner[edges[1]], GRAPHS) / sizes
    held = gather_sum(nodes[:, 1].tanh(), owner, GRAPHS) / sizes.sqrt()
    return {"nodes": nodes, "edges": edges, "bonds": bonds, "owner": owner}, torch.stack([sent, held], 1)


def apart(outputs: Tensor, target: Tensor) -> Tensor:
    return F.smooth_l1_loss(outputs, target.to(outputs))
