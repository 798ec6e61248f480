"""Two ports of a small GraphSAGE: a tree over dense adjacency, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_second_graph_sage import NODES, Net, classes_and_links, communities

task = few("thirty_second_graph_sage", Net, communities, classes_and_links)


class Dense(nn.Module):
    """A product of rows by a matrix kept transposed."""

    def __init__(self, layer: nn.Linear):
        super().__init__()
        self.kernel, self.offset = leaf(layer.weight.T), leaf(layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, -2), self.kernel).unflatten(0, x.shape[:-1])


class Gather(nn.Module):
    """The mean or the largest over the last axis but one, of the sources or of what is asked of them."""

    def __init__(self, conv: nn.Module, mean: bool = False, more: int = 0):
        super().__init__()
        self.ask = nn.Sequential(Dense(conv.lin), nn.ReLU()) if conv.project else nn.Identity()
        self.mean, self.more = mean, more

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        x = self.ask(x)
        if self.mean:
            return near.to(x) @ x / (near.sum(2, keepdim=True) + self.more).clamp(min=1)
        top = torch.where(near[..., None], x[:, None], -torch.inf).amax(2)
        return torch.where(near.any(2, keepdim=True), top, 0)


class Hop(nn.Module):
    """One layer: gather, one product of neighbours and root side by side, unit length, norm, ReLU."""

    def __init__(self, gather: nn.Module, conv: nn.Module, norm: nn.Module):
        super().__init__()
        self.gather, self.eps, self.plain = gather, norm.eps, False
        self.both = leaf(torch.cat([conv.lin_l.weight, conv.lin_r.weight], 1))
        self.offset = leaf(conv.lin_l.bias)
        self.gain, self.shift, self.part = leaf(norm.weight), leaf(norm.bias), leaf(norm.mean_scale)

    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        x = torch.cat([self.gather(x, near), x[:, : near.shape[1]]], 2)
        x = F.linear(x, self.both, self.offset)
        x = x / x.square().sum(2, keepdim=True).sqrt().clamp(min=1e-12)
        mean = x.mean(1, keepdim=True)
        taken = mean.square() if self.plain else mean.square() * self.part * (2 - self.part)
        rate = self.gain * (x.square().mean(1, keepdim=True) - taken + self.eps).rsqrt()
        return F.relu(x * rate + (self.shift - mean * self.part * rate))


class Jump(nn.Module):
    """An LSTM each way over the layers, and each way's share of the score of a layer."""

    def __init__(self, jk: nn.Module):
        super().__init__()
        wide, self.silent = jk.lstm.hidden_size, False
        self.ways = nn.ModuleList(nn.LSTM(jk.lstm.input_size, wide) for _ in range(2))
        for way, end in zip(self.ways, ("", "_reverse"), strict=True):
            way.load_state_dict({name: jk.lstm.get_parameter(name + end) for name in way.state_dict()})
        self.up, self.down = (leaf(x) for x in jk.att.weight[0].split(wide))
        self.offset = leaf(jk.att.bias)

    def forward(self, layers: list[Tensor]) -> Tensor:
        x = torch.stack([layer.flatten(0, 1) for layer in layers])
        score = self.ways[0](x)[0] @ self.up + self.ways[1](x.flip(0))[0].flip(0) @ self.down + self.offset
        share = score.softmax(0)
        share = share.detach() if self.silent else share
        return torch.einsum("lnc,ln->nc", x, share).unflatten(0, layers[0].shape[:2])


class SageOfHops(Port):
    """Hops over dense adjacency [B, targets, sources]; the norm takes its variance from squares."""

    def take(self, model: Net) -> None:
        gnn, fault = model.gnn, self.fault
        more = int(fault == "graph_sage_first_mean_counts_one_neighbour_more")
        gathers = Gather(gnn.convs[0], True, more), Gather(gnn.convs[1]), Gather(gnn.convs[2])
        self.hops = nn.ModuleList(map(Hop, gathers, gnn.convs, gnn.norms))
        self.hops[2].plain = fault == "graph_sage_third_norm_variance_about_the_whole_mean"
        self.jump = Jump(gnn.jk)
        self.jump.silent = fault == "graph_sage_layer_attention_without_gradient"
        self.out, self.name = Dense(gnn.lin), Dense(model.classifier)
        act = nn.Identity() if fault == "graph_sage_link_head_without_its_relu" else nn.ReLU()
        one, two = model.link_predictor.lins
        self.judge = nn.Sequential(Dense(one), act, Dense(two))

    def pairs(self, z: Tensor, pairs: Tensor) -> Tensor:
        return self.judge((F.one_hot(pairs, z.shape[1]).to(z) @ z[:, None]).prod(1))[..., 0]

    def near(self, edges: Tensor, sources: int, targets: int) -> Tensor:
        source, target = F.one_hot(edges[:, 0] + 1, sources + 1), F.one_hot(edges[:, 1] + 1, targets + 1)
        return (target.mT @ source)[:, 1:, 1:] > 0

    def forward(self, x: Tensor, hop2: Tensor, hop1: Tensor, seeds: Tensor, pos: Tensor, neg: Tensor):
        layers, sizes = [x], (*NODES, NODES[2])
        for i, edges in enumerate((hop2, hop1, seeds)):
            layers.append(self.hops[i](layers[-1], self.near(edges, *sizes[i : i + 2])))
        z = self.out(self.jump([layer[:, : NODES[2]] for layer in layers[1:]]))
        return self.name(z), self.pairs(z, pos), self.pairs(z, neg)


def affine(x: Tensor, rows: Tensor) -> Tensor:
    return x @ rows[:-1] + rows[-1]


