"""Two ports of a small recommender: a tree of sides, crosses and tasks, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_ninth_cross_network import BUCKETS, MASKED, DCNv2, tasks_and_retrieval, visits

task = few("thirty_ninth_cross_network", DCNv2, visits, tasks_and_retrieval)
FACTOR = 2654435761


def sheet(layer: nn.Linear) -> Tensor:
    """The weight of a layer by inputs, and its bias as the last row."""
    return torch.cat([layer.weight.T, layer.bias[None]])


def through(x: Tensor, sheet: Tensor) -> Tensor:
    return x @ sheet[..., :-1, :] + sheet[..., -1:, :]


class Side(nn.Module):
    """Two single ids and a bag of them, by one table; what the bag's padding counts is ``padding``."""

    def __init__(self, model: DCNv2, *names: str):
        super().__init__()
        tables = [model.embedding_layer.embedding_layers[name] for name in names]
        self.table, self.padding = leaf(torch.cat([x.embedding.weight for x in tables])), 0.0
        self.register_buffer("sizes", torch.tensor([x.buckets for x in tables]))

    def forward(self, single: Tensor, bag: Tensor) -> Tensor:
        ids, start = torch.cat([single, bag], 1), self.sizes.cumsum(0) - self.sizes
        which = torch.tensor([0, 1] + [2] * bag.shape[1], device=ids.device)
        found = self.table[((ids * FACTOR) & 0xFFFFFFFF).remainder(self.sizes[which]) + start[which]]
        weight = (bag != 0).to(found)
        share = weight / (weight + self.padding * (1 - weight)).sum(1, keepdim=True).clamp(min=1)
        return torch.cat([found[:, :2].flatten(1), torch.einsum("nb,nbd->nd", share, found[:, 2:])], 1)


