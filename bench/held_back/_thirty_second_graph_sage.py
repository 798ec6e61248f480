"""A small GraphSAGE with jumping knowledge: sampled neighbourhoods of two hops, node classes and links."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, HIDDEN, OUT, LINKED, CLASSES = 11, 20, 17, 13, 7
NODES, GRAPHS, FANOUT, PAIRS = (14, 9, 6), 5, 4, 5


def linear(wide: int, out: int, bias: bool = True) -> nn.Linear:
    layer = nn.Linear(wide, out, bias)
    nn.init.normal_(layer.weight, std=1.2 / wide**0.5)
    if bias:
        nn.init.normal_(layer.bias, std=0.2)
    return layer


class MeanAggregation(nn.Module):
    def forward(self, x: Tensor, index: Tensor, dim_size: int) -> Tensor:
        total = x.new_zeros(dim_size, x.shape[1]).index_add(0, index, x)
        count = x.new_zeros(dim_size).index_add(0, index, x.new_ones(len(index)))
        return total / count.clamp(min=1)[:, None]


class MaxAggregation(nn.Module):
    """The largest of each channel; zero for what has no neighbour."""

    def forward(self, x: Tensor, index: Tensor, dim_size: int) -> Tensor:
        index, out = index[:, None].expand_as(x), x.new_zeros(dim_size, x.shape[1])
        return out.scatter_reduce(0, index, x, "amax", include_self=False)


class SAGEConv(nn.Module):
    """From the nodes of one hop to their targets."""

    def __init__(self, in_channels: int, out_channels: int, aggr: str, project: bool = False):
        super().__init__()
        self.project = project
        if project:
            self.lin = linear(in_channels, in_channels)
        self.aggr_module = {"mean": MeanAggregation, "max": MaxAggregation}[aggr]()
        self.lin_l = linear(in_channels, out_channels)
        self.lin_r = linear(in_channels, out_channels, bias=False)

    def forward(self, x: tuple[Tensor, Tensor], edge_index: Tensor) -> Tensor:
        source, target = x
        if self.project:
            source = self.lin(source).relu()
        out = self.aggr_module(source[edge_index[0]], edge_index[1], len(target))
        out = self.lin_l(out) + self.lin_r(target)
        return F.normalize(out, p=2.0, dim=-1)


class GraphNorm(nn.Module):
    """Normalises each graph's nodes about a learnt part of their mean."""

    def __init__(self, in_channels: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(in_channels))
        self.bias = nn.Parameter(0.2 * torch.randn(in_channels))
        self.mean_scale = nn.Parameter(0.8 + 0.2 * torch.randn(in_channels))

    def mean(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        count = torch.bincount(batch, minlength=size)
        return x.new_zeros(size, x.shape[1]).index_add(0, batch, x) / count[:, None]

    def forward(self, x: Tensor, batch: Tensor, batch_size: int) -> Tensor:
        mean = self.mean(x, batch, batch_size)
        out = x - mean[batch] * self.mean_scale
        var = self.mean(out.pow(2), batch, batch_size)
        std = (var + self.eps).sqrt()[batch]
        return self.weight * out / std + self.bias


class JumpingKnowledge(nn.Module):
    """Weighs the layers of each node by the attention of an LSTM over them."""

    def __init__(self, channels: int, num_layers: int):
        super().__init__()
        hidden = num_layers * channels // 2
        self.lstm = nn.LSTM(channels, hidden, bidirectional=True, batch_first=True)
        self.att = linear(2 * hidden, 1)

    def forward(self, xs: list[Tensor]) -> Tensor:
        x = torch.stack(xs, dim=1)
        alpha, _ = self.lstm(x)
        alpha = self.att(alpha).squeeze(-1)
        alpha = torch.softmax(alpha, dim=-1)
        return (x * alpha.unsqueeze(-1)).sum(dim=1)


class GraphSAGE(nn.Module):
    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList([SAGEConv(FEATURES, HIDDEN, "mean"), SAGEConv(HIDDEN, HIDDEN, "max")])
        self.convs.append(SAGEConv(HIDDEN, HIDDEN, "max", project=True))
        self.norms = nn.ModuleList(GraphNorm(HIDDEN) for _ in self.convs)
        self.act = nn.ReLU()
        self.jk = JumpingKnowledge(HIDDEN, len(self.convs))
        self.lin = linear(HIDDEN, OUT)

    def forward(self, x: Tensor, adjs: list[Tensor], graphs: int) -> Tensor:
        xs = []
        for conv, norm, adj, size in zip(self.convs, self.norms, adjs, (*NODES[1:], NODES[2]), strict=True):
            target = x.unflatten(0, (graphs, -1))[:, :size].flatten(0, 1)
            x = conv((x, target), adj)
            x = self.act(norm(x, torch.arange(graphs).repeat_interleave(size).to(adj), graphs))
            xs.append(x)
        xs = [x.unflatten(0, (graphs, -1))[:, : NODES[2]].flatten(0, 1) for x in xs]
        return self.lin(self.jk(xs))


class LinkPredictor(nn.Module):
    def __init__(self):
        super().__init__()
        self.lins = nn.ModuleList([linear(OUT, LINKED), linear(LINKED, 1)])

    def forward(self, x_i: Tensor, x_j: Tensor) -> Tensor:
        x = x_i * x_j
        for lin in self.lins[:-1]:
            x = F.relu(lin(x))
        return self.lins[-1](x).squeeze(-1)


def joined(edges: Tensor, sources: int, targets: int) -> Tensor:
    """Edges [B, 2, E] of single graphs, padded with -1 -> [2, all] of the one graph of them all."""
    start = torch.arange(len(edges))[:, None, None] * torch.tensor([sources, targets])[:, None]
    return (edges + start.to(edges)).transpose(0, 1)[:, edges[:, 0] >= 0]


class Net(nn.Module):
    """Graphs of sampled nodes, targets first, and pairs of targets -> classes and scores of the pairs."""

    def __init__(self):
        super().__init__()
        self.gnn = GraphSAGE()
        self.classifier = linear(OUT, CLASSES)
        self.link_predictor = LinkPredictor()

    def forward(
        self, x: Tensor, hop2: Tensor, hop1: Tensor, seeds: Tensor, pos: Tensor, neg: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        graphs, (far, near, few) = len(x), NODES
        adjs = [joined(hop2, far, near), joined(hop1, near, few), joined(seeds, few, few)]
        z = self.gnn(x.flatten(0, 1), adjs, graphs)
        pairs = [joined(pair, few, few) for pair in (pos, neg)]
        scores = [self.link_predictor(z[i], z[j]).unflatten(0, (graphs, -1)) for i, j in pairs]
        return self.classifier(z).unflatten(0, (graphs, -1)), *scores


def sampled(near: Tensor, targets: int) -> Tensor:
    """Up to FANOUT neighbours of each target, the last of the targets without any."""
    graphs, sources = near.shape[0], near.shape[2]
    near = near[:, :targets] + 2 * torch.eye(targets, sources)
    source = near.argsort(2)[..., :FANOUT].flatten(1)
    edges = torch.stack([source, torch.arange(targets).repeat_interleave(FANOUT).expand_as(source)], 1)
    count = torch.randint(1, FANOUT + 1, (graphs, targets, 1))
    count[:, -1] = 0
    gone = (torch.arange(FANOUT) >= count).flatten(1)
    return edges.masked_fill(gone[:, None], -1)


def communities() -> tuple[dict[str, Tensor], Tensor]:
    """Nodes whose neighbours are mostly of their class; linked are those of near classes."""
    label = torch.randint(CLASSES, (GRAPHS, NODES[0]))
    x = torch.sin(label[..., None] * torch.arange(1, FEATURES + 1) * 0.7)
    x = x + 0.4 * torch.randn_like(x)
    near = (label[:, :, None] - label[:, None]).abs() / CLASSES
    near = near + 0.6 * torch.rand(near.shape)
    few = NODES[2]
    pairs = torch.triu_indices(few, few, 1)
    order = near[:, pairs[0], pairs[1]].argsort(1)
    inputs = {"x": x, "hop2": sampled(near, NODES[1])}
    inputs["hop1"] = sampled(near[:, :, : NODES[1]], few)
    inputs["seeds"] = sampled(near[:, :, :few], few)
    inputs["pos"] = pairs[:, order[:, :PAIRS]].transpose(0, 1)
    inputs["neg"] = pairs[:, order[:, -PAIRS - 1 :]].transpose(0, 1)
    return inputs, label[:, :few]


def classes_and_links(outputs: tuple[Tensor, Tensor, Tensor], label: Tensor) -> Tensor:
    """The cross entropy of the classes and that of the pairs, by four."""
    logits, pos, neg = outputs
    links = F.softplus(-pos).mean() + F.softplus(neg).mean()
    return (F.cross_entropy(logits.flatten(0, 1), label.flatten()) + links) / 4
