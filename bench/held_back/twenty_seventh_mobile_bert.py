"""Two ports of a small MobileBERT: a tree with the features first, and one class of transposed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_seventh_mobile_bert import EMBEDDING, HEADS, PAD, both_tasks, sentences
from bench.held_back._twenty_seventh_mobile_bert import MobileBertForPreTraining as MobileBert

task = few("twenty_seventh_mobile_bert", MobileBert, sentences, both_tasks)


class Map(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.matrix = leaf(torch.cat([x.dense.weight for x in layers]))
        columns = zip(*((x.dense.bias, x.LayerNorm.weight, x.LayerNorm.bias) for x in layers), strict=True)
        self.start, self.scale, self.shift = (leaf(torch.cat(x)[:, None]) for x in columns)
        self.hasty = False

    def forward(self, x: Tensor, more: Tensor | float = 0.0) -> Tensor:
        y = self.matrix @ x + self.start
        if self.hasty:
            return y * self.scale + self.shift + more
        return (y + more) * self.scale + self.shift


class Reading(nn.Module):
    def __init__(self, front: nn.Module):
        super().__init__()
        kernel = front.embedding_transformation.weight.unflatten(1, (3, -1))
        self.kernel, self.start = leaf(kernel.flip(1).mT), leaf(front.embedding_transformation.bias)
        self.words = leaf(front.word_embeddings.weight)
        self.places = leaf(front.position_embeddings.weight.T)
        self.kinds = leaf(front.token_type_embeddings.weight)
        self.scale, self.shift = (leaf(x[:, None]) for x in (front.LayerNorm.weight, front.LayerNorm.bias))

    def forward(self, ids: Tensor, kinds: Tensor) -> Tensor:
        x = F.embedding(ids, self.words, self.idle).mT
        x = F.conv1d(x, self.kernel, self.start, padding=1) + self.places[:, : ids.shape[1]]
        return (x + self.kinds[kinds].mT) * self.scale + self.shift


class Looking(nn.Module):
    def __init__(self, part: nn.Module):
        super().__init__()
        own = part.self
        self.pair = pile(torch.cat([x.weight, x.bias[:, None]], 1) for x in (own.query, own.key))
        self.value, self.value_start = leaf(own.value.weight), leaf(own.value.bias[:, None])
        self.out, self.astray, self.open = Map(part.output), False, False

    def forward(self, x: Tensor, shared: Tensor, kept: Tensor, real: Tensor) -> Tensor:
        sources = torch.stack([kept if self.astray else shared, shared], 1)
        query, key = (self.pair[..., :-1] @ sources + self.pair[..., -1:]).unflatten(2, (HEADS, -1)).unbind(1)
        value = (self.value @ x + self.value_start).unflatten(1, (HEADS, -1))
        scores = torch.einsum("nhdq,nhdk->nhqk", query * query.shape[2] ** -0.5, key)
        if not (self.open and not self.training):
            scores = scores.masked_fill(~real[:, None, None], float("-inf"))
        return self.out(torch.einsum("nhqk,nhdk->nhdq", scores.softmax(3), value).flatten(1, 2), kept)


class Thin(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.narrow = Map(layer.bottleneck.attention, layer.bottleneck.input)
        self.look, self.widen = Looking(layer.attention), Map(layer.output.bottleneck)
        pairs = [(x.intermediate.dense, x.output) for x in (*layer.ffn, layer)]
        self.up = nn.ParameterList(leaf(torch.cat([x.weight, x.bias[:, None]], 1)) for x, _ in pairs)
        self.down = nn.ModuleList(Map(x) for _, x in pairs)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        y = self.look(x, *self.narrow(x).chunk(2, 1), real)
        for up, down in zip(self.up, self.down, strict=True):
            y = down((up[:, :-1] @ y + up[:, -1:]).relu(), y)
        return self.widen(y, x)


class FeaturesFirst(Port):
    """A tree over [N, D, T]; the three neighbours are a convolution, both bottlenecks one map."""

    def take(self, model: MobileBert) -> None:
        body, words, fault = model.mobilebert, model.cls["predictions"], self.fault
        self.read, self.layers = Reading(body.embeddings), nn.ModuleList(map(Thin, body.encoder["layer"]))
        self.turn = nn.Sequential(words.transform.dense, nn.ReLU(), words.transform.LayerNorm)
        self.extra, self.bias = leaf(words.dense.weight.T), leaf(words.bias)
        self.sum_up = nn.Sequential(body.pooler.dense, nn.Tanh(), model.cls["seq_relationship"])
        self.read.idle = None if fault == "mobile_bert_lookups_of_padding_train_its_row" else PAD
        self.layers[0].look.astray = fault == "mobile_bert_first_query_of_the_input_bottleneck"
        self.layers[1].look.open = fault == "mobile_bert_second_layer_sees_padding_in_evaluation"
        self.layers[2].widen.hasty = fault == "mobile_bert_last_widening_normed_before_the_residual"

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict:
        x, real = self.read(input_ids, token_type_ids), attention_mask.bool()
        for layer in self.layers:
            x = layer(x, real)
        x = x.mT
        tied, rest = self.turn(x).tensor_split([EMBEDDING], 2)
        words = F.linear(tied, self.read.words) + F.linear(rest, self.extra, self.bias)
        return {"prediction_logits": words, "seq_relationship_logits": self.sum_up(x[:, 0])}


def sheet(part: nn.Module, name: str = "dense") -> Tensor:
    """The transposed weight, the bias and, if any, the norm's weight and bias, as rows."""
    dense, norm = getattr(part, name, part), getattr(part, "LayerNorm", None)
    rows = [dense.bias] if norm is None else [dense.bias, norm.weight, norm.bias]
    return torch.cat([dense.weight.T, torch.stack(rows)])