class Cross(nn.Module):
    """Low-rank experts side by side; as the gates sum to one, the bias and the product come after them."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.down, self.up = leaf(layer.V.transpose(0, 1).flatten(1)), leaf(layer.U.mT.flatten(0, 1))
        self.middle, self.bias, self.choose = leaf(layer.C), leaf(layer.bias), leaf(layer.gating.weight.T)
        self.own = False

    def forward(self, first: Tensor, x: Tensor) -> Tensor:
        y = torch.tanh(x @ self.down).unflatten(1, self.middle.shape[:2])
        y = torch.tanh(torch.einsum("ner,eqr->neq", y, self.middle))
        y = (y * (x @ self.choose).softmax(1)[..., None]).flatten(1) @ self.up
        return x + (x if self.own else first) * (y + self.bias)


class Goal(nn.Module):
    def __init__(self, gate: nn.Linear, tower: nn.Sequential):
        super().__init__()
        self.weight, self.bias, self.tower, self.fixed = leaf(gate.weight), leaf(gate.bias), tower, False

    def forward(self, x: Tensor, experts: Tensor) -> Tensor:
        score = F.linear(x, self.weight, self.bias)
        share = (score - score.logsumexp(1, keepdim=True)).exp()
        share = share.detach() if self.fixed else share
        return self.tower((share[..., None] * experts).sum(1))


class Matching(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.ask, self.offer, self.sharpness = head.user_tower, head.item_tower, leaf(-head.log_temperature)

    def forward(self, user: Tensor, item: Tensor, ids: Tensor, frequency: Tensor) -> Tensor:
        user, item = self.ask(user), self.offer(item)
        size = user.norm(dim=1)[:, None] * item.norm(dim=1)
        score = torch.einsum("nd,md->nm", user, item) / size * self.sharpness.exp() + (1 / frequency).log()
        same = (ids[: len(user), None] == ids).to(score) - torch.eye(*score.shape).to(score)
        return torch.where(same > 0, MASKED, score)


class TreeOfSides(Port):
    def take(self, model: DCNv2) -> None:
        self.person = Side(model, "user_id", "city", "history")
        self.thing = Side(model, "item_id", "category", "genres")
        self.counts, self.deep = Rows(model.dense.norm), model.parallel_dnn
        self.crosses = nn.ModuleList(map(Cross, model.crossnet.layers))
        self.experts = leaf(torch.cat([sheet(x[0]) for x in model.mmoe.experts], 1))
        self.goals = nn.ModuleList(map(Goal, model.mmoe.gate, model.tower))
        self.matching = Matching(model.retrieval)
        self.person.padding = float(self.fault == "cross_network_history_mean_counts_its_padding")
        self.counts.own = self.fault == "cross_network_dense_norm_by_the_batch_in_evaluation"
        self.crosses[1].own = self.fault == "cross_network_second_cross_multiplies_its_own_input"
        self.goals[1].fixed = self.fault == "cross_network_second_gate_without_gradient"

    def forward(self, user, history, dense, item, genres, frequency) -> tuple[Tensor, Tensor]:
        counts = self.counts((1 + dense).log().mT).mT.flatten(1)
        person = torch.cat([self.person(user, history), counts], 1)
        ids, bags, often = (torch.cat(x.unbind(1)) for x in (item, genres, frequency))
        things = self.thing(ids, bags)
        first = x = torch.cat([person, things.chunk(2)[0]], 1)
        for cross in self.crosses:
            x = cross(first, x)
        x = torch.cat([x, self.deep(first)], 1)
        experts = through(x, self.experts).relu().unflatten(1, (-1, 22))
        logits = torch.cat([goal(x, experts) for goal in self.goals], 1)
        return logits, self.matching(person, things, ids[:, 0], often)


class PackedRecommender(Port):
    """One table of all embeddings, sheets with their biases, and stacks by layer, expert and task."""

    def take(self, model: DCNv2) -> None:
        layers, norm, head = model.crossnet.layers, model.dense.norm, model.retrieval
        self.table = leaf(torch.cat([*model.embedding_layer.parameters()]).T)
        self.norm = pile([norm.weight, norm.bias])
        self.register_buffer("moved", torch.stack([norm.running_mean, norm.running_var]))
        self.u, self.v, self.c = (pile([getattr(x, n) for x in layers]) for n in "UVC")
        self.b, self.g = pile(x.bias for x in layers), pile(x.gating.weight for x in layers)
        chains = (model.parallel_dnn, head.user_tower, head.item_tower)
        self.w = nn.ParameterList(leaf(sheet(x[i])) for x in chains for i in (0, 2))
        self.experts, self.gates = (
            pile(sheet(x) for x, _ in model.mmoe.experts),
            pile(map(sheet, model.mmoe.gate)),
        )
        self.ends = nn.ParameterList(pile(sheet(x[i]) for x in model.tower) for i in (0, 2))
        self.heat = leaf(head.log_temperature)
        self.fewer = self.fault == "cross_network_category_hashed_into_one_bucket_fewer"
        self.leak = 0.01 if self.fault == "cross_network_second_tower_leaks" else 0.0

    def look(self, **features: Tensor) -> Tensor:
        tables, found = dict(zip(BUCKETS, self.table.split([*BUCKETS.values()], 1), strict=True)), []
        for name, ids in features.items():
            size = BUCKETS[name] - (self.fewer if name == "category" else 0)
            rows = F.one_hot(ids * FACTOR % 2**32 % size, BUCKETS[name]).to(self.table)
            if ids.dim() == 2:
                kept = ids.sign()[..., None]
                rows = (rows * kept).sum(1) / kept.sum(1).clamp(min=1)
            found.append(rows @ tables[name].T)
        return torch.cat(found, 1)

    def chain(self, x: Tensor, i: int) -> Tensor:
        return through(through(x, self.w[2 * i]).clamp(min=0), self.w[2 * i + 1])

    def cross(self, i: int, first: Tensor, x: Tensor) -> Tensor:
        y = torch.einsum("nd,edr->ner", x, self.v[i]).tanh()
        y = torch.einsum("neq,edq->ned", torch.einsum("ner,eqr->neq", y, self.c[i]).tanh(), self.u[i])
        late = self.fault == "cross_network_first_cross_adds_its_bias_after_the_product" and i == 0
        y = first[:, None] * y + self.b[i] if late else first[:, None] * (y + self.b[i])
        return x + torch.einsum("ne,ned->nd", (x @ self.g[i].T).softmax(1), y)

    def forward(self, user, history, dense, item, genres, frequency) -> tuple[Tensor, Tensor]:
        counts = F.batch_norm(dense.log1p(), *self.moved, *self.norm, self.training).flatten(1)
        person = torch.cat([self.look(user_id=user[:, 0], city=user[:, 1], history=history), counts], 1)
        pairs = zip(item.unbind(1), genres.unbind(1), strict=True)
        sets = [self.look(item_id=x[:, 0], category=x[:, 1], genres=bag) for x, bag in pairs]
        first = x = torch.cat([person, sets[0]], 1)
        for i in range(len(self.u)):
            x = self.cross(i, first, x)
        x = torch.cat([x, self.chain(first, 0)], 1)
        shares, experts = through(x, self.gates).softmax(2), through(x, self.experts).relu()
        y = through(torch.einsum("tne,enh->tnh", shares, experts), self.ends[0])
        y = torch.stack([y[0].relu(), F.leaky_relu(y[1], self.leak)])
        return through(y, self.ends[1]).squeeze(2).T, self.match(person, sets, item[..., 0], frequency)

    def match(self, person: Tensor, sets: list[Tensor], ids: Tensor, frequency: Tensor) -> Tensor:
        user, found = self.chain(person, 1), []
        for j, each in enumerate(sets):
            score = F.cosine_similarity(user[:, None], self.chain(each, 2), dim=2) * (-self.heat).exp()
            same = ids[:, :1] == ids[:, j]
            if j == 0:
                same = same.triu(1) | same.tril(-1)
            elif self.fault == "cross_network_sampled_duplicates_are_not_masked":
                same = torch.zeros_like(same)
            found.append((score - frequency[:, j].log()).masked_fill(same, MASKED))
        return torch.cat(found, 1)


SLOPES, EMBEDDINGS = ("input gradient", "weight gradient"), "embedding_layer.embedding_layers"
right(task, "cross_network_of_sides_and_goals", "a tree, a table a side, fused experts", TreeOfSides)
right(task, "cross_network_of_packed_weights", "one table by one-hot rows, sheets, stacks", PackedRecommender)
wrong(
    task,
    TreeOfSides,
    cross_network_history_mean_counts_its_padding=("a mean over padding", f"{EMBEDDINGS}.history"),
    cross_network_dense_norm_by_the_batch_in_evaluation=("batch statistics in eval", "dense.norm", "eval"),
    cross_network_second_cross_multiplies_its_own_input=("another operand", "crossnet.layers.1"),
    cross_network_second_gate_without_gradient=("detach", ("mmoe", "mmoe.gate.1"), SLOPES),
)
wrong(
    task,
    PackedRecommender,
    cross_network_category_hashed_into_one_bucket_fewer=("a count off by one", f"{EMBEDDINGS}.category"),
    cross_network_first_cross_adds_its_bias_after_the_product=("another order", "crossnet.layers.0"),
    cross_network_second_tower_leaks=("another activation", "tower.1.1"),
    cross_network_sampled_duplicates_are_not_masked=("a mask left out", "retrieval"),
)
