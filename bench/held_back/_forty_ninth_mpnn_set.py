"""A small message passing network for molecules: edge matrices, a shared GRU, virtual nodes and set2set."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, ORDERS, GAUSSIANS, CUTOFF = 8, 4, 9, 4.0
DIM, MESSAGE, EDGE_HIDDEN, VIRTUAL, OUT_HIDDEN = 20, 16, 18, 30, 17
STEPS, READS, TARGETS = 3, 4, 2
MOLECULES, ATOMS, EDGES = 6, 9, 24


def global_add_pool(x: Tensor, batch: Tensor, size: int) -> Tensor:
    return x.new_zeros(size, *x.shape[1:]).index_add(0, batch, x)


def softmax(src: Tensor, batch: Tensor, size: int) -> Tensor:
    """The softmax of [N, 1] over the nodes of each graph."""
    index = batch[:, None]
    top = src.detach().new_zeros(size, 1).scatter_reduce(0, index, src.detach(), "amax", include_self=False)
    out = (src - top[batch]).exp()
    return out / global_add_pool(out, batch, size)[batch]


class GaussianSmearing(nn.Module):
    def __init__(self, start: float, stop: float, num_gaussians: int):
        super().__init__()
        offset = torch.linspace(start, stop, num_gaussians)
        self.coeff = -0.5 / (offset[1] - offset[0]).item() ** 2
        self.register_buffer("offset", offset)

    def forward(self, dist: Tensor) -> Tensor:
        return torch.exp(self.coeff * (dist.view(-1, 1) - self.offset.view(1, -1)) ** 2)


class NNConv(nn.Module):
    """A matrix for each edge; the messages of a node are summed and divided by the root of its degree."""

    def __init__(self, in_channels: int, out_channels: int, edge_channels: int):
        super().__init__()
        self.in_channels, self.out_channels = in_channels, out_channels
        last = nn.Linear(EDGE_HIDDEN, in_channels * out_channels)
        self.nn = nn.Sequential(nn.Linear(edge_channels, EDGE_HIDDEN), nn.ReLU(), last)
        self.lin = nn.Linear(in_channels, out_channels, bias=False)
        self.bias = nn.Parameter(0.2 * torch.randn(out_channels))

    def message(self, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        weight = self.nn(edge_attr).view(-1, self.in_channels, self.out_channels)
        return torch.matmul(x_j.unsqueeze(1), weight).squeeze(1)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        source, target = edge_index
        out = global_add_pool(self.message(x[source], edge_attr), target, len(x))
        degree = torch.bincount(target, minlength=len(x)).clamp(min=1).to(x)
        return out / degree.sqrt()[:, None] + self.lin(x) + self.bias


class VirtualNode(nn.Module):
    """The state of each graph, moved by the sum of its nodes."""

    def __init__(self, dim: int):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, VIRTUAL), nn.LayerNorm(VIRTUAL), nn.ReLU())
        self.mlp.append(nn.Linear(VIRTUAL, dim))
        nn.init.normal_(self.mlp[1].weight, 1.0, 0.2), nn.init.normal_(self.mlp[1].bias, std=0.2)

    def forward(self, x: Tensor, virtual: Tensor, batch: Tensor) -> Tensor:
        return virtual + self.mlp(global_add_pool(x, batch, len(virtual)) + virtual)


class Set2Set(nn.Module):
    def __init__(self, in_channels: int, processing_steps: int):
        super().__init__()
        self.in_channels, self.processing_steps = in_channels, processing_steps
        self.lstm = nn.LSTM(2 * in_channels, in_channels)
        nn.init.normal_(self.lstm.weight_ih_l0, std=0.4), nn.init.normal_(self.lstm.weight_hh_l0, std=0.4)

    def forward(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        h = (x.new_zeros(1, size, self.in_channels), x.new_zeros(1, size, self.in_channels))
        q_star = x.new_zeros(size, 2 * self.in_channels)
        for _ in range(self.processing_steps):
            q, h = self.lstm(q_star.unsqueeze(0), h)
            q = q.view(size, self.in_channels)
            a = softmax((x * q[batch]).sum(dim=-1, keepdim=True), batch, size)
            q_star = torch.cat([q, global_add_pool(a * x, batch, size)], dim=-1)
        return q_star


class ScaleShift(nn.Module):
    """Normalised targets -> their own units."""

    def __init__(self, mean: list[float], stddev: list[float]):
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean)), self.register_buffer("stddev", torch.tensor(stddev))

    def forward(self, y: Tensor) -> Tensor:
        return y * self.stddev + self.mean


class MPNN(nn.Module):
    """Padded molecules, packed in one graph with a batch index -> two targets of each."""

    def __init__(self):
        super().__init__()
        self.smearing = GaussianSmearing(0.0, CUTOFF, GAUSSIANS)
        self.lin0 = nn.Linear(FEATURES, DIM)
        self.conv = NNConv(DIM, MESSAGE, GAUSSIANS + ORDERS)
        self.gru = nn.GRUCell(MESSAGE, DIM)
        self.virtualnode_embedding = nn.Parameter(0.3 * torch.randn(1, DIM))
        self.virtualnodes = nn.ModuleList(VirtualNode(DIM) for _ in range(STEPS - 1))
        self.set2set = Set2Set(DIM, READS)
        self.lin1, self.lin2 = nn.Linear(2 * DIM, OUT_HIDDEN), nn.Linear(OUT_HIDDEN, TARGETS)
        self.standardize = ScaleShift([0.4, -0.7], [1.3, 0.6])

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor, bonds: Tensor, order: Tensor) -> Tensor:
        size, batch = len(x), mask.nonzero()[:, 0]
        number, real = mask.flatten().cumsum(0).view_as(mask) - 1, order > 0
        edge_index = number.gather(1, bonds.flatten(1)).view_as(bonds)[real].T
        x, pos = x[mask], pos[mask]
        dist = (pos[edge_index[0]] - pos[edge_index[1]]).norm(dim=-1)
        kind = F.one_hot(order[real] - 1, ORDERS).to(x)
        edge_attr = torch.cat([self.smearing(dist), kind], dim=-1)
        h, virtual = F.relu(self.lin0(x)), self.virtualnode_embedding.expand(size, -1)
        for step in range(STEPS):
            m = F.relu(self.conv(h + virtual[batch], edge_index, edge_attr))
            h = self.gru(m, h)
            if step < STEPS - 1:
                virtual = self.virtualnodes[step](h, virtual, batch)
        out = F.relu(self.lin1(self.set2set(h, batch, size)))
        return self.standardize(self.lin2(out))


def molecules() -> tuple[dict[str, Tensor], Tensor]:
    """Random trees with bonds both ways and near pairs one way; targets with a mask of what is known."""
    x, pos = torch.zeros(MOLECULES, ATOMS, FEATURES), torch.zeros(MOLECULES, ATOMS, 3)
    bonds, order = torch.zeros(MOLECULES, EDGES, 2).long(), torch.zeros(MOLECULES, EDGES).long()
    count = torch.randint(4, ATOMS + 1, (MOLECULES,))
    for i, n in enumerate(count.tolist()):
        kind = torch.randint(FEATURES - 1, (n,))
        x[i, :n] = torch.cat([F.one_hot(kind, FEATURES - 1).float(), 0.4 * torch.randn(n, 1)], 1)
        edges = []
        for j in range(1, n):
            parent = int(torch.randint(j, ()))
            pos[i, j] = pos[i, parent] + (1 + 0.5 * torch.rand(())) * F.normalize(torch.randn(3), dim=0)
            sort = int(torch.randint(1, ORDERS, ()))
            edges += [(j, parent, sort), (parent, j, sort)]
        edges += [(j, (j + 2) % n, ORDERS) for j in range(n // 2)]
        table = torch.tensor(edges)
        bonds[i, : len(edges)], order[i, : len(edges)] = table[:, :2], table[:, 2]
    mask = torch.arange(ATOMS) < count[:, None]
    charge, spread = x[..., -1].sum(1), pos.norm(dim=-1).sum(1) / count
    known = (torch.rand(MOLECULES, TARGETS) < 0.75).float()
    known[:, 0] = torch.maximum(known[:, 0], 1 - known[:, 1])
    target = torch.stack([0.4 + charge, spread - 2.5], 1)
    inputs = {"x": x, "pos": pos, "mask": mask, "bonds": bonds, "order": order}
    return inputs, torch.stack([target * known, known], 2)


def masked_error(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean squared error of the targets that are known, by five."""
    value, known = target.unbind(2)
    return (known * (outputs - value) ** 2).sum() / known.sum().clamp(min=1) / 5
