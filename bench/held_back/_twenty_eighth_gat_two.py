"""A small GATv2 on graphs batched by index: edge features, mean self loops, norms, node and graph heads."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

NODE, EDGE, ENCODED, EDGES_ENCODED, KINDS, CLASSES = 11, 6, 14, 8, 4, 3
GRAPHS, NODES, LINKS = 5, 9, 23
LAYERS = ((3, 10, True), (4, 9, True), (5, 17, False))  # heads, channels of each, whether concatenated


def scatter(x: Tensor, index: Tensor, size: int, reduce: str = "sum") -> Tensor:
    """The sum or the mean of the rows of each index; zero where there are none."""
    total = x.new_zeros(size, *x.shape[1:]).index_add(0, index, x)
    if reduce == "sum":
        return total
    count = torch.bincount(index, minlength=size).clamp(min=1).to(x)
    return total / count.view(-1, *[1] * (x.ndim - 1))


def softmax(src: Tensor, index: Tensor, size: int) -> Tensor:
    """The softmax among the rows of one index."""
    where = index[:, None].expand_as(src)
    top = src.detach().new_zeros(size, src.shape[1])
    top = top.scatter_reduce(0, where, src.detach(), "amax", include_self=False)
    out = (src - top[index]).exp()
    return out / (scatter(out, index, size)[index] + 1e-16)


def add_mean_self_loops(edge_index: Tensor, edge_attr: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Self loops are taken out; each node gets one, with the mean features of the edges that enter it."""
    kept = edge_index[0] != edge_index[1]
    edge_index, edge_attr = edge_index[:, kept], edge_attr[kept]
    loops = torch.arange(size, device=edge_index.device).expand(2, -1)
    fill = scatter(edge_attr, edge_index[1], size, "mean")
    return torch.cat([edge_index, loops], 1), torch.cat([edge_attr, fill])


class GATv2Conv(nn.Module):
    def __init__(self, width: int, out_channels: int, heads: int, concat: bool, edge_dim: int):
        super().__init__()
        self.heads, self.out_channels, self.concat, self.negative_slope = heads, out_channels, concat, 0.2
        total = out_channels * (heads if concat else 1)
        self.lin_l = nn.Linear(width, heads * out_channels)
        self.lin_r = nn.Linear(width, heads * out_channels)
        self.att = nn.Parameter(0.5 * torch.randn(1, heads, out_channels))
        self.lin_edge = nn.Linear(edge_dim, heads * out_channels, bias=False)
        self.res = nn.Linear(width, total, bias=False)
        self.bias = nn.Parameter(0.1 * torch.randn(total))

    def edge_update(self, x_j: Tensor, x_i: Tensor, edge_attr: Tensor, index: Tensor, size: int) -> Tensor:
        x = x_i + x_j + self.lin_edge(edge_attr).view(-1, self.heads, self.out_channels)
        x = F.leaky_relu(x, self.negative_slope)
        return softmax((x * self.att).sum(-1), index, size)

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        shape, size = (-1, self.heads, self.out_channels), len(x)
        res = self.res(x)
        x_l, x_r = self.lin_l(x).view(shape), self.lin_r(x).view(shape)
        (source, index), edge_attr = add_mean_self_loops(edge_index, edge_attr, size)
        alpha = self.edge_update(x_l[source], x_r[index], edge_attr, index, size)
        out = scatter(x_l[source] * alpha[..., None], index, size)
        out = out.flatten(1) if self.concat else out.mean(1)
        return out + res + self.bias


