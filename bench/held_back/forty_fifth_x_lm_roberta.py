"""Two ports of a small X-MOD: a tree with the time first, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_fifth_x_lm_roberta as xmod
from bench.held_back._fifth_vision import right
from bench.held_back._forty_fifth_x_lm_roberta import HEADS, PAD, PLACES, XmodRoberta
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fifth_x_lm_roberta", XmodRoberta, xmod.sentences, xmod.words_and_tags)


def joined(*layers: nn.Linear) -> nn.Parameter:
    """[in + 1, out] of layers side by side: the last row is the bias."""
    return leaf(torch.cat([torch.cat([x.weight, x.bias[:, None]], 1) for x in layers]).T)


def times(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[..., :-1, :] + w[..., -1:, :]


class Normed(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, True)
        return x * (x.square().mean(-1, True) + self.eps).rsqrt() * self.gain + self.offset


class Mixer(nn.Module):
    """Attention of [T, N, D] with the norm after it; all distances are scored first, then picked."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        inner, self.mirrored = attention.self, False
        self.ask = joined(inner.query, inner.key, inner.value)
        self.out, self.norm = joined(attention.output.dense), Normed(attention.output.LayerNorm)
        relative = inner.position_embedding_type == "relative_key"
        self.far = leaf(inner.distance_embedding.weight.T) if relative else None

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = times(x, self.ask).unflatten(2, (3, HEADS, -1)).permute(2, 1, 3, 0, 4)
        q = q / math.sqrt(q.shape[-1])
        scores = torch.einsum("nhqd,nhkd->nhqk", q, k)
        if self.far is not None:
            place = torch.arange(len(x), device=x.device)
            apart = place[:, None] - place
            apart = (-apart if self.mirrored else apart) + PLACES - 1
            scores = scores + (q @ self.far).gather(3, apart.expand_as(scores))
        mixed = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(3) @ v
        return self.norm(x + times(mixed.permute(2, 0, 1, 3).flatten(2), self.out))


class Tongues(nn.Module):
    """A bottleneck for each language: all are computed, one is kept by a mask."""

    def __init__(self, output: nn.Module):
        super().__init__()
        self.norm, self.cut = Normed(output.adapter_layer_norm), False
        adapters = output.adapter_modules.values()
        self.down = nn.ParameterList(joined(x.dense1) for x in adapters)
        self.up = nn.ParameterList(joined(x.dense2) for x in adapters)

    def forward(self, x: Tensor, language: Tensor) -> Tensor:
        y, found = self.norm(x), x.detach() if self.cut else x
        for i, (down, up) in enumerate(zip(self.down, self.up, strict=True)):
            found = found + times(F.gelu(times(y, down)), up) * (language == i)[:, None].to(x)
        return found


class Floor(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.mixer, output = Mixer(layer.attention), layer.output
        self.wide, self.narrow = joined(layer.intermediate.dense), joined(output.dense)
        self.tongues = Tongues(output) if output.adapter_layer_norm is not None else None
        self.norm = Normed(output.LayerNorm)

    def forward(self, x: Tensor, real: Tensor, language: Tensor) -> Tensor:
        x = self.mixer(x, real)
        x = x + times(F.gelu(times(x, self.wide)), self.narrow)
        return self.norm(x if self.tongues is None else self.tongues(x, language))


class RobertaOfFloors(Port):
    """Floors of mixers and tongues, the time before the batch."""

    def take(self, model: XmodRoberta) -> None:
        given, head = model.roberta.embeddings, model.lm_head
        self.words, self.kinds = leaf(given.word_embeddings.weight), leaf(given.token_type_embeddings.weight)
        self.places, self.start = leaf(given.position_embeddings.weight), Normed(given.LayerNorm)
        self.floors = nn.ModuleList(map(Floor, model.roberta.encoder.layer))
        self.floors[1].mixer.mirrored = self.fault == "x_lm_roberta_second_layer_takes_key_less_query"
        self.floors[2].tongues.cut = self.fault == "x_lm_roberta_last_adapter_detaches_its_residual"
        self.first = PAD if self.fault == "x_lm_roberta_positions_begin_at_the_padding_index" else PAD + 1
        self.guess, self.settle, self.offset = joined(head.dense), Normed(head.layer_norm), leaf(head.bias)
        self.curve = "tanh" if self.fault == "x_lm_roberta_head_has_the_gelu_of_tanh" else "none"
        self.tag = joined(model.classifier)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, lang_ids: Tensor):
        ids, full = input_ids.T, input_ids.T != PAD
        place = torch.where(full, full.cumsum(0) - 1 + self.first, PAD)
        x = F.embedding(place, self.places, PAD) + F.embedding(ids, self.words, PAD)
        x = self.start(x + self.kinds[token_type_ids.T])
        for floor in self.floors:
            x = floor(x, attention_mask.bool(), lang_ids)
        y = self.settle(F.gelu(times(x, self.guess), approximate=self.curve))
        return (y @ self.words.T + self.offset).transpose(0, 1), times(x, self.tag).transpose(0, 1)