class PackedSage(Port):
    """Edge lists graph by graph, one target after the other, and the LSTM's two ways as one batch."""

    def take(self, model: Net) -> None:
        gnn = model.gnn
        pairs = [torch.cat([x.lin_l.weight.T, x.lin_l.bias[None], x.lin_r.weight.T]) for x in gnn.convs]
        self.first, self.rest = leaf(pairs[0]), pile(pairs[1:])
        self.norms = pile(torch.stack([x.weight, x.bias, x.mean_scale]) for x in gnn.norms)
        w, ends = gnn.jk.lstm.state_dict(), ("l0", "reverse")
        lstm = [{name[:9]: w[name] for name in w if name.endswith(end)} for end in ends]
        self.gates = pile(torch.cat([way["weight_ih"], way["weight_hh"]], 1).T for way in lstm)
        self.offsets = pile(torch.stack([way["bias_ih_l"], way["bias_hh_l"]]) for way in lstm)
        layers = gnn.convs[2].lin, gnn.jk.att, gnn.lin, model.classifier, *model.link_predictor.lins
        self.flat = nn.ParameterList(leaf(torch.cat([x.weight.T, x.bias[None]])) for x in layers)

    def gather(self, i: int, x: Tensor, edges: Tensor, targets: int) -> Tensor:
        """The mean, or the largest of values that are none below zero."""
        x = affine(x, self.flat[0]).clamp(min=0) if i == 2 else x
        sent = x.gather(1, edges[:, 0].clamp(min=0)[..., None].expand(-1, -1, x.shape[2]))
        found = []
        for t in range(targets):
            mine = sent * (edges[:, 1] == t)[..., None]
            many = (edges[:, 1] == t).sum(1).clamp(min=1)[:, None]
            found.append(mine.amax(1) if i else mine.sum(1) / many)
        return torch.stack(found, 1)

    def norm(self, i: int, x: Tensor) -> Tensor:
        gain, shift, part = self.norms[i]
        large = self.fault == "graph_sage_first_norm_eps_ten_times_larger" and i == 0
        over, eps = 1, 1e-4 if large else 1e-5
        if self.fault == "graph_sage_second_norm_spans_the_batch_in_evaluation" and i == 1:
            over = 1 if self.training else (0, 1)
        x = x - part * x.mean(over, keepdim=True)
        return shift + gain * (x / (x.square().mean(over, keepdim=True) + eps).sqrt())

    def states(self, x: Tensor) -> Tensor:
        """[L, N, C] -> [L, N, 2 H]."""
        x, wide, out = torch.stack([x, x.flip(0)], 1), self.gates.shape[2] // 4, []
        h = c = x.new_zeros(*x.shape[1:3], wide)
        for step in x:
            gates = torch.cat([step, h], 2) @ self.gates + self.offsets.sum(1, keepdim=True)
            i, f, g, o = gates.split(wide, 2)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            out.append(h)
        there, back = torch.stack(out, 1)
        turned = self.fault != "graph_sage_backward_states_left_in_their_own_order"
        return torch.cat([there, back.flip(0) if turned else back], 2)

    def forward(self, x: Tensor, hop2: Tensor, hop1: Tensor, seeds: Tensor, pos: Tensor, neg: Tensor):
        kept, graphs = [], torch.arange(len(x))[:, None]
        for i, (edges, size) in enumerate(((hop2, NODES[1]), (hop1, NODES[2]), (seeds, NODES[2]))):
            rows, wide = self.rest[i - 1] if i else self.first, x.shape[2]
            root = rows[wide + 1 :]
            if self.fault == "graph_sage_second_root_weight_for_a_constant" and i == 1:
                root = root.detach()
            x = affine(self.gather(i, x, edges, size), rows[: wide + 1]) + x[:, :size] @ root
            x = self.norm(i, x / x.norm(dim=2, keepdim=True).clamp(min=1e-12)).clamp(min=0)
            kept.append(x[:, : NODES[2]].flatten(0, 1))
        x, (_, att, out, name, one, two) = torch.stack(kept), self.flat
        z = affine((x * affine(self.states(x), att).softmax(0)).sum(0), out).unflatten(0, (-1, NODES[2]))
        links = (z[graphs, pair[:, 0]] * z[graphs, pair[:, 1]] for pair in (pos, neg))
        return affine(z, name), *(affine(affine(x, one).clamp(min=0), two)[..., 0] for x in links)


SLOPES = ("input gradient", "weight gradient")
right(task, "graph_sage_of_dense_hops", "a tree, dense adjacency, joined weights", SageOfHops)
right(task, "graph_sage_of_packed_weights", "packed weights, edge lists, an LSTM by hand", PackedSage)
wrong(
    task,
    SageOfHops,
    graph_sage_first_mean_counts_one_neighbour_more=("a count off by one", "gnn.convs.0.aggr_module"),
    graph_sage_third_norm_variance_about_the_whole_mean=("another variance", "gnn.norms.2"),
    graph_sage_layer_attention_without_gradient=("detach", "gnn.jk", SLOPES),
    graph_sage_link_head_without_its_relu=("an activation left out", "link_predictor"),
)
wrong(
    task,
    PackedSage,
    graph_sage_first_norm_eps_ten_times_larger=("another eps", "gnn.norms.0"),
    graph_sage_second_norm_spans_the_batch_in_evaluation=("other axes in eval", "gnn.norms.1", "eval"),
    graph_sage_second_root_weight_for_a_constant=("detach", "gnn.convs.1.lin_r", "weight gradient"),
    graph_sage_backward_states_left_in_their_own_order=("another order", "gnn.jk.lstm"),
)
