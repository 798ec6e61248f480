"""Graph attention with features of the edges, from lists of edges to padded squares or sorted runs."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.held_back._fifth_graphs import GRAPHS, HEADS, NODES, EdgeAttention, EdgeGraph, gather
from bench.held_back._fifth_tables import SAME, fault, joined, layer_norm, right
from bench.held_back._fourth_ports import Port, leaf, pile
from bench.tasks import _task


class Packed(Port):
    """Query, key and value in one weight, those of all layers stacked."""

    def take(self, model: EdgeGraph) -> None:
        layers = list(model.layers)
        firsts = [(layer.attention.query, layer.attention.key, layer.value) for layer in layers]
        self.qkv = pile(torch.cat([part.weight.T for part in three], 1) for three in firsts)
        self.qkv_shift = pile(torch.cat([part.bias for part in three]) for three in firsts)
        self.edge = pile(layer.attention.edge.weight.T for layer in layers)
        self.score = pile(layer.attention.score for layer in layers)
        self.out = pile(layer.out.weight.T.unflatten(0, (HEADS, -1)) for layer in layers)
        self.rest = pile(torch.stack([n.out.bias, n.norm.weight, n.norm.bias]) for n in layers)
        self.ends = nn.ParameterDict({n: leaf(p) for n, p in model.embed.named_parameters()})
        read = model.readout
        self.read = joined([read.gate.weight, read.feature.weight])
        self.read_shift = joined([read.gate.bias, read.feature.bias])
        self.head = joined([model.head.weight, model.head.bias[:, None]], 1)

    def read_out(self, x: Tensor) -> Tensor:
        gate, feature = F.linear(x, self.read, self.read_shift).chunk(2, -1)
        pooled = (gate.sigmoid() * feature.tanh()).unflatten(0, (GRAPHS, NODES)).sum(1)
        return F.linear(pooled, self.head[:, :-1], self.head[:, -1])

    def forward(self, nodes: Tensor, edges: Tensor, ends: Tensor) -> Tensor:
        x = F.linear(nodes, self.ends["weight"], self.ends["bias"])
        edges, ends = self.prepare(edges, ends)
        for step in range(3):
            q, k, v = (x @ self.qkv[step] + self.qkv_shift[step]).unflatten(1, (3, HEADS, -1)).unbind(1)
            near = (edges @ self.edge[step]).unflatten(-1, (HEADS, -1))
            sent = self.send(step, q, k, v, near, ends)
            shift, scale, center = self.rest[step]
            x = layer_norm(x + torch.einsum("nhd,hdo->no", sent, self.out[step]) + shift, scale, center)
        return self.read_out(x)


class Squares(Packed):
    """Graphs as padded squares [graph, target, source] with a mask."""

    def prepare(self, edges: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        source, target = ends
        place = (target, source % NODES)
        square = edges.new_zeros(GRAPHS * NODES, NODES, 3).index_put(place, edges)
        mask = torch.zeros(GRAPHS * NODES, NODES, 1, dtype=torch.bool)
        mask[place] = True
        return square.unflatten(0, (GRAPHS, NODES)), mask.unflatten(0, (GRAPHS, NODES))

    def send(self, step: int, q: Tensor, k: Tensor, v: Tensor, near: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (part.unflatten(0, (GRAPHS, NODES)) for part in (q, k, v))
        if step == 0 and self.fault == "edges_turned_round":
            near = near.transpose(1, 2)
        slope = 0.01 if step == 2 and self.fault == "slope_of_another_library" else 0.2
        mixed = F.leaky_relu(q[:, :, None] + k[:, None] + near, slope)
        logits = torch.einsum("gtshd,hd->gtsh", mixed, self.score[step])
        weights = logits.masked_fill(~mask, -1e4).softmax(2) * mask
        if step == 2 and self.fault == "weights_held":
            weights = weights.detach()
        return torch.einsum("gtsh,gshd->gthd", weights, v).flatten(0, 1)


class Runs(Packed):
    """Edges sorted by their target, a softmax by the logarithm of a sum of exponentials."""

    half = False

    def prepare(self, edges: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
        order = ends[1].argsort(stable=True)
        return edges[order], ends[:, order]

    def send(self, step: int, q: Tensor, k: Tensor, v: Tensor, near: Tensor, ends: Tensor) -> Tensor:
        source, target = ends
        logits = (F.leaky_relu(q[target] + k[source] + near, 0.2) * self.score[step]).sum(-1)
        if step == 1 and self.half:
            logits = logits.bfloat16().to(q.dtype)
        shift = logits.detach().max()
        total = gather((logits - shift).exp(), target, len(q)).log() + shift
        return gather((logits - total[target]).exp()[..., None] * v[source], target, len(q))


def _batch() -> tuple[dict[str, Tensor], Tensor]:
    pairs = torch.stack([torch.randperm(NODES * NODES)[:14] for _ in range(GRAPHS)])
    first = torch.arange(GRAPHS)[:, None] * NODES
    ends = torch.stack([(pairs // NODES + first).flatten(), (pairs % NODES + first).flatten()])
    nodes, edges = torch.randn(GRAPHS * NODES, 5), torch.randn(GRAPHS * 14, 3)
    return {"nodes": nodes, "edges": edges, "ends": ends}, torch.randint(4, (GRAPHS,))


edge_graph = _task("fifth_edge_graph", EdgeGraph, _batch)


@in_place_of(("layers.0.attention", "layers.2.attention"), SAME, "another softmax", edge_graph)
class AttentionByNode(EdgeAttention):
    """The edges into each node one node after the other."""

    def forward(self, x: Tensor, edges: Tensor, source: Tensor, target: Tensor) -> Tensor:
        mixed = F.linear(edges, self.edge.weight) + (self.key(x)[source] + self.query(x)[target])
        mixed = torch.maximum(mixed, 0.2 * mixed)
        logits = torch.einsum("ehd,hd->eh", mixed.view(len(edges), HEADS, -1), self.score)
        into = F.one_hot(target, len(x)).T.to(torch.bool)[:, :, None]
        chances = logits.expand(len(x), -1, -1).masked_fill(~into, -torch.inf)[target.unique()].softmax(1)
        return chances.sum(0)


right(edge_graph, Squares, "edges_in_padded_squares", "port, masked for indexed")
right(edge_graph, Runs, "edges_in_sorted_runs", "port, another softmax")
fault(edge_graph, Squares, "edges_turned_round", "source and target swapped", "layers.0.attention")
fault(edge_graph, Squares, "slope_of_another_library", "another constant", "layers.2.attention")
fault(
    edge_graph,
    Squares,
    "weights_held",
    "a detach too many",
    ("layers.2.attention", "layers.2"),
    ("input gradient", "weight gradient"),
)


@case("reduced_precision", "logits in bfloat16", edge_graph, module="layers.1.attention")
def edge_logits_in_bfloat16(model: EdgeGraph) -> Runs:
    """The logits of the second layer are rounded on their way to the softmax."""
    port = Runs(model)
    port.half = True
    return port
