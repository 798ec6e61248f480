"""Two ports of a mixture of adapters: a tree that merges them into weights, and one class of packed rows."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _forty_eighth_lora_mixture as tuned
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_eighth_lora_mixture", tuned.PeftMixedModel, tuned.texts, tuned.part_of_entropy)
HEADS, WIDTH, PROMPTS, PREFIX = tuned.HEADS, tuned.WIDTH, tuned.PROMPTS, tuned.PREFIX


def held(values: Tensor) -> nn.Parameter:
    return leaf(values).requires_grad_(False)


def both(norm: nn.LayerNorm) -> nn.Parameter:
    return pile([norm.weight, norm.bias])


def normed(x: Tensor, weight: Tensor) -> Tensor:
    variance, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - mean) / (variance + tuned.EPS).sqrt() * weight[0] + weight[1]


class Merged(nn.Module):
    """A product of rows by one matrix, to which the product of the thin ones is added before."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        base = getattr(layer, "base_layer", layer)
        self.matrix, self.offset = held(base.weight.T), held(base.bias)
        self.rates, self.length, self.steady = None, None, True
        if isinstance(layer, tuned.LoraLinear):
            self.down, self.up = (leaf(x["default"].weight.T) for x in (layer.lora_A, layer.lora_B))
            self.rates = 2 * [layer.scaling["default"]]
            self.length = leaf(layer.lora_magnitude_vector["default"]) if layer.use_dora else None

    def forward(self, x: Tensor) -> Tensor:
        matrix = self.matrix
        if self.rates is not None:
            matrix = matrix + self.rates[self.training] * self.down @ self.up
        if self.length is not None:
            size = matrix.square().sum(0).sqrt()
            matrix = matrix / (size.detach() if self.steady else size) * self.length
        return x @ matrix + self.offset


class Stage(nn.Module):
    """Attention and feed-forward; a table of past keys and values, if there is one, stands in front."""

    def __init__(self, layer: nn.Module, past: Tensor | None):
        super().__init__()
        own, out = layer.attention.self, layer.attention.output
        self.ask, self.tell, self.give = map(Merged, (own.query, own.key, own.value))
        self.join, self.norm, self.end = Merged(out.dense), both(out.LayerNorm), both(layer.output.LayerNorm)
        self.wide, self.back = Merged(layer.intermediate[0]), Merged(layer.output.dense)
        self.past = None if past is None else leaf(past.unflatten(1, (2, HEADS, -1)))
        self.key_gain, self.turned = leaf(own.key.ia3_l["default"].view(HEADS, -1)), False
        self.wide_gain = leaf(layer.output.dense.ia3_l["default"][0])

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        ask, tell, give = (part(x).unflatten(2, (HEADS, -1)) for part in (self.ask, self.tell, self.give))
        tell = tell * (self.key_gain.T.reshape(HEADS, -1) if self.turned else self.key_gain)
        if self.past is not None:
            early, given = self.past.expand(len(x), -1, -1, -1, -1).unbind(2)
            tell, give = torch.cat([early, tell], 1), torch.cat([given, give], 1)
            real = F.pad(real, (PREFIX, 0), value=True)
        scores = torch.einsum("nqhd,nkhd->nhqk", ask * ask.shape[-1] ** -0.5, tell)
        rate = scores.masked_fill(~real[:, None, None], -torch.inf).softmax(-1)
        x = normed(x + self.join(torch.einsum("nhqk,nkhd->nqhd", rate, give).flatten(2)), self.norm)
        return normed(x + self.back(self.wide_gain * F.gelu(self.wide(x))), self.end)


class MergedMixture(Port):
    """Stages of merged weights; the prefix lives in the stage that reads it."""

    def take(self, model: tuned.PeftMixedModel) -> None:
        base, prompts, rooms = model.base_model, model.prompt_encoder, model.base_model.embeddings
        self.words, self.places = held(rooms.word_embeddings.weight), held(rooms.position_embeddings.weight)
        self.front, self.norm = leaf(prompts["prompt"].weight), both(rooms.LayerNorm)
        pasts = None, prompts["prefix"].embedding.weight, None
        self.stages = nn.ModuleList(map(Stage, base.encoder.layer, pasts))
        head = base.classifier.modules_to_save["default"]
        self.head, self.head_offset = leaf(head.weight.T), leaf(head.bias)
        self.stages[0].turned = self.fault == "lora_mixture_key_vector_laid_out_heads_last"
        self.stages[2].join.steady = self.fault != "lora_mixture_dora_norm_not_detached"
        if self.fault == "lora_mixture_value_merged_at_plain_scale_in_eval":
            self.stages[1].give.rates[False] = tuned.ALPHA / tuned.RANKS[1]

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        start = 0 if self.fault == "lora_mixture_words_count_positions_from_zero" else PROMPTS
        front = (self.front + self.places[:PROMPTS]).expand(len(input_ids), -1, -1)
        words = self.words[input_ids] + self.places[start : start + input_ids.shape[1]]
        x = normed(torch.cat([front, words], 1), self.norm)
        real = F.pad(attention_mask.bool(), (PROMPTS, 0), value=True)
        for stage in self.stages:
            x = stage(x, real)
        last = (PROMPTS - 1 + attention_mask.sum(1))[:, None, None].expand(-1, 1, WIDTH)
        return x.gather(1, last).squeeze(1) @ self.head + self.head_offset


def rows(layer: nn.Module) -> Tensor:
    """A row for each output: its weights, then its bias; of the frozen layer within, if it is wrapped."""
    base = getattr(layer, "base_layer", layer)
    return torch.cat([base.weight, base.bias[:, None]], 1)