class GraphNorm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(width))
        self.bias = nn.Parameter(0.1 * torch.randn(width))
        self.mean_scale = nn.Parameter(0.8 + 0.2 * torch.randn(width))

    def forward(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        out = x - scatter(x, batch, size, "mean")[batch] * self.mean_scale
        std = (scatter(out.square(), batch, size, "mean") + self.eps).sqrt()[batch]
        return self.weight * out / std + self.bias


class BatchNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.module = nn.BatchNorm1d(width)
        with torch.no_grad():
            self.module.weight.add_(0.2 * torch.randn(width))
            self.module.bias.add_(0.1 * torch.randn(width))
            self.module.running_mean.add_(0.1 * torch.randn(width))
            self.module.running_var.add_(0.5 * torch.rand(width))

    def forward(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        return self.module(x)


class MeanAggregation(nn.Module):
    def forward(self, x: Tensor, index: Tensor, dim_size: int) -> Tensor:
        return scatter(x, index, dim_size, "mean")


class GATv2(nn.Module):
    """Padded graphs -> class logits of the nodes, [G, N, 4], zero where padded, and of the graphs, [G, 3]."""

    def __init__(self):
        super().__init__()
        self.node_encoder = nn.Linear(NODE, ENCODED)
        self.edge_encoder = nn.Linear(EDGE, EDGES_ENCODED)
        self.convs, self.norms, width = nn.ModuleList(), nn.ModuleList(), ENCODED
        for (heads, channels, concat), norm in zip(LAYERS, (GraphNorm, BatchNorm, None), strict=True):
            self.convs.append(GATv2Conv(width, channels, heads, concat, EDGES_ENCODED))
            width = channels * (heads if concat else 1)
            if norm:
                self.norms.append(norm(width))
        self.act = nn.ELU()
        self.pool = MeanAggregation()
        self.node_head = nn.Linear(width, KINDS)
        self.graph_head = nn.Sequential(nn.Linear(width, 12), nn.ReLU(), nn.Linear(12, CLASSES))

    def forward(
        self, x: Tensor, edge_index: Tensor, edge_attr: Tensor, node_mask: Tensor, edge_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        graphs, (batch, _) = len(x), node_mask.nonzero(as_tuple=True)
        first = node_mask.sum(1).cumsum(0) - node_mask.sum(1)
        edges = (edge_index + first[:, None, None]).movedim(1, 2)[edge_mask].T
        h, e = self.node_encoder(x[node_mask]), self.edge_encoder(edge_attr[edge_mask])
        for conv, norm in zip(self.convs[:-1], self.norms, strict=True):
            h = self.act(norm(conv(h, edges, e), batch, graphs))
        h = self.act(self.convs[-1](h, edges, e))
        logits = self.node_head(h)
        nodes = logits.new_zeros(*node_mask.shape, KINDS).index_put(node_mask.nonzero(as_tuple=True), logits)
        return nodes, self.graph_head(self.pool(h, batch, graphs))


def molecules() -> tuple[dict[str, Tensor], Tensor]:
    """Graphs of several sizes, some with self loops, each with a node that no edge enters."""
    label, size = torch.randint(CLASSES, (GRAPHS,)), torch.randint(5, NODES + 1, (GRAPHS,))
    kind = torch.randint(KINDS, (GRAPHS, NODES))
    x, attr = torch.randn(GRAPHS, NODES, NODE), torch.randn(GRAPHS, LINKS, EDGE)
    x[..., :KINDS] += 1.5 * F.one_hot(kind, KINDS)
    x[..., KINDS : KINDS + CLASSES] += F.one_hot(label, CLASSES)[:, None]
    index, edges = torch.zeros(GRAPHS, 2, LINKS, dtype=torch.long), torch.zeros(GRAPHS, LINKS) > 0
    for g, n in enumerate(size.tolist()):
        pairs = torch.randperm(n * (n - 1))[: min(LINKS, 2 * n + g)]  # no edge twice, none into the last node
        index[g, :, : len(pairs)] = torch.stack([pairs % n, pairs // n])
        edges[g, : len(pairs)] = True
    nodes = torch.arange(NODES) < size[:, None]
    x, attr = x * nodes[..., None], attr * edges[..., None]
    inputs = {"x": x, "edge_index": index, "edge_attr": attr, "node_mask": nodes, "edge_mask": edges}
    return inputs, torch.cat([label[:, None], kind.masked_fill(~nodes, -100)], 1)


def nodes_and_graphs(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The cross entropies of the nodes' classes and of the graphs', by four."""
    nodes, graphs = outputs
    return (F.cross_entropy(nodes.movedim(2, 1), target[:, 1:]) + F.cross_entropy(graphs, target[:, 0])) / 4
