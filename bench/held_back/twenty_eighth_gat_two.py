"""Two ports of a small GATv2: a tree over dense adjacency, and one class of packed weights over edges."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_eighth_gat_two import LAYERS, GATv2, molecules, nodes_and_graphs

task = few("twenty_eighth_gat_two", GATv2, molecules, nodes_and_graphs)


class Scores(nn.Module):
    """Attention of each node, [G, N, 1, H, C], to each, [G, 1, N, H, C], over an adjacency with features."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        shape = conv.heads, conv.out_channels
        self.query = leaf(conv.lin_r.weight.unflatten(0, shape))
        self.link = leaf(conv.lin_edge.weight.unflatten(0, shape))
        self.offset, self.vector = leaf(conv.lin_r.bias.view(shape)), leaf(conv.att[0])
        self.slope, self.axis = conv.negative_slope, 2

    def forward(self, x: Tensor, keys: Tensor, links: Tensor, there: Tensor) -> Tensor:
        asked = torch.einsum("gnd,hcd->gnhc", x, self.query) + self.offset
        mixed = asked[:, :, None] + keys[:, None] + torch.einsum("gnmd,hcd->gnmhc", links, self.link)
        mixed = torch.where(mixed > 0, mixed, self.slope * mixed)
        score = torch.einsum("gnmhc,hc->gnmh", mixed, self.vector)
        score = score.masked_fill(~there[..., None], torch.finfo(score.dtype).min)
        return score.softmax(self.axis) * there[..., None]


class Looking(nn.Module):
    """One layer: links with loops, scores, values, and a straight way with the offset of the whole."""

    def __init__(self, conv: nn.Module):
        super().__init__()
        self.shape, self.joined, self.blind = (conv.heads, conv.out_channels), conv.concat, False
        self.value, self.scores = conv.lin_l, Scores(conv)
        self.straight, self.offset = conv.res, leaf(conv.bias)

    def looped(self, links: Tensor, there: Tensor) -> Tensor:
        mean = (links * there[..., None]).sum(2) / there.sum(2).clamp(min=1)[..., None]
        if self.blind:
            mean = mean.detach()
        loop = torch.eye(links.shape[1], device=links.device).bool()[None, :, :, None]
        return torch.where(loop, mean[:, :, None], links)

    def forward(self, x: Tensor, links: Tensor, there: Tensor) -> Tensor:
        values, loop = self.value(x).unflatten(-1, self.shape), torch.eye(x.shape[1], device=x.device).bool()
        shares = self.scores(x, values, self.looped(links, there), there | loop)
        seen = torch.einsum("gnmh,gmhc->gnhc", shares, values)
        seen = seen.flatten(2) if self.joined else seen.sum(2) / self.shape[0]
        return self.straight(x) + self.offset + seen


