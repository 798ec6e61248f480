"""Two ports of a small message passing network: a tree of padded molecules, and flat code of packed ones."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_ninth_mpnn_set import CUTOFF, DIM, MESSAGE, MPNN, READS, masked_error, molecules
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import Gates, few

task = few("forty_ninth_mpnn_set", MPNN, molecules, masked_error)


class Bonds(nn.Module):
    """Positions and orders of bonds -> a matrix for each, and none for padding."""

    def __init__(self, model: MPNN):
        super().__init__()
        near, far = model.conv.nn[0], model.conv.nn[2]
        self.register_buffer("centers", model.smearing.offset.clone())
        count = len(self.centers)
        self.by_length, self.by_order = leaf(near.weight[:, :count].T), leaf(near.weight[:, count:].T)
        self.offset, self.spacings = leaf(near.bias), count - 1
        self.out, self.plain = leaf(far.weight.view(DIM, MESSAGE, -1)), leaf(far.bias.view(DIM, MESSAGE))

    def forward(self, pos: Tensor, ends: Tensor, order: Tensor) -> Tensor:
        real = (order > 0).to(pos)
        apart = torch.einsum("bpa,bac->bpc", ends[0] - ends[1], pos)
        length = (apart.square().sum(-1) + 1 - real).sqrt()
        spacing = (self.centers[-1] - self.centers[0]) / self.spacings
        waves = (-((length[..., None] - self.centers) / spacing).square() / 2).exp()
        hidden = (waves @ self.by_length + self.by_order[(order - 1).clamp(min=0)] + self.offset).relu()
        matrix = torch.einsum("bph,dmh->bpdm", hidden, self.out) + self.plain
        return matrix * real[..., None, None]


class Passing(nn.Module):
    def __init__(self, model: MPNN):
        super().__init__()
        self.own, self.offset = leaf(model.conv.lin.weight.T), leaf(model.conv.bias)
        self.cell, self.end = Gates(dict(model.gru.named_parameters())), 1

    def forward(self, h: Tensor, world: Tensor, matrix: Tensor, ends: Tensor) -> Tensor:
        given = h + world[:, None]
        sent = torch.einsum("bpd,bpdm->bpm", ends[0] @ given, matrix)
        scale = ends[self.end].sum(1).clamp(min=1).rsqrt()
        got = (ends[1].mT @ sent) * scale[..., None] + given @ self.own + self.offset
        return self.cell(got.relu(), h)


class World(nn.Module):
    def __init__(self, node: nn.Module):
        super().__init__()
        self.widen, self.narrow, self.eps = node.mlp[0], node.mlp[3], node.mlp[1].eps
        self.scale, self.shift, self.mean = leaf(node.mlp[1].weight), leaf(node.mlp[1].bias), False

    def forward(self, h: Tensor, world: Tensor, there: Tensor) -> Tensor:
        y = self.widen((h * there).sum(1) / (there.sum(1) if self.mean else 1) + world)
        var, mean = torch.var_mean(y, -1, correction=0, keepdim=True)
        y = (y - mean) * (var + self.eps).rsqrt() * self.scale + self.shift
        return world + self.narrow(y.relu())


class Reading(nn.Module):
    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        self.w = leaf(torch.cat([lstm.weight_ih_l0, lstm.weight_hh_l0], 1).T)
        self.b, self.silent = pile([lstm.bias_ih_l0, lstm.bias_hh_l0]), None

    def forward(self, h: Tensor, there: Tensor) -> Tensor:
        query = read = cell = h.new_zeros(len(h), DIM)
        for step in range(READS):
            i, f, g, o = (torch.cat([query, read, query], 1) @ self.w + self.b.sum(0)).chunk(4, 1)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            query = o.sigmoid() * cell.tanh()
            asked = query.detach() if step == self.silent else query
            score = (h @ asked[..., None]).masked_fill(~there, -torch.inf)
            read = (score.softmax(1) * h).sum(1)
        return torch.cat([query, read], 1)


class PaddedMolecules(Port):
    """Molecules stay padded; ends of bonds are one-hot matrices, and edge matrices are made once."""

    def take(self, model: MPNN) -> None:
        self.enter, self.bonds, self.passing = model.lin0, Bonds(model), Passing(model)
        self.worlds = nn.ModuleList(map(World, model.virtualnodes))
        self.first, self.reading = leaf(model.virtualnode_embedding), Reading(model.set2set.lstm)
        self.leave = nn.Sequential(model.lin1, nn.ReLU(), model.lin2)
        self.register_buffer("units", torch.stack([model.standardize.mean, model.standardize.stddev]))
        self.bonds.spacings += self.fault == "mpnn_set_smearing_width_of_one_gaussian_more"
        self.passing.end -= self.fault == "mpnn_set_degree_counts_the_edges_that_leave"
        self.worlds[1].mean = self.fault == "mpnn_set_second_virtual_node_takes_the_mean"
        self.reading.silent = 2 if self.fault == "mpnn_set_third_attention_detaches_its_query" else None

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor, bonds: Tensor, order: Tensor) -> Tensor:
        there, real = mask[..., None], (order > 0)[..., None]
        ends = (F.one_hot(bonds, x.shape[1]) * real[..., None]).to(x).unbind(2)
        matrix, world = self.bonds(pos, ends, order), self.first.repeat(len(x), 1)
        h = self.passing(self.enter(x).relu(), world, matrix, ends)
        for update in self.worlds:
            world = update(h, world, there)
            h = self.passing(h, world, matrix, ends)
        return torch.addcmul(self.units[0], self.leave(self.reading(h, there)), self.units[1])


def joined(weight: Tensor, bias: Tensor) -> nn.Parameter:
    return leaf(torch.cat([weight, bias[:, None]], 1))


def rows(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w[:, :-1], w[:, -1])


class FlatMolecules(Port):
    """Flat lists of atoms and edges, sums by a matrix of membership, biases beside the weights."""

    def take(self, model: MPNN) -> None:
        conv, gru, lstm, nodes = model.conv, model.gru, model.set2set.lstm, model.virtualnodes
        ends = model.lin0, model.lin1, model.lin2, conv.nn[0], conv.nn[2]
        self.ends = nn.ParameterList(joined(x.weight, x.bias) for x in ends)
        self.own = joined(conv.lin.weight, conv.bias)
        self.given, self.held = joined(gru.weight_ih, gru.bias_ih), joined(gru.weight_hh, gru.bias_hh)
        self.ask, self.keep = (joined(*lstm.all_weights[0][i::2]) for i in (0, 1))
        self.wide, self.thin = (pile(joined(x.mlp[i].weight, x.mlp[i].bias) for x in nodes) for i in (0, 3))
        self.norm = pile(torch.stack([x.mlp[1].weight, x.mlp[1].bias]) for x in nodes)
        self.first = leaf(model.virtualnode_embedding[0])
        self.register_buffer("units", torch.stack([model.standardize.mean, model.standardize.stddev]))
        self.register_buffer("centers", model.smearing.offset.clone())

    def cell(self, m: Tensor, h: Tensor) -> Tensor:
        (a, b, c), (d, e, f) = rows(m, self.given).chunk(3, 1), rows(h, self.held).chunk(3, 1)
        reset, keep = (a + d).sigmoid(), (b + e).sigmoid()
        held = reset * f
        if self.fault == "mpnn_set_gru_resets_its_state_before_the_product":
            held = rows(reset * h, self.held[2 * DIM :])
        return keep * h + (1 - keep) * (c + held).tanh()

    def readout(self, h: Tensor, member: Tensor) -> Tensor:
        state = h.new_zeros(len(member), 2 * DIM)
        query = cell = state[:, :DIM]
        for step in range(READS):
            write, forget, new, show = (rows(state, self.ask) + rows(query, self.keep)).split(DIM, 1)
            cell = forget.sigmoid() * cell + write.sigmoid() * new.tanh()
            query = show.sigmoid() * cell.tanh()
            score = query @ h.T
            if self.fault == "mpnn_set_last_attention_divides_by_the_root_of_the_width" and step == READS - 1:
                score = score / DIM**0.5
            state = torch.cat([query, score.masked_fill(member == 0, -torch.inf).softmax(1) @ h], 1)
        return state

    def forward(self, x: Tensor, pos: Tensor, mask: Tensor, bonds: Tensor, order: Tensor) -> Tensor:
        graph, _ = torch.where(mask)
        which, edge = torch.where(order > 0)
        places = torch.zeros_like(mask, dtype=torch.long)
        places[mask] = torch.arange(len(graph), device=x.device)
        start, end = (places[which, bonds[which, edge, i]] for i in (0, 1))
        member, x, pos = F.one_hot(graph, len(x)).to(x).T, x[mask], pos[mask]
        length = torch.linalg.vector_norm(pos[end] - pos[start], dim=1, keepdim=True)
        width = (CUTOFF - self.centers[0]) / (len(self.centers) - 1)
        kind = torch.eye(4).to(x)[order[which, edge] - 1]
        edges = torch.cat([torch.exp(-((length - self.centers) ** 2) / (2 * width**2)), kind], 1)
        matrix = rows(rows(edges, self.ends[3]).relu(), self.ends[4]).unflatten(1, (DIM, MESSAGE))
        into = F.one_hot(end, len(x)).to(x).T
        into = into / into.sum(1, keepdim=True).clamp(min=1).sqrt()
        h, state = rows(x, self.ends[0]).relu(), self.first.expand(len(member), DIM)
        for step in range(3):
            given = h + state[graph]
            sent = (given[start, :, None] * matrix).sum(1)
            h = self.cell((into @ sent + rows(given, self.own)).relu(), h)
            if step < 2:
                y = rows(member @ h + state, self.wide[step])
                loose = self.fault == "mpnn_set_first_virtual_norm_with_a_large_epsilon" and step == 0
                y = F.layer_norm(y, y.shape[1:], *self.norm[step], 1e-2 if loose else 1e-5)
                state = state + rows(y.relu(), self.thin[step])
        y = rows(rows(self.readout(h, member), self.ends[1]).relu(), self.ends[2])
        bare = self.fault == "mpnn_set_targets_without_their_mean_in_evaluation" and not self.training
        return y * self.units[1] + (0 if bare else self.units[0])


right(task, "mpnn_set_of_padded_molecules", "a tree, padded, one-hot ends, split weights", PaddedMolecules)
right(task, "mpnn_set_of_flat_lists", "packed weights, membership products", FlatMolecules)
SLOPES, LATE = ("input gradient", "weight gradient"), "set2set"
wrong(
    task,
    PaddedMolecules,
    mpnn_set_smearing_width_of_one_gaussian_more=("a count off by one", "smearing"),
    mpnn_set_degree_counts_the_edges_that_leave=("another index", "conv"),
    mpnn_set_second_virtual_node_takes_the_mean=("mean for sum", "virtualnodes.1"),
    mpnn_set_third_attention_detaches_its_query=("detach", LATE, SLOPES),
)
wrong(
    task,
    FlatMolecules,
    mpnn_set_gru_resets_its_state_before_the_product=("another cell", "gru"),
    mpnn_set_first_virtual_norm_with_a_large_epsilon=("another epsilon", "virtualnodes.0.mlp.1"),
    mpnn_set_last_attention_divides_by_the_root_of_the_width=("a scale too many", LATE),
    mpnn_set_targets_without_their_mean_in_evaluation=("an offset left out in eval", "standardize", "eval"),
)
