"""A small Principal Neighbourhood Aggregation: towers with edge features, a GRU in between, Set2Set."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ATOMS, BONDS, WIDTH, TOWERS, LAYERS, STEPS = 11, 5, 14, 2, 3, 3
GRAPHS, NODES, EDGES = 6, 10, 18
HISTOGRAM = torch.tensor([3, 41, 37, 22, 9, 2])


def scatter_sum(src: Tensor, index: Tensor, size: int) -> Tensor:
    return src.new_zeros(size, *src.shape[1:]).index_add(0, index, src)


def scatter_reduce(src: Tensor, index: Tensor, size: int, reduce: str) -> Tensor:
    """The greatest or the least of each group; zero where it is empty."""
    where = index.view(-1, *[1] * (src.dim() - 1)).expand_as(src)
    return src.new_zeros(size, *src.shape[1:]).scatter_reduce(0, where, src, reduce, include_self=False)


class MeanAggregation(nn.Module):
    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        count = scatter_sum(torch.ones_like(index), index, size).clamp(min=1)
        return scatter_sum(x, index, size) / count[:, None, None]


class MinAggregation(nn.Module):
    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        return scatter_reduce(x, index, size, "amin")


class MaxAggregation(nn.Module):
    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        return scatter_reduce(x, index, size, "amax")


class StdAggregation(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean = MeanAggregation()

    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        mean = self.mean(x, index, size)
        out = (self.mean(x * x, index, size) - mean * mean).clamp(min=1e-5).sqrt()
        return out.masked_fill(out <= math.sqrt(1e-5), 0.0)


class MultiAggregation(nn.Module):
    def __init__(self):
        super().__init__()
        self.aggrs = nn.ModuleList([MeanAggregation(), MinAggregation(), MaxAggregation(), StdAggregation()])

    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        return torch.cat([aggr(x, index, size) for aggr in self.aggrs], dim=-1)


class DegreeScalerAggregation(nn.Module):
    """Identity, amplification and attenuation by the average degree of a histogram."""

    def __init__(self, deg: Tensor):
        super().__init__()
        self.aggr, bins = MultiAggregation(), torch.arange(len(deg))
        self.register_buffer("avg_deg_lin", (bins * deg).sum() / deg.sum())
        self.register_buffer("avg_deg_log", ((bins + 1).log() * deg).sum() / deg.sum())

    def forward(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        out = self.aggr(x, index, size)
        deg = scatter_sum(torch.ones_like(index), index, size).to(x)[:, None, None]
        amplified = out * (torch.log(deg + 1) / self.avg_deg_log)
        attenuated = out * (self.avg_deg_log / torch.log(deg.clamp(min=1) + 1))
        return torch.cat([out, amplified, attenuated], dim=-1)


class PNAConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, deg: Tensor, edge_dim: int, towers: int):
        super().__init__()
        self.towers, self.F_in, self.F_out = towers, in_channels, out_channels // towers
        self.aggr_module = DegreeScalerAggregation(deg)
        self.edge_encoder = nn.Linear(edge_dim, self.F_in)
        self.pre_nns, self.post_nns = nn.ModuleList(), nn.ModuleList()
        for _ in range(towers):
            self.pre_nns.append(nn.Sequential(nn.Linear(3 * self.F_in, self.F_in)))
            self.post_nns.append(nn.Sequential(nn.Linear(13 * self.F_in, self.F_out)))
        self.lin = nn.Linear(out_channels, out_channels)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        x = x.view(-1, 1, self.F_in).repeat(1, self.towers, 1)
        messages = self.message(x[edge_index[1]], x[edge_index[0]], edge_attr)
        out = torch.cat([x, self.aggr_module(messages, edge_index[1], len(x))], dim=-1)
        outs = [post(out[:, i]) for i, post in enumerate(self.post_nns)]
        return self.lin(torch.cat(outs, dim=1))

    def message(self, x_i: Tensor, x_j: Tensor, edge_attr: Tensor) -> Tensor:
        edge_attr = self.edge_encoder(edge_attr).view(-1, 1, self.F_in).repeat(1, self.towers, 1)
        h = torch.cat([x_i, x_j, edge_attr], dim=-1)
        return torch.stack([pre(h[:, i]) for i, pre in enumerate(self.pre_nns)], dim=1)


class BatchNorm(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        self.module = nn.BatchNorm1d(in_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


class GRU(nn.Module):
    """One step of a GRU whose input is ``x`` and whose state is ``y``."""

    def __init__(self, input_size: int, hidden_size: int):
        super().__init__()
        self.gru = nn.GRU(input_size, hidden_size)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.gru(x.unsqueeze(0), y.unsqueeze(0))[1].squeeze(0)


class Set2Set(nn.Module):
    def __init__(self, in_channels: int, processing_steps: int):
        super().__init__()
        self.in_channels, self.processing_steps = in_channels, processing_steps
        self.lstm = nn.LSTM(2 * in_channels, in_channels)

    def softmax(self, e: Tensor, batch: Tensor, size: int) -> Tensor:
        e = (e - scatter_reduce(e.detach(), batch, size, "amax")[batch]).exp()
        return e / (scatter_sum(e, batch, size)[batch] + 1e-16)

    def forward(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        h = x.new_zeros(1, size, self.in_channels), x.new_zeros(1, size, self.in_channels)
        q_star = x.new_zeros(size, 2 * self.in_channels)
        for _ in range(self.processing_steps):
            q, h = self.lstm(q_star.unsqueeze(0), h)
            q = q.view(size, self.in_channels)
            a = self.softmax((x * q[batch]).sum(dim=-1, keepdim=True), batch, size)
            q_star = torch.cat([q, scatter_sum(a * x, batch, size)], dim=-1)
        return q_star


class PNA(nn.Module):
    """Padded graphs, -1 where there is no atom or no edge -> one number for each."""

    def __init__(self):
        super().__init__()
        self.node_emb = nn.Embedding(ATOMS, WIDTH)
        self.convs = nn.ModuleList(PNAConv(WIDTH, WIDTH, HISTOGRAM, BONDS, TOWERS) for _ in range(LAYERS))
        self.batch_norms = nn.ModuleList(BatchNorm(WIDTH) for _ in range(LAYERS))
        self.gru, self.set2set = GRU(WIDTH, WIDTH), Set2Set(WIDTH, STEPS)
        head = nn.Linear(2 * WIDTH, 12), nn.ReLU(), nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 1)
        self.mlp = nn.Sequential(*head)
        for norm in self.batch_norms:
            nn.init.normal_(norm.module.weight, 1, 0.2), nn.init.normal_(norm.module.bias, std=0.2)
            norm.module.running_mean.normal_(std=0.2), norm.module.running_var.uniform_(0.5, 1.5)

    def collate(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> tuple[Tensor, ...]:
        """One graph of them all, and which graph each atom is of."""
        real, kept = x >= 0, edge_index[:, 0] >= 0
        place = (real.flatten().cumsum(0) - 1).view_as(x)
        edges = place.gather(1, edge_index.clamp(min=0).flatten(1)).view_as(edge_index)
        return x[real], edges.transpose(0, 1)[:, kept], edge_attr[kept], real.nonzero()[:, 0]

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        size = len(x)
        x, edge_index, edge_attr, batch = self.collate(x, edge_index, edge_attr)
        x = self.node_emb(x)
        for i, (conv, batch_norm) in enumerate(zip(self.convs, self.batch_norms, strict=True)):
            h = F.relu(batch_norm(conv(x, edge_index, edge_attr)))
            x = self.gru(x, h) if i < LAYERS - 1 else h
        return self.mlp(self.set2set(x, batch, size))


def molecules() -> tuple[dict[str, Tensor], Tensor]:
    """Trees with a ring closed, the first with an ion beside it, to be told by atoms, ring and lengths."""
    x, edge_index = torch.full((GRAPHS, NODES), -1), torch.full((GRAPHS, 2, EDGES), -1)
    edge_attr, target = torch.zeros(GRAPHS, EDGES, BONDS), torch.zeros(GRAPHS, 1)
    for g in range(GRAPHS):
        count = int(torch.randint(5, NODES, ()))
        pairs = [(int(torch.randint(max(0, i - 3), i, ())), i) for i in range(1, count)]
        if (0, count - 1) not in pairs:
            pairs.append((0, count - 1))
        ends, total = torch.tensor(pairs).T, count + (g == 0)
        x[g, :total] = torch.randint(ATOMS, (total,))
        length = 1 + 0.3 * torch.randn(len(pairs), 1)
        kind = F.one_hot(torch.randint(3, (len(pairs),)), 3)
        bonds = torch.cat([kind, length, (torch.arange(len(pairs))[:, None] == count - 1) + 0.0], 1)
        edge_index[g, :, : 2 * len(pairs)] = torch.cat([ends, ends.flip(0)], 1)
        edge_attr[g, : 2 * len(pairs)] = torch.cat([bonds, bonds])
        target[g] = 0.6 * (x[g, :total].float().mean() - 5) + 6 * (length.mean() - 1) + 0.3 * (count - 7)
    return {"x": x, "edge_index": edge_index, "edge_attr": edge_attr}, target


def regression(outputs: Tensor, target: Tensor) -> Tensor:
    return F.mse_loss(outputs, target) / 2
