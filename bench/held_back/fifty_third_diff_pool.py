"""Two ports of a small DiffPool: a tree with the nodes last, and flat code over one graph of all nodes."""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_third_diff_pool import CLUSTERS, HIDDEN, DiffPool, communities, weighted
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_third_diff_pool", DiffPool, communities, weighted)


class Hop(nn.Module):
    """One product for what the neighbours say and for the node itself, [N, C, nodes]."""

    def __init__(self, conv: nn.Module, norm: nn.Module | None):
        super().__init__()
        self.weight = leaf(torch.cat([conv.lin_rel.weight, conv.lin_root.weight], 1))
        self.offset = leaf(conv.lin_root.bias[:, None])
        self.after, self.by_nodes = copy.deepcopy(norm), False

    def forward(self, x: Tensor, edges: Tensor, real: Tensor) -> Tensor:
        degree = edges.sum(2).clamp(min=1)[:, None]
        if self.by_nodes:
            degree = torch.full_like(degree, x.shape[2])
        y = self.weight @ torch.cat([x @ edges.mT / degree, x], 1) + self.offset
        y = y * real / y.square().sum(1, keepdim=True).sqrt().clamp(min=1e-12)
        return y if self.after is None else self.after(y.relu())


class Walk(nn.Module):
    def __init__(self, net: nn.Module):
        super().__init__()
        pairs = (net.conv1, net.bn1), (net.conv2, net.bn2), (net.conv3, None)
        self.hops = nn.ModuleList(Hop(*pair) for pair in pairs)

    def forward(self, x: Tensor, edges: Tensor, real: Tensor) -> list[Tensor]:
        found = []
        for hop in self.hops:
            x = hop(x, edges, real)
            found.append(x)
        return found


class Share(nn.Module):
    """The clusters' parts in each node: a product for each hop."""

    def __init__(self, net: nn.Module):
        super().__init__()
        sizes = [HIDDEN, HIDDEN, net.lin.out_features]
        self.walk, self.offset = Walk(net), leaf(net.lin.bias[:, None])
        self.views, self.masked = nn.ParameterList(map(leaf, net.lin.weight.split(sizes, 1))), True

    def forward(self, x: Tensor, edges: Tensor, real: Tensor) -> Tensor:
        found = zip(self.views, self.walk(x, edges, real), strict=True)
        part = (self.offset + sum(w @ y for w, y in found)).softmax(1)
        return part * real if self.masked else part