def thin(layer: tuned.LoraLinear) -> Tensor:
    return torch.cat([layer.lora_A["default"].weight, layer.lora_B["default"].weight.T], 1)


class PackedMixture(Port):
    """Frozen weights in stacks, what is trained in a few packed ones, the thin matrices end to end."""

    def take(self, model: tuned.PeftMixedModel) -> None:
        layers, rooms = model.base_model.encoder.layer, model.base_model.embeddings
        inner = [y for x in layers for y in (*x.attention.self.children(), x.attention.output.dense)]
        pairs, backs = [x for x in inner if hasattr(x, "lora_A")], [x.output.dense for x in layers]
        self.square, self.back = held(pile(map(rows, inner))), held(pile(map(rows, backs)))
        self.wide = held(pile(rows(x.intermediate[0]) for x in layers))
        self.rates, self.ranks = [x.scaling["default"] for x in pairs], [len(thin(x)) for x in pairs]
        self.pairs = leaf(torch.cat([*map(thin, pairs)]))
        self.length = leaf(inner[-1].lora_magnitude_vector["default"])
        self.key_gain = pile(x.ia3_l["default"][0] for x in inner[1::4])
        self.wide_gain = pile(x.ia3_l["default"][0] for x in backs)
        norms = [rooms, *(y for x in layers for y in (x.attention.output, x.output))]
        self.norms = pile(both(x.LayerNorm) for x in norms)
        self.table = held(torch.cat([rooms.word_embeddings.weight, rooms.position_embeddings.weight]))
        past = model.prompt_encoder["prefix"].embedding.weight.chunk(2, 1)
        self.front = leaf(torch.cat([model.prompt_encoder["prompt"].weight, *past]))
        self.head = leaf(rows(model.base_model.classifier.modules_to_save["default"]))

    def affine(self, x: Tensor, rows: Tensor) -> Tensor:
        return F.linear(x, rows[:, :-1], rows[:, -1])

    def norm(self, i: int, x: Tensor) -> Tensor:
        frozen = self.fault == "lora_mixture_last_norm_frozen_with_its_layer" and i == 6
        weight = self.norms[i].detach() if frozen else self.norms[i]
        return F.layer_norm(x, (WIDTH,), eps=tuned.EPS) * weight[0] + weight[1]

    def update(self, i: int, x: Tensor) -> Tensor:
        down, up = self.pairs.split(self.ranks)[i].split(WIDTH, 1)
        return self.rates[i] * (x @ down.T) @ up

    def strong(self, x: Tensor) -> Tensor:
        weight, pair, rate = self.square[-1, :, :-1], self.pairs[-self.ranks[-1] :], self.rates[-1]
        counted = 1 if self.fault == "lora_mixture_dora_norm_of_unscaled_update" else rate
        size = (weight + counted * pair[:, WIDTH:].T @ pair[:, :WIDTH]).detach().norm(dim=1)
        return (x @ weight.T + self.update(-1, x)) * self.length / size + self.square[-1, :, -1]

    def layer(self, i: int, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = (self.affine(x, each) for each in self.square[4 * i : 4 * i + 3])
        q, k, v = q + self.update(2 * i, x), k * self.key_gain[i], v + self.update(2 * i + 1, x)
        if i == 1:
            early, given = self.front[PROMPTS:].repeat(len(x), 1, 1).chunk(2, 1)
            k, v = torch.cat([early, k], 1), torch.cat([given, v], 1)
            late = self.fault == "lora_mixture_prefix_mask_put_behind"
            real = F.pad(real, (0, PREFIX) if late else (PREFIX, 0), value=True)
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, real[:, None, None]).transpose(1, 2).flatten(2)
        x = self.norm(2 * i + 1, x + (self.strong(y) if i == 2 else self.affine(y, self.square[4 * i + 3])))
        y = F.gelu(self.affine(x, self.wide[i])) * self.wide_gain[i]
        return self.norm(2 * i + 2, x + self.affine(y, self.back[i]))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        front = self.front[:PROMPTS].repeat(len(input_ids), 1, 1)
        x = torch.cat([front, F.embedding(input_ids, self.table)], 1)
        x, real = (
            self.norm(0, x + self.table[-x.shape[1] :]),
            F.pad(attention_mask, (PROMPTS, 0), value=1) > 0,
        )
        for i in range(3):
            x = self.layer(i, x, real)
        shown = attention_mask if self.fault == "lora_mixture_last_word_sought_without_prompts" else real
        return self.affine(x[range(len(x)), shown.sum(1) - 1], self.head)


LAYER = "base_model.encoder.layer."
right(task, "lora_mixture_of_merged_weights", "a tree, adapters merged into the weights", MergedMixture)
right(task, "lora_mixture_of_packed_rows", "packed stacks, sums of thin products", PackedMixture)
wrong(
    task,
    MergedMixture,
    lora_mixture_words_count_positions_from_zero=("positions off", "base_model.embeddings"),
    lora_mixture_key_vector_laid_out_heads_last=("another axis order", LAYER + "0.attention.self.key"),
    lora_mixture_value_merged_at_plain_scale_in_eval=("scale", LAYER + "1.attention.self.value", "eval"),
    lora_mixture_dora_norm_not_detached=("no detach", LAYER + "2.attention.output.dense", "weight gradient"),
)
wrong(
    task,
    PackedMixture,
    lora_mixture_prefix_mask_put_behind=("a mask shifted", LAYER + "1.attention.self"),
    lora_mixture_dora_norm_of_unscaled_update=("a factor left out", LAYER + "2.attention.output.dense"),
    lora_mixture_last_word_sought_without_prompts=("an index off", "base_model"),
    lora_mixture_last_norm_frozen_with_its_layer=("detach", LAYER + "2.output.LayerNorm", "weight gradient"),
)
