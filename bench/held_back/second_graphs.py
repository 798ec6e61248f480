"""Networks over graphs: dense adjacency matrices against lists of edges."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._second_pairs import Port, leaf, pair
from bench.tasks import _classes, _task


class Graph(nn.Module):
    def __init__(self, first: nn.Module, act: nn.Module, last: nn.Module):
        super().__init__()
        self.first, self.act, self.last = first, act, last

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        return self.last(self.act(self.first(x, adjacency)), adjacency)


class GraphConv(nn.Module):
    def __init__(self, inside: int, out: int):
        super().__init__()
        self.lin = nn.Linear(inside, out, bias=False)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        looped = adjacency + torch.eye(len(adjacency), dtype=x.dtype, device=x.device)
        scale = looped.sum(1, keepdim=True).rsqrt()
        return scale * (looped @ (scale * self.lin(x))) + self.bias


class EdgeGCN(Port):
    """Messages along edges; the fault: degrees are counted before the loops are added."""

    def take(self, model: Graph) -> None:
        self.w = nn.ParameterList(leaf(conv.lin.weight.T) for conv in (model.first, model.last))
        self.b = nn.ParameterList([model.first.bias, model.last.bias])

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        to, of = adjacency.nonzero().T
        nodes = torch.arange(len(x), device=x.device)
        to, of = torch.cat([to, nodes]), torch.cat([of, nodes])
        counted = to[: -len(x)] if self.fault else to
        scale = torch.bincount(counted, minlength=len(x)).clamp(min=1).to(x.dtype) ** -0.5
        strength = (scale[to] * scale[of])[:, None]
        for layer, (weight, bias) in enumerate(zip(self.w, self.b, strict=True)):
            message = strength * (x.relu() if layer else x)[of]
            x = x.new_zeros(len(x), message.shape[1]).index_add(0, to, message) @ weight + bias
        return x


class GraphAttention(nn.Module):
    def __init__(self, inside: int, out: int, heads: int):
        super().__init__()
        self.heads = heads
        self.lin = nn.Linear(inside, heads * out, bias=False)
        self.receive, self.send = (nn.Parameter(0.5 * torch.randn(heads, out)) for _ in range(2))

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.lin(x).unflatten(1, (self.heads, -1))
        score = (h * self.receive).sum(2)[:, None] + (h * self.send).sum(2)
        absent = adjacency + torch.eye(len(x), dtype=x.dtype, device=x.device) == 0
        score = F.leaky_relu(score, 0.2).masked_fill(absent[..., None], -torch.inf)
        return torch.einsum("tsh,shd->thd", score.softmax(1), h).flatten(1)


class EdgeAttention(nn.Module):
    def __init__(self, layer: GraphAttention, outgoing: bool):
        super().__init__()
        self.outgoing = outgoing
        self.project = leaf(layer.lin.weight.unflatten(0, layer.receive.shape))
        self.ends = leaf(torch.stack([layer.receive, layer.send]))

    def forward(self, x: Tensor, to: Tensor, of: Tensor) -> Tensor:
        h = torch.einsum("ni,hdi->nhd", x, self.project)
        ends = torch.einsum("nhd,ehd->enh", h, self.ends)
        score = F.leaky_relu(ends[0, to] + ends[1, of], 0.2)
        weight = (score - score.detach().amax(0)).exp()
        meet = of if self.outgoing else to
        weight = weight / torch.zeros_like(ends[0]).index_add(0, meet, weight)[meet]
        return torch.zeros_like(h).index_add(0, to, weight[..., None] * h[of]).flatten(1)


class EdgeGAT(Port):
    """A masked softmax as sums over edges; the fault: one layer sums over the edges that leave a node."""

    def take(self, model: Graph) -> None:
        self.stack = nn.ModuleList([EdgeAttention(model.first, False), EdgeAttention(model.last, self.fault)])

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        to, of = adjacency.clone().fill_diagonal_(1).nonzero(as_tuple=True)
        return self.stack[1](F.elu(self.stack[0](x, to, of)), to, of)


def _batch() -> tuple[dict[str, Tensor], Tensor]:
    adjacency = (torch.rand(14, 14) < 0.25).float().fill_diagonal_(0)
    return {"x": torch.randn(14, 6), "adjacency": adjacency}, _classes(14, 4)


gcn = _task("second_gcn", lambda: Graph(GraphConv(6, 24), nn.ReLU(), GraphConv(24, 4)), _batch)
pair(gcn, EdgeGCN, "edges_for_the_adjacency_matrix", "degrees_without_loops", "first")
gat = _task("second_gat", lambda: Graph(GraphAttention(6, 12, 2), nn.ELU(), GraphAttention(24, 4, 1)), _batch)
pair(gat, EdgeGAT, "softmax_over_edges", "attention_shared_out_by_the_sender", "last")