class Costs(nn.Module):
    def __init__(self, constant: bool = False):
        super().__init__()
        self.constant = constant

    def forward(self, part: Tensor, edges: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        given = edges.detach() if self.constant else edges
        link = (part.mT @ part - given).square().sum().sqrt() / edges.numel()
        return link, -(part * (part + 1e-15).log()).sum() / real.sum()


class DiffPoolOfWalks(Port):
    """Walks with the nodes last; shares and costs are modules of their own."""

    def take(self, model: DiffPool) -> None:
        layers = model.diffpool_layers
        self.shares = nn.ModuleList(Share(x.gnn_pool) for x in layers)
        self.walks = nn.ModuleList(map(Walk, (*(x.gnn_embed for x in layers), model.final_embed)))
        late = self.fault == "diff_pool_second_link_loss_takes_its_graph_for_a_constant"
        self.costs = nn.ModuleList([Costs(), Costs(late)])
        self.dense, self.classes = copy.deepcopy(model.lin1), copy.deepcopy(model.lin2)
        self.walks[0].hops[1].by_nodes = self.fault == "diff_pool_second_hop_divided_by_all_nodes"
        self.shares[0].masked = self.fault != "diff_pool_first_assignment_not_masked"
        if self.fault == "diff_pool_second_assignment_norm_moves_slowly":
            self.shares[1].walk.hops[1].after.momentum = 0.03

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x, real, read, costs = x.mT, mask[:, None].to(x), [], []
        for share, walk, cost in zip(self.shares, self.walks, self.costs, strict=False):
            part = share(x, adj, real)
            x = torch.cat(walk(x, adj, real), 1) @ part.mT
            costs.append(cost(part, adj, real))
            adj, real = part @ adj @ part.mT, x.new_ones(len(x), 1, x.shape[2])
            if not read:
                read = [x.mean(2), x.amax(2)]
        x = torch.cat(self.walks[2](x, adj, real), 1)
        read = torch.cat([*read, x.mean(2), x.amax(2)], 1)
        return self.classes(self.dense(read).relu()), *(sum(each) for each in zip(*costs, strict=True))


def packed(conv: nn.Module) -> Tensor:
    return torch.cat([conv.lin_root.weight.T, conv.lin_rel.weight.T, conv.lin_root.bias[None]])


class OneGraphDiffPool(Port):
    """All graphs as one of many parts, in stacked weights; link losses come from traces."""

    def take(self, model: DiffPool) -> None:
        one, two = model.diffpool_layers
        nets = one.gnn_pool, one.gnn_embed, two.gnn_pool, two.gnn_embed, model.final_embed
        self.first = pile(packed(net.conv1) for net in nets[:2])
        self.later = pile(packed(net.conv1) for net in nets[2:])
        self.second = pile(packed(net.conv2) for net in nets)
        self.third = nn.ParameterList(leaf(packed(net.conv3)) for net in nets)
        norms = [(net.bn1, net.bn2) for net in nets]
        for name in ("weight", "bias"):
            setattr(self, name, pile(torch.stack([getattr(x, name) for x in pair]) for pair in norms))
        for name in ("running_mean", "running_var", "num_batches_tracked"):
            kept = [torch.stack([getattr(x, name) for x in pair]) for pair in norms]
            self.register_buffer(name, torch.stack(kept))
        ends = one.gnn_pool.lin, two.gnn_pool.lin, model.lin1, model.lin2
        self.ends = nn.ParameterList(leaf(torch.cat([x.weight.T, x.bias[None]])) for x in ends)

    def affine(self, x: Tensor, i: int) -> Tensor:
        return x @ self.ends[i][:-1] + self.ends[i][-1]

    def norm(self, x: Tensor, i: int, j: int) -> Tensor:
        mean, spread = self.running_mean[i, j], self.running_var[i, j]
        if self.training:
            self.num_batches_tracked[i, j] += 1
            with torch.no_grad():
                mean.mul_(0.9).add_(0.1 * x.mean(0))
                spread.mul_(0.9).add_(0.1 * x.var(0))
            mean, spread = x.mean(0), x.var(0, correction=0)
        return (x - mean) / (spread + 1e-5).sqrt() * self.weight[i, j] + self.bias[i, j]

    def convolve(self, x: Tensor, graph: Tensor, real: Tensor, i: int, j: int) -> Tensor:
        w = ((self.first[i] if i < 2 else self.later[i - 2]), self.second[i], self.third[i])[j]
        loose = self.fault == "diff_pool_first_assignment_degree_not_clamped_at_one" and (i, j) == (0, 0)
        about = graph / graph.sum(1, keepdim=True).clamp(min=0.1 if loose else 1)
        y = x @ w[: x.shape[1]] + about @ (x @ w[x.shape[1] : -1]) + w[-1]
        size = y.norm(dim=1, keepdim=True)
        if self.fault == "diff_pool_last_second_hop_norm_taken_for_a_constant" and (i, j) == (4, 1):
            size = size.detach()
        return y / size * real

    def embed(self, x: Tensor, graph: Tensor, real: Tensor, i: int) -> Tensor:
        one = self.norm(self.convolve(x, graph, real, i, 0).relu(), i, 0)
        two = self.norm(self.convolve(one, graph, real, i, 1).relu(), i, 1)
        return torch.cat([one, two, self.convolve(two, graph, real, i, 2)], 1)

    def read(self, x: Tensor, clusters: int, divisor: int) -> Tensor:
        x = x.unflatten(0, (-1, clusters))
        return torch.cat([x.sum(1) / divisor, x.amax(1)], 1)

    def forward(self, x: Tensor, adj: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        count, size = len(x), x.shape[1]
        real, links, entropies, read = mask.reshape(-1, 1).to(x), 0, 0, []
        x, graph = x.flatten(0, 1), torch.block_diag(*adj)
        for i, clusters in enumerate(CLUSTERS):
            part = F.softmax(self.affine(self.embed(x, graph, real, 2 * i), i), 1) * real
            coarse = i == 1 and self.fault == "diff_pool_second_entropy_with_a_large_epsilon"
            entropies = entropies - (part * (part + (1e-3 if coarse else 1e-15)).log()).sum() / real.sum()
            spread = torch.block_diag(*part.unflatten(0, (count, size)))
            x = spread.T @ self.embed(x, graph, real, 2 * i + 1)
            small, same = spread.T @ graph @ spread, spread.T @ spread
            far = graph.square().sum() - 2 * small.trace() + same.square().sum()
            links, graph = links + far.sqrt() / (count * size * size), small
            size, real = clusters, torch.ones_like(x[:, :1])
            if i == 0:
                read.append(self.read(x, size, size))
        last = CLUSTERS[0] if self.fault == "diff_pool_last_mean_over_the_clusters_before" else size
        read.append(self.read(self.embed(x, graph, real, 4), size, last))
        return self.affine(self.affine(torch.cat(read, 1), 2).relu(), 3), links, entropies


SLOPES = ("input gradient", "weight gradient")
FIRST, SECOND = "diffpool_layers.0", "diffpool_layers.1"
right(task, "diff_pool_of_walks_with_nodes_last", "a tree, nodes last, fused and split", DiffPoolOfWalks)
right(task, "diff_pool_of_one_graph", "block diagonals, traces, stacked weights", OneGraphDiffPool)
wrong(
    task,
    DiffPoolOfWalks,
    diff_pool_second_hop_divided_by_all_nodes=("another divisor", FIRST + ".gnn_embed.conv2"),
    diff_pool_first_assignment_not_masked=("a mask left out", FIRST),
    diff_pool_second_assignment_norm_moves_slowly=("another momentum", SECOND + ".gnn_pool.bn2", "buffer"),
    diff_pool_second_link_loss_takes_its_graph_for_a_constant=("detach", SECOND, SLOPES),
)
wrong(
    task,
    OneGraphDiffPool,
    diff_pool_first_assignment_degree_not_clamped_at_one=("another clamp", FIRST + ".gnn_pool.conv1"),
    diff_pool_second_entropy_with_a_large_epsilon=("another epsilon", SECOND),
    diff_pool_last_second_hop_norm_taken_for_a_constant=("a detached norm", "final_embed.conv2", SLOPES),
    diff_pool_last_mean_over_the_clusters_before=("another divisor", ""),
)
