"""Two ports of a small PNA: a tree over dense adjacencies, and one class of stacked weights and lists."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import Gates, few
from bench.held_back._twenty_ninth_pna import LAYERS, PNA, STEPS, TOWERS, WIDTH, molecules, regression

task = few("twenty_ninth_pna", PNA, molecules, regression)


class Speech(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        own, other, bond = torch.cat([tower[0].weight for tower in conv.pre_nns]).split(WIDTH, 1)
        self.bond, self.bias = conv.edge_encoder, leaf(torch.cat([tower[0].bias for tower in conv.pre_nns]))
        self.by_bond, self.hears, self.says, self.turned = leaf(bond.T), leaf(own.T), leaf(other.T), False

    def forward(self, x: Tensor, bonds: Tensor) -> Tensor:
        to, source = (2, 1) if not self.turned else (1, 2)
        said = (x @ self.hears).unsqueeze(to) + (x @ self.says).unsqueeze(source)
        return (said + self.bond(bonds) @ self.by_bond + self.bias).unflatten(-1, (TOWERS, -1))


def moments(said: Tensor, near: Tensor, fewer: int) -> Tensor:
    """[B, to, from, towers, C] -> [B, to, towers, 4, C]: mean, least, greatest and deviation."""
    near, count = near[..., None, None], near.sum(2)[..., None, None]
    mean = (said * near).sum(2) / count.clamp(min=1)
    low = said.masked_fill(~near, torch.inf).amin(2).masked_fill(count == 0, 0)
    high = said.masked_fill(~near, -torch.inf).amax(2).masked_fill(count == 0, 0)
    square = ((said - mean.unsqueeze(2)).square() * near).sum(2) / (count - fewer).clamp(min=1)
    wide = square > 1e-5
    return torch.stack([mean, low, high, torch.where(wide, square, 1).sqrt() * wide], 3)


class Neighbourhood(nn.Module):
    def __init__(self, conv: nn.Module, norm: nn.Module):
        super().__init__()
        self.speech, self.fewer, self.norm = Speech(conv), 0, Rows(norm.module)
        weight = torch.stack([tower[0].weight for tower in conv.post_nns])
        self.keep, self.gather = leaf(weight[..., :WIDTH]), leaf(weight[..., WIDTH:].unflatten(2, (3, 4, -1)))
        self.bias, self.mix = pile(tower[0].bias for tower in conv.post_nns), conv.lin
        self.register_buffer("usual", conv.aggr_module.avg_deg_log.clone())

    def forward(self, x: Tensor, bonds: Tensor, near: Tensor, real: Tensor) -> Tensor:
        seen = moments(self.speech(x, bonds), near, self.fewer)
        rate = near.sum(2).to(x).log1p() / self.usual
        least = torch.log(torch.full_like(rate, 2)) / self.usual
        rates = torch.stack([torch.ones_like(rate), rate, 1 / rate.maximum(least)], -1)
        y = torch.einsum("nvs,nvtac,tosac->nvto", rates, seen, self.gather)
        y = y + torch.einsum("nvc,toc->nvto", x, self.keep) + self.bias
        rows = self.norm(self.mix(y.flatten(2))[real]).relu()
        return x.new_zeros(x.shape).masked_scatter(real[..., None], rows)


class Asking(nn.Module):
    def __init__(self, lstm: nn.LSTM):
        super().__init__()
        given, held, b, c = lstm.parameters()
        self.asked, self.heard = (leaf(x.T) for x in given.split(WIDTH, 1))
        self.held, self.b, self.c, self.fixed = leaf(held.T), leaf(b), leaf(c), False

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        query = read = cell = x.new_zeros(len(x), WIDTH)
        for _ in range(STEPS):
            gates = query @ (self.asked + self.held) + read @ self.heard + self.b + self.c
            take, keep, new, give = gates.chunk(4, -1)
            cell = keep.sigmoid() * cell + take.sigmoid() * new.tanh()
            query = give.sigmoid() * cell.tanh()
            score = torch.einsum("nvc,nc->nv", x, query).masked_fill(~real, -torch.inf).softmax(1)
            read = torch.einsum("nv,nvc->nc", score.detach() if self.fixed else score, x)
        return torch.cat([query, read], 1)


class DensePNA(Port):
    """Adjacencies of [B, N, N]; towers side by side; the scalers are a factor in one sum of products."""

    def take(self, model: PNA) -> None:
        self.table, fault = leaf(model.node_emb.weight), self.fault
        self.layers = nn.ModuleList(map(Neighbourhood, model.convs, model.batch_norms))
        self.update = Gates(dict(model.gru.gru.named_parameters()), end="_l0")
        self.asking = Asking(model.set2set.lstm)
        self.head = model.mlp[::2]
        self.layers[0].fewer = int(fault == "pna_first_deviation_by_one_neighbour_fewer")
        self.layers[1].speech.turned = fault == "pna_second_messages_take_the_source_for_the_target"
        self.layers[2].norm.own = fault == "pna_last_norm_by_its_own_statistics_in_evaluation"
        self.asking.fixed = fault == "pna_set2set_attention_takes_no_gradient"

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        real, (n, e) = x >= 0, (edge_index[:, 0] >= 0).nonzero(as_tuple=True)
        where = n, edge_index[n, 1, e], edge_index[n, 0, e]
        near = real.new_zeros(*x.shape, x.shape[1]).index_put(where, real.new_ones(()))
        bonds = edge_attr.new_zeros(*near.shape, edge_attr.shape[2]).index_put(where, edge_attr[n, e])
        h = self.table[x.clamp(min=0)] * real[..., None]
        for layer in self.layers[:-1]:
            h = self.update(h, layer(h, bonds, near, real))
        y = self.asking(self.layers[-1](h, bonds, near, real), real)
        return self.head[2](self.head[1](self.head[0](y).relu()).relu())


def packed(conv: nn.Module, norm: nn.Module) -> list[Tensor]:
    """Of one layer: bond, before, after, mixing, each with its bias in a last column, and the norm."""
    sheet = lambda layers: torch.stack([torch.cat([x.weight, x.bias[:, None]], 1) for x in layers])  # noqa: E731
    before, after = (sheet([tower[0] for tower in towers]) for towers in (conv.pre_nns, conv.post_nns))
    bond, mixing = (sheet([layer])[0] for layer in (conv.edge_encoder, conv.lin))
    return [bond, before, after, mixing, torch.stack([norm.weight, norm.bias])]


def affine(x: Tensor, sheet: Tensor) -> Tensor:
    return x @ sheet[..., :-1].mT + sheet[..., -1].unsqueeze(-2)


class ListedPNA(Port):
    """Stacks by layer; the neighbours of each atom are padded lists, read from the sorted edges."""

    def take(self, model: PNA) -> None:
        norms = [norm.module for norm in model.batch_norms]
        self.table, layers = leaf(model.node_emb.weight), map(packed, model.convs, norms)
        self.w = nn.ParameterList(pile(each) for each in zip(*layers, strict=True))
        cells = model.gru.gru, model.set2set.lstm
        self.gru, self.lstm = (nn.ParameterList(map(leaf, cell.parameters())) for cell in cells)
        head = (torch.cat([model.mlp[i].weight, model.mlp[i].bias[:, None]], 1) for i in (0, 2, 4))
        self.head = nn.ParameterList(map(leaf, head))
        running = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("running", torch.stack(running))
        self.register_buffer("usual", model.convs[0].aggr_module.avg_deg_log.clone())

    def layer(self, i: int, x: Tensor, source: Tensor, bonds: Tensor, lists: Tensor) -> Tensor:
        bond, before, after, mixing, (scale, shift) = (w[i] for w in self.w)
        target, there = (lists >= 0).nonzero()[:, 0], (lists >= 0)[None, ..., None]
        said = affine(torch.cat([x[target], x[source], affine(bonds, bond)], 1), before)
        said, count = said[:, lists.clamp(min=0)], there.sum(2).to(x)
        mean = (said * there).sum(2) / count.clamp(min=1)
        low, high = (k * (k * said).where(there, -1e9).amax(2) * (count > 0) for k in (-1, 1))
        if self.fault == "pna_second_minimum_takes_no_gradient" and i == 1:
            low = low.detach()
        square = (said.square() * there).sum(2) / count.clamp(min=1) - mean.square()
        wide = square > 1e-5
        seen = torch.cat([mean, low, high, torch.where(wide, square, 1).sqrt() * wide], 2)
        up, down = (count + 1).log() / self.usual, self.usual / (count.clamp(min=1) + 1).log()
        if self.fault == "pna_third_amplification_by_the_logarithm_without_one" and i == 2:
            up = count.clamp(min=1).log() / self.usual
        y = affine(torch.cat([x.expand(TOWERS, -1, -1), seen, seen * up, seen * down], 2), after)
        y = affine(y.transpose(0, 1).flatten(1), mixing)
        center, spread = self.running[i]
        if self.training:
            center, spread = y.mean(0), y.var(0, correction=0)
            self.running[i].lerp_(torch.stack([center, y.var(0)]).detach(), 0.1)
        eps = 1e-3 if self.fault == "pna_first_norm_with_a_larger_epsilon" and i == 0 else 1e-5
        return ((y - center) / (spread + eps).sqrt() * scale + shift).clamp(min=0)

    def update(self, x: Tensor, h: Tensor) -> Tensor:
        w, u, b, c = self.gru
        (r, z, n), (s, y, m) = F.linear(x, w, b).chunk(3, 1), F.linear(h, u, c).chunk(3, 1)
        z, n = torch.sigmoid(z + y), torch.tanh(n + torch.sigmoid(r + s) * m)
        z = 1 - z if self.fault == "pna_gru_keeps_what_it_should_update" else z
        return z * h + (1 - z) * n

    def forward(self, x: Tensor, edge_index: Tensor, edge_attr: Tensor) -> Tensor:
        size, real = x.shape[0], x >= 0
        place, (n, e) = real.flatten().cumsum(0) - 1, (edge_index[:, 0] >= 0).nonzero(as_tuple=True)
        source, target = (place[n * x.shape[1] + edge_index[n, k, e]] for k in (0, 1))
        order, degree = target.argsort(stable=True), target.bincount(minlength=int(real.sum()))
        rank = torch.arange(int(degree.max()), device=x.device)
        lists = torch.where(rank < degree[:, None], (degree.cumsum(0) - degree)[:, None] + rank, -1)
        h, given = self.table[x[real]], (source[order], edge_attr[n, e][order], lists)
        for i in range(LAYERS):
            y = self.layer(i, h, *given)
            h = self.update(h, y) if i < LAYERS - 1 else y
        sets, q, c = h.split(real.sum(1).tolist()), h.new_zeros(size, 2 * WIDTH), h.new_zeros(size, WIDTH)
        for _ in range(STEPS):
            own, c = torch.lstm_cell(q, (q[:, :WIDTH], c), *self.lstm)
            read = [(each @ k).softmax(0) @ each for each, k in zip(sets, own, strict=True)]
            q = torch.cat([own, torch.stack(read)], 1)
        y = affine(affine(q, self.head[0]).relu(), self.head[1]).relu()
        return affine(y, self.head[2])


SLOPES = ("input gradient", "weight gradient")
right(task, "pna_of_dense_adjacencies", "a tree, dense masks, towers side by side", DensePNA)
right(task, "pna_of_neighbour_lists", "packed stacks, padded lists of neighbours", ListedPNA)
wrong(
    task,
    DensePNA,
    pna_first_deviation_by_one_neighbour_fewer=("unbiased", "convs.0.aggr_module.aggr.aggrs.3"),
    pna_second_messages_take_the_source_for_the_target=("swapped ends", "convs.1"),
    pna_last_norm_by_its_own_statistics_in_evaluation=("batch in eval", "batch_norms.2.module", "eval"),
    pna_set2set_attention_takes_no_gradient=("detach", "set2set", SLOPES),
)
wrong(
    task,
    ListedPNA,
    pna_first_norm_with_a_larger_epsilon=("another epsilon", "batch_norms.0.module"),
    pna_second_minimum_takes_no_gradient=("detach", "convs.1.aggr_module.aggr.aggrs.1", SLOPES),
    pna_gru_keeps_what_it_should_update=("a gate turned", "gru.gru"),
    pna_third_amplification_by_the_logarithm_without_one=("a term left out", "convs.2.aggr_module"),
)