class StackedRoberta(Port):
    """Stacks of the layers' weights with their biases as a last row, and a table of positions and types."""

    def take(self, model: XmodRoberta) -> None:
        given, head, layers = model.roberta.embeddings, model.lm_head, model.roberta.encoder.layer
        self.words = leaf(given.word_embeddings.weight)
        self.table = leaf(torch.cat([given.position_embeddings.weight, given.token_type_embeddings.weight]))
        inner, late = [layer.attention.self for layer in layers], layers[1:]
        self.heads = pile(joined(x) for a in inner for x in (a.query, a.key, a.value))
        self.square = pile(joined(x) for x in (*(y.attention.output.dense for y in layers), head.dense))
        self.wide = pile(joined(layer.intermediate.dense) for layer in layers)
        self.narrow = pile(joined(layer.output.dense) for layer in layers)
        self.far = pile(a.distance_embedding.weight for a in inner[1:])
        adapters = [a for layer in late for a in layer.output.adapter_modules.values()]
        self.down, self.up = (pile(joined(getattr(a, k)) for a in adapters) for k in ("dense1", "dense2"))
        norms = [n for y in layers for n in (y.attention.output.LayerNorm, y.output.LayerNorm)]
        norms += [layer.output.adapter_layer_norm for layer in late]
        self.norms = pile(torch.stack([*x.parameters()]) for x in (*norms, given.LayerNorm, head.layer_norm))
        self.offset, self.tag = leaf(head.bias), joined(model.classifier)

    def norm(self, x: Tensor, i: int) -> Tensor:
        unbiased = self.fault == "x_lm_roberta_first_norm_divides_by_one_less" and i == 0
        spread, middle = torch.var_mean(x, -1, correction=int(unbiased), keepdim=True)
        return torch.addcmul(self.norms[i, 1], (x - middle) / (spread + 1e-5).sqrt(), self.norms[i, 0])

    def attend(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (times(x, self.heads[3 * i + j]).unflatten(2, (HEADS, -1)) for j in range(3))
        scores, scale = torch.einsum("nqhd,nkhd->nhqk", q, k), q.shape[3] ** -0.5
        if i:
            long = x.shape[1]
            rows = [self.far[i - 1, PLACES - long + t : PLACES + t].flip(0) for t in range(long)]
            more = torch.stack([q[:, t] @ row.T for t, row in enumerate(rows)], 2)
            loud = self.fault == "x_lm_roberta_last_layer_adds_distances_unscaled" and i == 2
            scores = scores + (more / scale if loud else more)
        scores = (scores * scale).where(real[:, None, None], -1e30)
        return torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)

    def adapt(self, i: int, x: Tensor, language: Tensor) -> Tensor:
        if self.fault == "x_lm_roberta_default_language_in_evaluation" and i == 1 and not self.training:
            language = torch.zeros_like(language)
        at = 3 * (i - 1) + language
        return x + times(F.gelu(times(self.norm(x, 5 + i), self.down[at])), self.up[at])

    def forward(self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor, lang_ids: Tensor):
        full = (input_ids != PAD).long()
        x = F.embedding(PAD + full * full.cumsum(1), self.table, PAD) + self.table[PLACES + token_type_ids]
        x = self.norm(x + F.embedding(input_ids, self.words, PAD), 8)
        for i in range(3):
            x = self.norm(x + times(self.attend(i, x, attention_mask > 0), self.square[i]), 2 * i)
            x = x + times(F.gelu(times(x, self.wide[i])), self.narrow[i])
            x = self.norm(self.adapt(i, x, lang_ids) if i else x, 2 * i + 1)
        untied = self.fault == "x_lm_roberta_decoder_weight_is_not_trained"
        y = self.norm(F.gelu(times(x, self.square[3])), 9)
        return F.linear(y, self.words.detach() if untied else self.words, self.offset), times(x, self.tag)


SLOPES, LAYER = ("input gradient", "weight gradient"), "roberta.encoder.layer."
right(task, "x_lm_roberta_of_floors_with_time_first", "a tree, fused q k v", RobertaOfFloors)
right(task, "x_lm_roberta_of_stacked_weights", "packed stacks, gathered adapters", StackedRoberta)
wrong(
    task,
    RobertaOfFloors,
    x_lm_roberta_positions_begin_at_the_padding_index=("a count off by one", "roberta.embeddings"),
    x_lm_roberta_second_layer_takes_key_less_query=("a sign", LAYER + "1.attention.self"),
    x_lm_roberta_last_adapter_detaches_its_residual=("detach", LAYER + "2.output", SLOPES),
    x_lm_roberta_head_has_the_gelu_of_tanh=("another activation", "lm_head"),
)
wrong(
    task,
    StackedRoberta,
    x_lm_roberta_first_norm_divides_by_one_less=(
        "unbiased",
        LAYER + "0.attention.output.LayerNorm",
    ),
    x_lm_roberta_last_layer_adds_distances_unscaled=("a scale left out", LAYER + "2.attention.self"),
    x_lm_roberta_default_language_in_evaluation=("another branch in eval", LAYER + "1.output", "eval"),
    x_lm_roberta_decoder_weight_is_not_trained=("detach", "lm_head.decoder", "weight gradient"),
)