class ByGraph(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.offset, self.part = leaf(norm.weight), leaf(norm.bias), leaf(norm.mean_scale)
        self.eps = norm.eps

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        count = real.sum(1, True)
        x = x - self.part * (x * real).sum(1, True) / count
        return x * ((x * real).square().sum(1, True) / count + self.eps).rsqrt() * self.gain + self.offset


class DenseGAT(Port):
    """All nodes of a graph against all, padded, with the target before the source."""

    def take(self, model: GATv2) -> None:
        self.nodes_in, self.links_in = model.node_encoder, model.edge_encoder
        self.layers = nn.ModuleList(map(Looking, model.convs))
        self.scales = nn.ModuleList([ByGraph(model.norms[0]), Rows(model.norms[1].module)])
        self.node_out, lins = model.node_head, model.graph_head
        self.graph_out = nn.Sequential(lins[0], nn.ReLU(), lins[2])
        if self.fault == "gat_two_second_softmax_over_the_edges_that_leave":
            self.layers[1].scores.axis = 1
        if self.fault == "gat_two_last_leaky_slope_of_torch":
            self.layers[2].scores.slope = 0.01
        self.layers[1].blind = self.fault == "gat_two_second_loops_mean_their_edges_without_gradient"
        self.scales[1].own = self.fault == "gat_two_batch_norm_by_its_own_statistics_in_evaluation"

    def forward(self, x, edge_index, edge_attr, node_mask, edge_mask) -> tuple[Tensor, Tensor]:
        count, real = x.shape[1], node_mask[..., None].to(x)
        graph, link = (edge_mask & (edge_index[:, 0] != edge_index[:, 1])).nonzero(as_tuple=True)
        place = graph, edge_index[graph, 1, link], edge_index[graph, 0, link]
        links = self.links_in(edge_attr[graph, link])
        links = links.new_zeros(len(x), count, count, links.shape[1]).index_put(place, links)
        there = torch.zeros(links.shape[:3], dtype=torch.bool, device=x.device)
        there[place] = True
        x = self.nodes_in(x)
        x = F.elu(self.scales[0](self.layers[0](x, links, there), real))
        rows = self.scales[1](self.layers[1](x, links, there)[node_mask])
        x = torch.zeros_like(x[..., :1]).expand(-1, -1, rows.shape[1]).index_put((node_mask,), F.elu(rows))
        x = F.elu(self.layers[2](x, links, there))
        return self.node_out(x) * real, self.graph_out((x * real).sum(1) / real.sum(1))


def packed(layer: nn.Linear) -> Tensor:
    """The transposed weight over its bias."""
    return torch.cat([layer.weight.T, layer.bias[None]])


class FlatGAT(Port):
    """Nodes in a row; one product for a layer's nodes, loops apart from the edges, heads one by one."""

    def take(self, model: GATv2) -> None:
        self.w, self.links, self.norm = nn.ParameterList(), nn.ParameterList(), nn.ParameterList()
        for conv in model.convs:
            straight = torch.cat([conv.res.weight.T, conv.bias[None]])
            self.w.append(leaf(torch.cat([packed(conv.lin_l), packed(conv.lin_r), straight], 1)))
            self.links.append(leaf(torch.cat([conv.lin_edge.weight.T, conv.att.view(1, -1)])))
        one, two = model.norms[0], model.norms[1].module
        self.norm.append(leaf(torch.stack([one.weight, one.bias, one.mean_scale])))
        self.norm.append(leaf(torch.stack([two.weight, two.bias])))
        self.register_buffer("kept", torch.stack([two.running_mean, two.running_var]))
        ends = (model.node_encoder, model.edge_encoder, model.node_head, *model.graph_head[::2])
        self.ends = nn.ParameterList(leaf(packed(x)) for x in ends)

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.addmm(weight[-1], x, weight[:-1])

    def means(self, x: Tensor, index: Tensor, size: int) -> Tensor:
        member = F.one_hot(index, size).to(x)
        return (member.T @ x) / member.sum(0).clamp(min=1)[:, None]

    def layer(self, i: int, x: Tensor, edges: Tensor, link: Tensor, loop: Tensor) -> Tensor:
        (heads, width, joined), weight, (source, target) = LAYERS[i], self.w[i], edges
        total = heads * width
        left, asked = self.product(x, weight[:, : 2 * total]).chunk(2, 1)
        way = x.detach() if self.fault == "gat_two_last_residual_gives_no_gradient_back" and i == 2 else x
        straight, found = self.product(way, weight[:, 2 * total :]), []
        for h in range(heads):
            own = slice(h * width, (h + 1) * width)
            key, query, (*turn, vector) = left[:, own], asked[:, own], self.links[i][:, own]
            turn = torch.stack(turn)
            far = F.leaky_relu(key[source] + query[target] + link @ turn, 0.2) @ vector
            near = F.leaky_relu(key + query + loop @ turn, 0.2) @ vector
            top = torch.cat([far, near]).detach().max()
            far, near = (far - top).exp()[:, None], (near - top).exp()[:, None]
            above = (near * key).index_add(0, target, far * key[source])
            found.append(above / near.index_add(0, target, far))
        return straight + (torch.cat(found, 1) if joined else sum(found) / heads)

    def by_graph(self, x: Tensor, batch: Tensor, size: int) -> Tensor:
        (gain, offset, part), mean = self.norm[0], self.means(x, batch, size)
        # E (x - s m)^2 = E x^2 - (2 s - s^2) m^2
        share = 1 if self.fault == "gat_two_graph_norm_variance_about_the_whole_mean" else 2 * part - part**2
        spread = self.means(x * x, batch, size) - share * mean * mean
        return (x - (part * mean)[batch]) * (gain * (spread + 1e-5).rsqrt())[batch] + offset

    def forward(self, x, edge_index, edge_attr, node_mask, edge_mask) -> tuple[Tensor, Tensor]:
        graphs, spots = len(x), node_mask.nonzero(as_tuple=True)
        mask = edge_mask & (edge_index[:, 0] != edge_index[:, 1])
        place = node_mask.flatten().cumsum(0).view_as(node_mask) - 1
        edges = place[:, None].expand(-1, 2, -1).gather(2, edge_index).movedim(1, 2)[mask].T
        x, raw = self.product(x[spots], self.ends[0]), edge_attr[mask]
        link, mean = self.product(raw, self.ends[1]), self.means(raw, edges[1], len(x))
        entered = torch.bincount(edges[1], minlength=len(x))[:, None] > 0
        loop = self.product(mean, self.ends[1]) * entered
        for i in range(3):
            bare = self.fault == "gat_two_first_loops_filled_with_zeros" and i == 0
            x = self.layer(i, x, edges, link, torch.zeros_like(loop) if bare else loop)
            if i == 0:
                x = self.by_graph(x, spots[0], graphs)
            elif i == 1:
                x = F.batch_norm(x, *self.kept, *self.norm[1], self.training)
            x = F.elu(x)
        nodes = self.product(x, self.ends[2])
        nodes = nodes.new_zeros(*node_mask.shape, nodes.shape[1]).index_put(spots, nodes)
        whole = self.means(x, spots[0], graphs)
        if self.fault == "gat_two_graphs_pooled_by_their_padded_size":
            whole = whole * node_mask.to(x).mean(1, True)
        return nodes, self.product(self.product(whole, self.ends[3]).relu(), self.ends[4])


SLOPES = ("input gradient", "weight gradient")
right(task, "gat_two_of_dense_graphs", "a tree, padded dense adjacency, split scores", DenseGAT)
right(task, "gat_two_of_packed_weights", "packed weights, head by head, loops apart", FlatGAT)
wrong(
    task,
    DenseGAT,
    gat_two_second_loops_mean_their_edges_without_gradient=("detach", "convs.1", SLOPES),
    gat_two_second_softmax_over_the_edges_that_leave=("another axis", "convs.1"),
    gat_two_batch_norm_by_its_own_statistics_in_evaluation=("batch statistics", "norms.1.module", "eval"),
    gat_two_last_leaky_slope_of_torch=("another slope", "convs.2"),
)
wrong(
    task,
    FlatGAT,
    gat_two_first_loops_filled_with_zeros=("another fill", "convs.0"),
    gat_two_graph_norm_variance_about_the_whole_mean=("another variance", "norms.0"),
    gat_two_last_residual_gives_no_gradient_back=("detach", ("convs.2.res", "convs.2"), SLOPES),
    gat_two_graphs_pooled_by_their_padded_size=("another divisor", "pool"),
)