def times(x: Tensor, rows: Tensor, more: Tensor | float = 0.0) -> Tensor:
    """A product with a sheet; where that has rows for a norm, of the sum with ``more``."""
    width = x.shape[-1]
    y = x @ rows[:width] + rows[width]
    return y if len(rows) == width + 1 else (y + more) * rows[-2] + rows[-1]


class Sheets(Port):
    """Sheets stacked by layer, over [T, N, D]; head by head, and sums of products for what is joined."""

    def take(self, model: MobileBert) -> None:
        body, words = model.mobilebert, model.cls["predictions"]
        front, layers = body.embeddings, body.encoder["layer"]
        looks, sides = [x.attention.self for x in layers], [x.bottleneck for x in layers]
        self.words, self.extra = leaf(words.decoder.weight.T), leaf(words.dense.weight)
        self.tables = leaf(torch.cat([front.token_type_embeddings.weight, front.position_embeddings.weight]))
        self.near = leaf(sheet(front, "embedding_transformation"))
        self.narrow = pile(torch.stack([sheet(x.input), sheet(x.attention)]) for x in sides)
        self.ask = pile(torch.stack([sheet(x.query), sheet(x.key)]) for x in looks)
        self.value = pile(sheet(x.value) for x in looks)
        self.mix = pile(sheet(x.attention.output) for x in layers)
        self.wide = pile(sheet(x.output.bottleneck) for x in layers)
        feeds = [[*x.ffn, x] for x in layers]
        self.up = pile(torch.stack([sheet(y.intermediate) for y in x]) for x in feeds)
        self.down = pile(torch.stack([sheet(y.output) for y in x]) for x in feeds)
        self.turn, self.bias = leaf(sheet(words.transform)), leaf(words.bias)
        self.pool, self.relate = leaf(sheet(body.pooler)), leaf(sheet(model.cls["seq_relationship"]))

    def embed(self, ids: Tensor, kinds: Tensor) -> Tensor:
        x, rows = F.embedding(ids, self.words.T, PAD), self.near.split(EMBEDDING)
        around = float(self.fault == "mobile_bert_neighbours_wrap_round_the_ends")
        long = torch.cat([around * x[-1:], x, around * x[:1]])
        x = sum(long[2 - i : 2 - i + len(ids)] @ rows[i] for i in range(3))
        x = x + self.tables[kinds] + self.tables[2 : 2 + len(ids), None] + rows[3][0]
        return x * rows[3][1] + rows[3][2]

    def attend(self, i: int, x: Tensor, shared: Tensor, real: Tensor) -> Tensor:
        q, k, v = times(shared, self.ask[i, 0]), times(shared, self.ask[i, 1]), times(x, self.value[i])
        found = []
        for a, b, c in zip(*(y.chunk(HEADS, 2) for y in (q, k, v)), strict=True):
            scores = torch.einsum("qnd,knd->nqk", a, b) / a.shape[2] ** 0.5
            odds = (scores - scores.detach().amax(2, True)).exp() * real.T[:, None]
            found.append(torch.einsum("nqk,knd->qnd", odds / odds.sum(2, True), c))
        return torch.cat(found, 2)

    def layer(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        kept, shared = (times(x, rows) for rows in self.narrow[i])
        y = times(self.attend(i, x, shared, real), self.mix[i], kept)
        for j, (up, down) in enumerate(zip(self.up[i], self.down[i], strict=True)):
            smooth = self.fault == "mobile_bert_fifth_network_with_gelu" and i == j == 1
            y = times((F.gelu if smooth else F.relu)(times(y, up)), down, y)
        return times(y, self.wide[i], x)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor) -> dict:
        x, real = self.embed(input_ids.T, token_type_ids.T), attention_mask.T
        for i in range(len(self.mix)):
            x = self.layer(i, x, real)
        y = times(x, self.turn[:-2]).relu()
        y = y - y.mean(2, True)
        eps = 1e-3 if self.fault == "mobile_bert_head_norm_with_the_epsilon_of_keras" else 1e-12
        y = y * (y.square().mean(2, True) + eps).rsqrt() * self.turn[-2] + self.turn[-1]
        swapped = self.fault == "mobile_bert_extra_matrix_above_the_tied_one"
        pieces = (self.extra, self.words) if swapped else (self.words, self.extra)
        words = torch.einsum("tnd,dv->ntv", y, torch.cat(pieces)) + self.bias
        pooled = times(x[0], self.pool).tanh()
        return {"prediction_logits": words, "seq_relationship_logits": times(pooled, self.relate)}


