"""Two ports of a small Deep Interest Evolution Network: a tree of split weights, and one flat class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import Gates, few
from bench.held_back._thirtieth_deep_interest import DIEN, HIDDEN, STATE, clicks, log_losses

task = few("thirtieth_deep_interest", DIEN, clicks, log_losses)
BUFFERS = "running_mean", "running_var", "num_batches_tracked"


class Table(nn.Module):
    """Rows by number; row nought stays what it is unless it is ``open``."""

    def __init__(self, layer: nn.Embedding):
        super().__init__()
        self.rows, self.open = leaf(layer.weight), False

    def forward(self, index: Tensor) -> Tensor:
        return F.embedding(index, self.rows, None if self.open else 0)


class Adaptive(nn.Module):
    """Dice of the last axis, by ``own`` statistics in evaluation too if it says so."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.slope, self.norm, self.own = leaf(layer.alpha), layer.bn, False

    def forward(self, x: Tensor) -> Tensor:
        own, y = self.own and not self.training, x.transpose(1, 2)
        y = F.batch_norm(y, None, None, training=True, eps=self.norm.eps) if own else self.norm(y)
        return x * torch.lerp(self.slope, x.new_ones(()), y.transpose(1, 2).sigmoid())


class Scorer(nn.Module):
    """A score for each key; what reads the query alone is reckoned once for all keys."""

    def __init__(self, unit: nn.Module):
        super().__init__()
        first, second = unit.dnn.linears
        self.asked, self.held, self.apart, self.both = map(leaf, first.weight.T.chunk(4))
        self.offset, self.second, self.third = leaf(first.bias), second, unit.dense
        self.gates, self.flip = nn.ModuleList(map(Adaptive, unit.dnn.activation_layers)), False

    def forward(self, query: Tensor, keys: Tensor) -> Tensor:
        apart = -self.apart if self.flip else self.apart
        x = (query @ (self.asked + apart) + self.offset)[:, None] + keys @ (self.held - apart)
        x = self.gates[0](x + torch.einsum("ne,nte,eo->nto", query, keys, self.both))
        return self.third(self.gates[1](self.second(x)))[..., 0]


