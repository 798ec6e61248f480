"""Two ports of a small LUKE: a tree of two streams, sequence first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fifty_second_luke_entity import EPS, HEADS, HIDDEN, PAD, Luke, texts, three_losses
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_second_luke_entity", Luke, texts, three_losses)


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.matrix = leaf(torch.cat([x.weight for x in layers]).T)
        self.offset = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Mixed(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        a = layer.self
        self.of_words, self.of_mentions = Affine(a.query, a.w2e_query), Affine(a.e2w_query, a.e2e_query)
        self.told, self.out = Affine(a.key, a.value), Affine(layer.output.dense)
        self.norm, self.crossed = layer.output.LayerNorm, False

    def forward(self, streams: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
        told, new = [self.told(x).unflatten(-1, (2, HEADS, -1)).unbind(2) for x in streams], []
        asks = zip((self.of_words, self.of_mentions), streams, strict=True)
        asked = [f(x).unflatten(-1, (2, HEADS, -1)).unbind(2) for f, x in asks]
        if self.crossed:
            asked[1] = asked[1][::-1]
        for x, questions in zip(streams, asked, strict=True):
            scores = []
            for question, (key, _), mask in zip(questions, told, masks, strict=True):
                score = torch.einsum("qnhd,knhd->nhqk", question, key) / math.sqrt(key.shape[-1])
                scores.append(score.masked_fill(mask.T[:, None, None] == 0, -math.inf))
            total = torch.logsumexp(torch.cat(scores, 3), 3, keepdim=True)
            shares = [(score - total).exp() for score in scores]
            found = sum(torch.einsum("nhqk,knhd->qnhd", w, v) for w, (_, v) in zip(shares, told, strict=True))
            new.append(self.norm(x + self.out(found.flatten(2))))
        return new


class Inner(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.up, self.down = Affine(layer.intermediate.dense), Affine(layer.output.dense)
        self.norm, self.quick = layer.output.LayerNorm, False

    def forward(self, x: Tensor) -> Tensor:
        quick = self.quick and not self.training
        return self.norm(x + self.down(F.gelu(self.up(x), approximate="tanh" if quick else "none")))


class LukeOfStreams(Port):
    """Words and mentions stay apart; each is [length, batch, width]; attention is by a log-sum-exp."""

    def take(self, model: Luke) -> None:
        e, m, heads = model.luke.embeddings, model.luke.entity_embeddings, model.entity_predictions
        self.words, self.places = leaf(e.word_embeddings.weight), leaf(e.position_embeddings.weight)
        self.types, self.first = leaf(e.token_type_embeddings.weight), e.LayerNorm
        self.things, self.spots = leaf(m.entity_embeddings.weight), leaf(m.position_embeddings.weight)
        self.widen, self.other = leaf(m.entity_embedding_dense.weight.T), m.LayerNorm
        self.mix = nn.ModuleList(Mixed(x.attention) for x in model.luke.encoder.layer)
        self.inner = nn.ModuleList(Inner(x) for x in model.luke.encoder.layer)
        self.mix[1].crossed = self.fault == "luke_entity_second_layer_swaps_the_queries_of_entities"
        self.inner[2].quick = self.fault == "luke_entity_third_layer_gelu_by_tanh_in_evaluation"
        lm = model.lm_head
        self.word_head = nn.Sequential(Affine(lm.dense), nn.GELU(), lm.layer_norm)
        self.thing_head = nn.ModuleList([Affine(heads.dense), heads.LayerNorm])
        self.word_bias, self.thing_bias = leaf(model.lm_head.decoder.bias), leaf(heads.bias)
        self.label = Affine(model.classifier)

    def mentions(self, ids: Tensor, places: Tensor) -> Tensor:
        there = (places >= 0).to(self.spots)
        rows = F.embedding(places.relu(), self.spots)
        if self.fault != "luke_entity_padded_positions_add_the_first_row":
            rows = rows * there[..., None]
        mean = rows.sum(2) / there.sum(2, keepdim=True).clamp(min=1e-7)
        return self.other(F.embedding(ids, self.things, 0) @ self.widen + mean)

    def forward(self, ids, types, seen, things, places, used, start, end) -> tuple[Tensor, ...]:
        ids, types, seen, things = ids.T, types.T, seen.T, things.T
        real = (ids != PAD).long()
        order = torch.where(real > 0, real.cumsum(0) + PAD, PAD)
        x = F.embedding(ids, self.words, PAD) + F.embedding(order, self.places, PAD)
        x = x + self.types[0] + types[..., None] * (self.types[1] - self.types[0])
        streams = [self.first(x), self.mentions(things, places.transpose(0, 1))]
        for mix, inner in zip(self.mix, self.inner, strict=True):
            streams = [inner(x) for x in mix(streams, [seen, used.T])]
        (x, y), column = streams, torch.arange(len(places))
        spans = self.label(torch.cat([x[start.T, column], x[end.T, column], y], 2))
        z, norm = self.thing_head[0](y), self.thing_head[1]
        late = self.fault == "luke_entity_prediction_norm_before_gelu"
        z = F.gelu(norm(z)) if late else norm(F.gelu(z))
        words, things = self.word_head(x) @ self.words.T, z @ self.things.T
        outputs = words + self.word_bias, things + self.thing_bias, spans
        return tuple(x.transpose(0, 1) for x in outputs)


def rows(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.t().reshape(-1, len(layer.bias)), layer.bias[None]])


class StackedLuke(Port):
    """Stacks by layer with the biases as last rows; all six products of both streams in one."""

    def take(self, model: Luke) -> None:
        luke, self.w = model.luke, nn.ParameterDict()
        e, m, layers, w = luke.embeddings, luke.entity_embeddings, luke.encoder.layer, self.w
        names = ("query", "w2e_query", "e2w_query", "e2e_query", "key", "value")
        w["asks"] = pile(torch.stack([rows(getattr(x.attention.self, n)) for n in names]) for x in layers)
        w["out"] = pile(rows(x.attention.output.dense) for x in layers)
        w["up"] = pile(rows(x.intermediate.dense) for x in layers)
        w["down"] = pile(rows(x.output.dense) for x in layers)
        norms = [n for x in layers for n in (x.attention.output.LayerNorm, x.output.LayerNorm)]
        w["norms"] = pile(map(rows, [e.LayerNorm, m.LayerNorm, *norms, model.lm_head.layer_norm]))
        w["words"], w["things"] = leaf(e.word_embeddings.weight), leaf(m.entity_embeddings.weight)
        w["places"] = pile([e.position_embeddings.weight, m.position_embeddings.weight])
        w["types"], w["widen"] = leaf(e.token_type_embeddings.weight), leaf(m.entity_embedding_dense.weight)
        head = model.entity_predictions
        w["lm"], w["thing"] = leaf(rows(model.lm_head.dense)), leaf(rows(head.dense))
        w["label"] = leaf(rows(model.classifier))
        w["thing_norm"] = leaf(rows(head.LayerNorm))
        w["ends"] = leaf(torch.cat([model.lm_head.decoder.bias, head.bias]))

    def by(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.pad(x, (0, 1), value=1.0) @ rows

    def norm(self, x: Tensor, w: Tensor, still: bool = False) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        size = (x.square().mean(-1, keepdim=True) + EPS).sqrt()
        return torch.addcmul(w[1], x / (size.detach() if still else size), w[0])

    def layer(self, i: int, x: Tensor, size: int, mask: Tensor) -> Tensor:
        w, is_word = self.w, (torch.arange(x.shape[1]) < size)[:, None]
        products = torch.einsum("nli,kio->knlo", F.pad(x, (0, 1), value=1.0), w["asks"][i])
        asks = [torch.where(is_word, products[k], products[k + 2]) for k in (0, 1)]
        a, b, key, value = torch.stack([*asks, *products[4:]]).unflatten(3, (HEADS, -1)).transpose(2, 3)
        scores = torch.where(is_word[:, 0], a @ key.mT, b @ key.mT) * (HIDDEN / HEADS) ** -0.5
        found = torch.where(mask, scores, -math.inf).softmax(3) @ value
        x = self.norm(x + self.by(found.transpose(1, 2).flatten(2), w["out"][i]), w["norms"][2 + 2 * i])
        y = self.by(F.gelu(self.by(x, w["up"][i])), w["down"][i])
        still = i == 1 and self.fault == "luke_entity_second_output_norm_detaches_its_deviation"
        return self.norm(x + y, w["norms"][3 + 2 * i], still)

    def forward(self, ids, types, seen, things, places, used, start, end) -> tuple[Tensor, ...]:
        w, norms, fault, size = self.w, self.w["norms"], self.fault, ids.shape[1]
        real = (ids != PAD).long()
        shift = 1 if fault == "luke_entity_word_positions_start_at_the_padding_row" else 0
        order = (real.cumsum(1) - shift) * real + PAD
        x = F.embedding(ids, w["words"], PAD) + F.embedding(order, w["places"][0], PAD) + w["types"][types]
        counts = F.one_hot(places + 1, w["places"].shape[1] + 1)[..., 1:].sum(2).to(x)
        mean = (counts / counts.sum(2, keepdim=True).clamp(min=1)) @ w["places"][1]
        y = F.embedding(things, w["things"], 0) @ w["widen"].T + mean
        used = torch.ones_like(used) if fault == "luke_entity_mask_forgets_the_entities" else used
        x = torch.cat([self.norm(x, norms[0]), self.norm(y, norms[1])], 1)
        for i in range(len(w["out"])):
            x = self.layer(i, x, size, torch.cat([seen, used], 1).bool()[:, None, None])
        x, y = x[:, :size], x[:, size:]
        end = (end + 1).clamp(max=size - 1) if fault == "luke_entity_span_ends_one_word_late" else end
        first, last = (F.one_hot(k, size).to(x) @ x for k in (start, end))
        words = self.norm(F.gelu(self.by(x, w["lm"])), norms[-1]) @ w["words"].T
        found = self.norm(F.gelu(self.by(y, w["thing"])), w["thing_norm"]) @ w["things"].T
        a, b = w["ends"].split([words.shape[2], found.shape[2]])
        return words + a, found + b, self.by(torch.cat([first, last, y], 2), w["label"])


SLOPES, LAYER = ("input gradient", "weight gradient"), "luke.encoder.layer"
ACT = f"{LAYER}.2.intermediate.intermediate_act_fn", f"{LAYER}.2.intermediate"
DETACHED = "detach", f"{LAYER}.1.output.LayerNorm", SLOPES
right(task, "luke_entity_of_streams_sequence_first", "a tree, two streams, fused queries", LukeOfStreams)
right(task, "luke_entity_of_stacked_weights", "stacks with biases as rows, one product", StackedLuke)
wrong(
    task,
    LukeOfStreams,
    luke_entity_padded_positions_add_the_first_row=("a mask left out", "luke.entity_embeddings"),
    luke_entity_second_layer_swaps_the_queries_of_entities=("swapped weights", f"{LAYER}.1.attention.self"),
    luke_entity_third_layer_gelu_by_tanh_in_evaluation=("an approximation in eval", ACT, "eval"),
    luke_entity_prediction_norm_before_gelu=("another order", "entity_predictions"),
)
wrong(
    task,
    StackedLuke,
    luke_entity_word_positions_start_at_the_padding_row=("an offset off by one", "luke.embeddings"),
    luke_entity_mask_forgets_the_entities=("a mask left out", "luke"),
    luke_entity_second_output_norm_detaches_its_deviation=DETACHED,
    luke_entity_span_ends_one_word_late=("an end off by one", ""),
)
