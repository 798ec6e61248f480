"""Two ports of a small heterogeneous graph transformer: dense counts of edges, and one table of all nodes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirtieth_hetero_graph import COUNTS, HGT, RELATIONS, classes_and_links, library

task = few("thirtieth_hetero_graph", HGT, library, classes_and_links)
HEADS, WIDTH, KINDS, SIZES = 3, 24, tuple(COUNTS), list(COUNTS.values())
START = {"author": 0, "paper": SIZES[0], "venue": SIZES[0] + SIZES[1]}


class Dense(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.matrix, self.offset = leaf(weight.T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Kind(nn.Module):
    def __init__(self, conv: nn.Module, name: str):
        super().__init__()
        kqv, out = conv.kqv_lin.lins[name], conv.out_lin.lins[name]
        self.key, self.query, self.value = map(Dense, kqv.weight.chunk(3), kqv.bias.chunk(3))
        self.out, self.gate, self.silent = Dense(out.weight, out.bias), leaf(conv.skip[name][0]), False

    def asked(self, x: Tensor) -> list[Tensor]:
        return [y(x).unflatten(2, (HEADS, -1)).transpose(1, 2) for y in (self.key, self.query, self.value)]

    def forward(self, x: Tensor, news: Tensor) -> Tensor:
        gate = self.gate.detach() if self.silent else self.gate
        return torch.lerp(x, self.out(F.gelu(news)), gate.sigmoid())


class Relation(nn.Module):
    def __init__(self, conv: nn.Module, i: int):
        super().__init__()
        self.key, self.value = (leaf(x.weight[i :: len(RELATIONS)]) for x in (conv.k_rel, conv.v_rel))
        self.prior = leaf(conv.p_rel["__".join(RELATIONS[i])][0])

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        query = (query / query.shape[-1] ** 0.5) @ self.key.mT * self.prior[:, None, None]
        return query @ key.mT, value @ self.value


def mix(logits: Tensor, values: Tensor, counts: Tensor) -> Tensor:
    """The mean of the values by the softmax of the logits, each taken as often as it counts."""
    share = (logits - logits.detach().amax(-1, True)).exp() * counts[:, None]
    total = share.sum(-1, True)
    return share @ values / (total + (total == 0))


class Round(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        self.kinds = nn.ModuleDict({name: Kind(conv, name) for name in KINDS})
        self.relations = nn.ModuleList(Relation(conv, i) for i in range(len(RELATIONS)))
        self.apart = False

    def forward(self, x: dict[str, Tensor], counts: list[Tensor]) -> dict[str, Tensor]:
        asked, after = {name: self.kinds[name].asked(x[name]) for name in KINDS}, {}
        for name in KINDS:
            found = []
            for (src, _, dst), relation, count in zip(RELATIONS, self.relations, counts, strict=True):
                if dst == name:
                    found.append((*relation(asked[name][1], *asked[src][::2]), count))
            whole = [list(map(torch.cat, zip(*found, strict=True), (-1, -2, -1)))]
            news = sum(mix(*each) for each in (found if self.apart else whole))
            after[name] = self.kinds[name](x[name], news.transpose(1, 2).flatten(2))
        return after


class Links(nn.Module):
    def __init__(self, decoder: nn.Module):
        super().__init__()
        one, two = decoder.lin1, decoder.lin2
        self.author, self.venue = (leaf(part.T) for part in one.weight.chunk(2, 1))
        self.offset, self.last, self.squash = leaf(one.bias), Dense(two.weight, two.bias), False

    def forward(self, x: dict[str, Tensor], links: Tensor) -> Tensor:
        ends = zip((x["author"] @ self.author, x["venue"] @ self.venue), links.unbind(1), strict=True)
        score = self.offset + sum(side.take_along_dim(index[..., None], 1) for side, index in ends)
        score = self.last(F.relu(score)).squeeze(2)
        return score.sigmoid() if self.squash and not self.training else score


def counted(edges: Tensor, src: str, dst: str) -> Tensor:
    """How many edges lead from each source to each target, [N, targets, sources]."""
    ends = zip(edges.unbind(1), (src, dst), strict=True)
    source, target = ((at[..., None] == torch.arange(COUNTS[x]).to(at)).float() for at, x in ends)
    return target.mT @ source


class DenseGraph(Port):
    def take(self, model: HGT) -> None:
        self.entry = nn.ModuleDict({name: Dense(x.weight, x.bias) for name, x in model.lin_dict.items()})
        self.rounds = nn.ModuleList(map(Round, model.convs))
        self.topic, self.links = Dense(model.lin.weight, model.lin.bias), Links(model.decoder)
        self.rounds[0].apart = self.fault == "hetero_graph_first_layer_softmax_within_each_relation"
        self.rounds[1].kinds["paper"].silent = self.fault == "hetero_graph_second_paper_gate_without_gradient"
        self.links.squash = self.fault == "hetero_graph_link_scores_are_probabilities_in_evaluation"

    def forward(self, author, paper, venue, writes, written_by, appears_in, hosts, links):
        x = {name: self.entry[name](y) for name, y in zip(KINDS, (author, paper, venue), strict=True)}
        linear = ("venue",) if self.fault == "hetero_graph_venue_entry_without_relu" else ()
        x = {name: each if name in linear else F.relu(each) for name, each in x.items()}
        edges = zip((writes, written_by, appears_in, hosts), RELATIONS, strict=True)
        counts = [counted(each, src, dst).to(author) for each, (src, _, dst) in edges]
        for each in self.rounds:
            x = each(x, counts)
        return self.topic(x["paper"]), self.links(x, links)


def affine(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def apply(x: Tensor, sheet: Tensor) -> Tensor:
    return F.linear(x, sheet[:, :-1], sheet[:, -1])


class NodeTable(Port):
    def take(self, model: HGT) -> None:
        convs, count = model.convs, len(RELATIONS)
        self.entry = leaf(torch.cat([affine(x) for x in model.lin_dict.values()], 1))
        nodes = [[(c.kqv_lin.lins[k], c.out_lin.lins[k]) for k in KINDS] for c in convs]
        self.maps = pile(torch.stack([torch.cat([affine(x) for x in k]) for k in layer]) for layer in nodes)
        self.gates = pile(torch.cat([c.skip[k] for k in KINDS]) for c in convs)
        both = [[x.weight.unflatten(0, (HEADS, count)) for x in (c.k_rel, c.v_rel)] for c in convs]
        if self.fault == "hetero_graph_first_value_matrices_ordered_by_relation_first":
            both[0][1] = convs[0].v_rel.weight.unflatten(0, (count, HEADS)).transpose(0, 1)
        self.bonds = pile(torch.stack(each) for each in both)
        self.priors = pile(torch.cat([c.p_rel["__".join(r)] for r in RELATIONS]) for c in convs)
        self.ends = leaf(affine(model.lin))
        self.pair, self.score = leaf(affine(model.decoder.lin1)), leaf(affine(model.decoder.lin2))

    def layer(self, i: int, x: Tensor, edges: Tensor) -> Tensor:
        (graph, bond, src, dst), parts = edges, x.split(SIZES, 1)
        kqv = torch.cat(list(map(apply, parts, self.maps[i, :, : 3 * WIDTH])), 1)
        k, q, v = kqv.unflatten(2, (3, HEADS, -1)).unbind(2)
        if self.fault == "hetero_graph_second_layer_queries_without_gradient" and i == 1:
            q = q.detach()
        kv = torch.einsum("jnshd,jhrde->nrsjhe", torch.stack([k, v]), self.bonds[i])
        key, value = kv[graph, bond, src].unbind(1)
        fit = (key * q[graph, dst]).sum(2, True) / (WIDTH / HEADS) ** 0.5 * self.priors[i, bond, :, None]
        share = (fit - fit.detach().max()).exp()
        both = torch.cat([share * value, share], 2)
        sums = both.new_zeros(x.shape[0] * x.shape[1], HEADS, both.shape[2])
        sums = sums.index_add(0, dst + x.shape[1] * graph, both)
        news = (sums[..., :-1] / sums[..., -1:].where(sums[..., -1:] > 0, 1)).flatten(1).view(x.shape)
        done, rough = [], self.fault == "hetero_graph_first_layer_gelu_of_papers_by_a_sigmoid" and i == 0
        for j, new in enumerate(news.split(SIZES, 1)):
            new = new * (1.702 * new).sigmoid() if rough and j == 1 else F.gelu(new)
            sheet = self.maps[i, j, 3 * WIDTH :]
            if self.fault == "hetero_graph_second_output_map_of_authors_without_bias" and (i, j) == (1, 0):
                sheet = torch.cat([sheet[:, :-1], 0 * sheet[:, -1:]], 1)
            back = 1 / (1 + self.gates[i, j].exp())
            done.append(apply(new, sheet) * (1 - back) + back * parts[j])
        return torch.cat(done, 1)

    def forward(self, author, paper, venue, writes, written_by, appears_in, hosts, links):
        sheets, edges = self.entry.split([8, 12, 6], 1), []
        x = torch.cat(list(map(apply, (author, paper, venue), sheets)), 1).relu()
        for r, each in enumerate((writes, written_by, appears_in, hosts)):
            graph, at = (each[:, 0] >= 0).nonzero(as_tuple=True)
            src, dst = (each[graph, j, at] + START[RELATIONS[r][2 * j]] for j in (0, 1))
            edges.append(torch.stack([graph, torch.full_like(graph, r), src, dst]))
        for i in range(len(self.maps)):
            x = self.layer(i, x, torch.cat(edges, 1))
        ends = (links + torch.tensor([[0], [START["venue"]]]).to(links)).unbind(1)
        pairs = torch.cat([x.take_along_dim(end[..., None], 1) for end in ends], 2)
        scores = apply(apply(pairs, self.pair).clamp(min=0), self.score)[..., 0]
        return apply(x.split(SIZES, 1)[1], self.ends), scores


SLOPES = "input gradient", "weight gradient"
right(task, "hetero_graph_of_dense_counts", "a tree, dense attention, split maps", DenseGraph)
right(task, "hetero_graph_of_one_node_table", "packed stacks, sums over edges", NodeTable)
wrong(
    task,
    DenseGraph,
    hetero_graph_venue_entry_without_relu=("an activation left out", ""),
    hetero_graph_first_layer_softmax_within_each_relation=("a softmax over another set", "convs.0"),
    hetero_graph_second_paper_gate_without_gradient=("detach", "convs.1", "weight gradient"),
    hetero_graph_link_scores_are_probabilities_in_evaluation=("a sigmoid in eval", "decoder", "eval"),
)
wrong(
    task,
    NodeTable,
    hetero_graph_first_value_matrices_ordered_by_relation_first=("order", ("convs.0.v_rel", "convs.0")),
    hetero_graph_first_layer_gelu_of_papers_by_a_sigmoid=("an approximation", "convs.0"),
    hetero_graph_second_layer_queries_without_gradient=("detach", "convs.1", SLOPES),
    hetero_graph_second_output_map_of_authors_without_bias=("no bias", "convs.1.out_lin.lins.author"),
)