class Sequel(nn.Module):
    """Its own state after each click, moved from by as much as the click is attended to."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.ask, self.bend = layer.query_dense, layer.query_act
        self.scorer = Scorer(layer.attention.local_att)
        cell = layer.interest_evolution.rnn.named_parameters()
        turn = torch.ones(3, STATE, 1).index_fill(0, torch.tensor(1), -1)
        self.cell = Gates({name: (turn * w.view(3, STATE, -1)).reshape(w.shape) for name, w in cell})

    def forward(self, query: Tensor, states: Tensor, held: Tensor) -> Tensor:
        score = self.scorer(self.bend(self.ask(query)), states)
        weight = (score - score.amax(1, True).detach()).exp() * held
        weight, h = weight / weight.sum(1, True), states.new_zeros(len(query), STATE)
        for x, w in zip(states.unbind(1), weight.unbind(1), strict=True):
            h = h + w[:, None] * (self.cell(x, h) - h)
        return h


class InterestsByParts(Port):
    """Tables, scorers of split kernels, a cell by hand for the states, and a head of split weights."""

    def take(self, model: DIEN) -> None:
        self.items, self.kinds = Table(model.item_embedding), Table(model.cate_embedding)
        self.near, self.sequel = Scorer(model.din_attention.local_att), Sequel(model.interest_evolution)
        self.reader = Gates(dict(model.interest_extractor.gru.named_parameters()), end="_l0")
        self.judge, self.last = model.interest_extractor.auxiliary_net, model.dnn_linear
        (self.top, self.next), (self.bend, self.curve) = model.dnn.linears, model.dnn.activation_layers
        self.items.open = self.fault == "deep_interest_padding_row_of_items_is_trained"
        self.near.flip = self.fault == "deep_interest_pooling_takes_key_minus_query"
        self.sequel.cell.early = self.fault == "deep_interest_attentional_gru_resets_before_the_product"
        self.sequel.scorer.gates[0].own = self.fault == "deep_interest_dice_by_the_batch_in_evaluation"

    def forward(self, target: Tensor, history: Tensor, sampled: Tensor, lengths: Tensor, dense: Tensor):
        pairs = torch.cat([target[:, None], history, sampled], 1)
        rows = torch.cat([self.items(pairs[..., 0]), self.kinds(pairs[..., 1])], -1)
        query, (keys, others) = rows[:, 0], rows[:, 1:].chunk(2, 1)
        held = (torch.arange(keys.shape[1], device=keys.device) < lengths[:, None]).to(keys)
        h, states = keys.new_zeros(len(keys), HIDDEN), []
        for x in keys.unbind(1):
            states.append(h := self.reader(x, h))
        states = torch.stack(states, 1) * held[..., None]
        yes, no = (self.judge(torch.cat([states[:, :-1], x[:, 1:]], 2))[..., 0] for x in (keys, others))
        missed = ((F.softplus(-yes) + F.softplus(no)) * held[:, 1:]).mean(1)
        total, pooled = keys.sum(1), torch.einsum("nt,nte->ne", self.near(query, keys) * held, keys)
        given = query, total, query * total, pooled, self.sequel(query, states, held), dense
        return self.last(self.curve(self.next(self.bend(self.top(torch.cat(given, 1))))))[:, 0], missed


class FlatInterests(Port):
    """Weights with their biases as a last column, sequences with the time first, no modules."""

    def take(self, model: DIEN) -> None:
        reader, later = model.interest_extractor, model.interest_evolution
        units, cell = (model.din_attention.local_att, later.attention.local_att), later.interest_evolution.rnn
        layers = [x for unit in units for x in (*unit.dnn.linears, unit.dense)]
        layers += [later.query_dense, *reader.auxiliary_net[::2], *model.dnn.linears, model.dnn_linear]
        self.w = nn.ParameterList(leaf(torch.cat([x.weight, x.bias[:, None]], 1)) for x in layers)
        grus = [*reader.gru.parameters()], [*cell.parameters()]
        pairs = (pair for g in grus for pair in zip(g[:2], g[2:], strict=True))
        self.cells = nn.ParameterList(leaf(torch.cat([w, b[:, None]], 1)) for w, b in pairs)
        dices = [x for unit in units for x in unit.dnn.activation_layers]
        bends = [x.weight for x in (later.query_act, *model.dnn.activation_layers)]
        self.slopes = nn.ParameterList(leaf(x) for x in (*(d.alpha for d in dices), *bends))
        for name in BUFFERS:
            for i, dice in enumerate(dices):
                self.register_buffer(f"{name}_{i}", dice.bn.get_buffer(name).clone())
        self.items, self.kinds = leaf(model.item_embedding.weight), leaf(model.cate_embedding.weight)

    def embed(self, pair: Tensor) -> Tensor:
        return torch.cat(
            [F.embedding(pair[..., i], w, 0) for i, w in enumerate((self.items, self.kinds))], -1
        )

    def layer(self, i: int, x: Tensor) -> Tensor:
        return x @ self.w[i][:, :-1].T + self.w[i][:, -1]

    def bend(self, i: int, x: Tensor) -> Tensor:
        return x.clamp(min=0) + self.slopes[i] * x.clamp(max=0)

    def dice(self, i: int, x: Tensor) -> Tensor:
        mean, var, seen = (self.get_buffer(f"{name}_{i}") for name in BUFFERS)
        seen += self.training
        eps = 1e-2 if self.fault == "deep_interest_second_dice_has_another_epsilon" and i == 1 else 1e-5
        x_p = F.batch_norm(x.flatten(0, 1), mean, var, training=self.training, eps=eps).sigmoid().view_as(x)
        return x * (self.slopes[i] + x_p - self.slopes[i] * x_p)

    def score(self, i: int, query: Tensor, keys: Tensor) -> Tensor:
        query = query.expand_as(keys)
        x = self.dice(2 * i, self.layer(3 * i, torch.cat([query, keys, query - keys, query * keys], 2)))
        return self.layer(3 * i + 2, self.dice(2 * i + 1, self.layer(3 * i + 1, x)))

    def run(self, i: int, xs: Tensor, pace: Tensor) -> Tensor:
        (w, u), states = self.cells[2 * i : 2 * i + 2], []
        h = xs.new_zeros(xs.shape[1], u.shape[1] - 1)
        for x, p in zip(xs, pace, strict=True):
            given, held = ((y @ v[:, :-1].T + v[:, -1]).chunk(3, 1) for y, v in ((x, w), (h, u)))
            new, stay = (given[2] + (given[0] + held[0]).sigmoid() * held[2]).tanh(), given[1] + held[1]
            part = p * (stay.sigmoid() if i else (-stay).sigmoid())
            states.append(h := h * (1 - part) + new * part)
        return torch.stack(states)

    def forward(self, target: Tensor, history: Tensor, sampled: Tensor, lengths: Tensor, dense: Tensor):
        pairs = target, history.transpose(0, 1), sampled.transpose(0, 1)
        query, keys, others = map(self.embed, pairs)
        held = (torch.arange(len(keys), device=lengths.device)[:, None] < lengths)[..., None]
        states = self.run(0, keys, held.to(keys)) * held
        early = self.fault == "deep_interest_auxiliary_click_is_of_the_same_step"
        told = torch.stack([keys[:-1] if early else keys[1:], others[1:]])
        told = self.layer(7, torch.cat([states[:-1].expand(2, -1, -1, -1), told], 3)).sigmoid()
        yes, no = self.layer(9, self.layer(8, told).sigmoid())
        missed = ((F.softplus(-yes) + F.softplus(no)) * held[1:]).mean(0)[:, 0]
        total, pooled = keys.sum(0), (self.score(0, query, keys) * held * keys).sum(0)
        score = self.score(1, self.bend(4, self.layer(6, query)), states)
        late = self.fault == "deep_interest_evolving_attention_masked_after_the_softmax"
        weight = score.masked_fill(~held & (not late), -torch.inf).softmax(0) * held
        final = self.run(1, states, weight)[-1]
        x = self.bend(5, self.layer(10, torch.cat([query, total, query * total, pooled, final, dense], 1)))
        fixed = self.fault == "deep_interest_last_slopes_are_constants"
        x = F.prelu(self.layer(11, x), self.slopes[6].detach() if fixed else self.slopes[6])
        return self.layer(12, x)[:, 0], missed


right(task, "deep_interest_by_parts", "split kernels, a cell by hand, a tree", InterestsByParts)
right(task, "deep_interest_flat", "biases as columns, time first, flat", FlatInterests)
SECOND, EVOLVING = "din_attention.local_att.dnn.activation_layers.1.bn", "interest_evolution.attention"
FIRST, CELL = f"{EVOLVING}.local_att.dnn.activation_layers.0.bn", "interest_evolution.interest_evolution.rnn"
wrong(
    task,
    InterestsByParts,
    deep_interest_padding_row_of_items_is_trained=("a padding index", "item_embedding", "weight gradient"),
    deep_interest_pooling_takes_key_minus_query=("a sign", "din_attention.local_att"),
    deep_interest_attentional_gru_resets_before_the_product=("another order", CELL),
    deep_interest_dice_by_the_batch_in_evaluation=("batch statistics in eval", FIRST, "eval"),
)
wrong(
    task,
    FlatInterests,
    deep_interest_second_dice_has_another_epsilon=("epsilon", SECOND),
    deep_interest_auxiliary_click_is_of_the_same_step=("a shift left out", "interest_extractor"),
    deep_interest_evolving_attention_masked_after_the_softmax=("a late mask", EVOLVING),
    deep_interest_last_slopes_are_constants=("detach", "dnn.activation_layers.1", "weight gradient"),
)