LAYER, PLACE = "mobilebert.encoder.layer.", "mobilebert.embeddings"
WORDS, ACT = PLACE + ".word_embeddings", LAYER + "1.ffn.1.intermediate.intermediate_act_fn"
right(task, "mobile_bert_with_the_features_first", "a tree, a convolution, fused and split", FeaturesFirst)
right(task, "mobile_bert_of_transposed_sheets", "packed stacks, head by head, time first", Sheets)
wrong(
    task,
    FeaturesFirst,
    mobile_bert_lookups_of_padding_train_its_row=("an index not ignored", WORDS, "weight gradient"),
    mobile_bert_first_query_of_the_input_bottleneck=("another input", (LAYER + "0.bottleneck", LAYER + "0")),
    mobile_bert_second_layer_sees_padding_in_evaluation=("no mask", LAYER + "1.attention.self", "eval"),
    mobile_bert_last_widening_normed_before_the_residual=("another order", LAYER + "2.output.bottleneck"),
)
wrong(
    task,
    Sheets,
    mobile_bert_neighbours_wrap_round_the_ends=("another padding", PLACE),
    mobile_bert_fifth_network_with_gelu=("another activation", ACT),
    mobile_bert_head_norm_with_the_epsilon_of_keras=("epsilon", "cls.predictions.transform.LayerNorm"),
    mobile_bert_extra_matrix_above_the_tied_one=("another order", "cls.predictions"),
)
