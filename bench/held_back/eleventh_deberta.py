"""Ports of a model with disentangled attention: a tree of blocks, and one module over stacked weights."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eleventh_deberta import EPS, HEADS, WIDTH, DebertaV2ForMaskedLM, counted_words, surprise
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

guessed = few("eleventh_deberta", DebertaV2ForMaskedLM, counted_words, surprise)
NEAR, FAR, SPAN = 4, 10, 8  # offsets that stay as they are, the end of the logarithm, rows to each side
WORDS, TABLE, BESIDE, GUESS = range(6, 10)  # the stacked norms after two in each of the three layers
ENCODER, MIDDLE = "deberta.encoder.", "deberta.encoder.layer.1."
CONV = ENCODER + "conv"
BENT = (MIDDLE + "intermediate", MIDDLE + "intermediate.act")
TIED = ("deberta.embeddings.word_embeddings", "lm_predictions.lm_head.decoder")


def joined(*layers: nn.Module) -> nn.Linear:
    """One product that gives what these layers give, one after the other; windows count as wide inputs."""
    weight = torch.cat([layer.weight.flatten(1) for layer in layers])
    product = nn.Linear(weight.shape[1], weight.shape[0])
    product.weight, product.bias = leaf(weight), leaf(torch.cat([layer.bias for layer in layers]))
    return product


def rows_by_pair(spot: Tensor, down: bool = False) -> Tensor:
    """The row of the table of relative positions for each pair of words, the one that asks first."""
    offset = spot[:, None] - spot
    steps = (offset.abs().clamp(min=NEAR).double() / NEAR).log() / math.log(FAR / NEAR) * (NEAR - 1)
    steps = (steps + 1e-9).floor() if down else (steps - 1e-9).ceil()
    bucket = torch.where(offset.abs() > NEAR, offset.sign() * (NEAR + steps.long()), offset)
    return (bucket + SPAN).clamp(0, 2 * SPAN - 1)


class Attend(nn.Module):
    def __init__(self, attention: nn.Module, number: int, fault: str):
        super().__init__()
        own, self.number, self.fault = attention.self, number, fault
        self.ask, self.read = joined(own.query_proj), joined(own.key_proj, own.value_proj)
        self.place = None if own.share_att_key else joined(own.pos_key_proj, own.pos_query_proj)
        self.out, self.norm = joined(attention.output.dense), deepcopy(attention.output.LayerNorm)

    def places(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and queries of the places, by the products of the words where these are shared."""
        if self.place is not None:
            return self.place(table).chunk(2, -1)
        keys = self.read(table)[:, :WIDTH]
        return keys, keys if self.fault == "shared_layer_asks_places_by_its_keys" else self.ask(table)

    def forward(self, asking: Tensor, x: Tensor, real: Tensor, table: Tensor, rows: Tensor) -> Tensor:
        k, v = (y.unflatten(2, (HEADS, -1)) for y in self.read(x).chunk(2, 2))
        q = self.ask(asking).unflatten(2, (HEADS, -1))
        place_k, place_q = (y.unflatten(1, (HEADS, -1)) for y in self.places(table))
        mirrored = self.fault == "first_layer_mirrors_what_keys_ask_of_places" and self.number == 0
        back, shape = rows if mirrored else rows.T, (len(q), HEADS, -1, -1)
        to_place = torch.einsum("nqhd,rhd->nhqr", q, place_k).gather(3, rows.expand(shape))
        from_place = torch.einsum("nkhd,rhd->nhkr", k, place_q).gather(3, back.expand(shape)).mT
        scores = torch.einsum("nqhd,nkhd->nhqk", q, k) + to_place + from_place
        scores = (scores / (3 * q.shape[-1]) ** 0.5).masked_fill(~real[:, None, None], -torch.inf)
        mixed = torch.einsum("nhqk,nkhd->nqhd", scores.softmax(3), v).flatten(2) * real[..., None]
        return self.norm(asking + self.out(mixed))


class Block(nn.Module):
    def __init__(self, layer: nn.Module, number: int, fault: str):
        super().__init__()
        self.attend, self.norm = Attend(layer.attention, number, fault), deepcopy(layer.output.LayerNorm)
        self.feed = nn.Sequential(joined(layer.intermediate.dense), nn.GELU(), joined(layer.output.dense))

    def forward(self, asking: Tensor, *rest: Tensor) -> Tensor:
        x = self.attend(asking, *rest)
        return self.norm(x + self.feed(x))


class Beside(nn.Module):
    def __init__(self, conv: nn.Module):
        super().__init__()
        self.mix, self.norm = joined(conv.conv), deepcopy(conv.LayerNorm)

    def forward(self, x: Tensor, y: Tensor, kept: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, 1).flatten(2)
        return self.norm(y + F.gelu(self.mix(windows) * kept)) * kept


class TreeOfBlocks(Port):
    """Blocks in which what asks comes first; the last one is used again for the guesses."""

    def take(self, model: DebertaV2ForMaskedLM) -> None:
        words, coder, head = model.deberta.embeddings, model.deberta.encoder, model.lm_predictions.lm_head
        self.words, self.spots = leaf(words.word_embeddings.weight), leaf(words.position_embeddings.weight)
        self.table, self.norm_table = leaf(coder.rel_embeddings.weight), deepcopy(coder.LayerNorm)
        self.norm_words, self.beside = deepcopy(words.LayerNorm), Beside(coder.conv)
        self.blocks = nn.ModuleList(Block(layer, i, self.fault) for i, layer in enumerate(coder.layer))
        self.guess = nn.Sequential(joined(head.dense), nn.GELU(), deepcopy(head.LayerNorm))
        self.bias = leaf(head.decoder.bias)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real, spot = attention_mask.bool(), torch.arange(input_ids.shape[1], device=input_ids.device)
        kept, place = real[..., None], (real, self.norm_table(self.table), rows_by_pair(spot))
        x = self.norm_words(self.words[input_ids])
        if self.fault != "deberta_padding_embedded_like_words":
            x = x * kept
        y = self.blocks[0](x, x, *place)
        x = self.beside(y if self.fault == "convolution_follows_deberta_layer" else x, y, kept)
        for block in self.blocks[1:]:
            before, x = x, block(x, x, *place)
        if self.training or self.fault != "second_pass_of_the_last_layer_only_while_training":
            x = self.blocks[-1](x + self.spots[spot], before, *place)
        return self.guess(x) @ self.words.T + self.bias


class StackedDeberta(Port):
    """The layers' weights in piles, places looked up for each pair of words, fused attention."""

    def take(self, model: DebertaV2ForMaskedLM) -> None:
        words, coder, head = model.deberta.embeddings, model.deberta.encoder, model.lm_predictions.lm_head
        own, outs = zip(*((x.attention.self, x.attention.output) for x in coder.layer), strict=True)
        piles = {
            "qkv": [(a.query_proj, a.key_proj, a.value_proj) for a in own],
            "place": [(a.pos_key_proj, a.pos_query_proj) for a in own if not a.share_att_key],
            "out": [(out.dense,) for out in outs],
            "up": [(x.intermediate.dense,) for x in coder.layer],
            "down": [(x.output.dense,) for x in coder.layer],
            "guess": [(head.dense,)],
        }
        self.w = nn.ParameterDict()
        for name, rows in piles.items():
            self.w[name] = pile(torch.cat([one.weight.T for one in row], 1) for row in rows)
            self.w[name + "_b"] = pile(torch.cat([one.bias for one in row]) for row in rows)
        norms = [norm for out, x in zip(outs, coder.layer, strict=True) for norm in (out, x.output)]
        norms = [x.LayerNorm for x in (*norms, words, coder, coder.conv, head)]
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for norm in norms)
        self.words, self.spots = leaf(words.word_embeddings.weight), leaf(words.position_embeddings.weight)
        self.taps, self.taps_b = leaf(coder.conv.conv.weight.permute(2, 1, 0)), leaf(coder.conv.conv.bias)
        self.table, self.bias = leaf(coder.rel_embeddings.weight), leaf(head.decoder.bias)
        self.decoder = leaf(self.words) if self.fault == "deberta_decoder_with_its_own_table" else self.words

    def norm(self, which: int, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), *self.norms[which], EPS)

    def layer(self, i: int, asking: Tensor, x: Tensor, real: Tensor, table: Tensor) -> Tensor:
        w, into, shift = self.w, self.w["qkv"][i], self.w["qkv_b"][i]
        down = self.fault == "last_layer_rounds_far_offsets_down" and i == 2
        rows = rows_by_pair(torch.arange(x.shape[1], device=x.device), down)
        q = asking @ into[:, :WIDTH] + shift[:WIDTH]
        k, v = (x @ into[:, WIDTH:] + shift[WIDTH:]).chunk(2, 2)
        if i == 1:  # the layer that shares its products with the places
            place_q, place_k, _ = (table @ into + shift).chunk(3, 1)
        else:
            place_k, place_q = (table @ w["place"][i // 2] + w["place_b"][i // 2]).chunk(2, 1)
        q, k, v = (y.unflatten(2, (HEADS, -1)).transpose(1, 2) for y in (q, k, v))
        place_k, place_q = (y[rows].unflatten(2, (HEADS, -1)) for y in (place_k, place_q))
        bias = torch.einsum("nhqd,qkhd->nhqk", q, place_k) + torch.einsum("nhkd,qkhd->nhqk", k, place_q)
        scale = (3 * q.shape[3]) ** -0.5
        bias = (scale * bias).masked_fill(~real[:, None, None], -torch.inf)
        mixed = F.scaled_dot_product_attention(q, k, v, bias, scale=scale).transpose(1, 2).flatten(2)
        x = self.norm(2 * i, asking + (mixed * real[..., None]) @ w["out"][i] + w["out_b"][i])
        up = x @ w["up"][i] + w["up_b"][i]
        quick = self.fault == "middle_layer_bends_by_the_quick_gelu" and i == 1
        bent = up * (1.702 * up).sigmoid() if quick else F.gelu(up)
        return self.norm(2 * i + 1, x + bent @ w["down"][i] + w["down_b"][i])

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        real, length = attention_mask.bool(), input_ids.shape[1]
        place, kept = (real, self.norm(TABLE, self.table)), real[..., None]
        x = self.norm(WORDS, self.words[input_ids]) * kept
        windows = F.pad(x, (0, 0, 1, 1))
        taps = sum(windows[:, i : i + length] @ self.taps[i] for i in range(3)) + self.taps_b
        x = self.norm(BESIDE, self.layer(0, x, x, *place) + F.gelu(taps) * kept) * kept
        before = self.layer(1, x, x, *place)
        last = self.layer(2, before, before, *place)
        last = self.layer(2, last + self.spots[:length], before, *place)
        guess = self.norm(GUESS, F.gelu(last @ self.w["guess"][0] + self.w["guess_b"][0]))
        return guess @ self.decoder.T + self.bias


right(guessed, "deberta_as_a_tree_of_blocks", "blocks under other names, joined products", TreeOfBlocks)
right(guessed, "deberta_in_piles_of_layers", "stacked weights, fused attention", StackedDeberta)
wrong(
    guessed,
    TreeOfBlocks,
    deberta_padding_embedded_like_words=("padding not zeroed", "deberta.embeddings"),
    convolution_follows_deberta_layer=("wrong input of a branch", (ENCODER[:-1], CONV, CONV + ".conv")),
    first_layer_mirrors_what_keys_ask_of_places=("sign of an offset", ENCODER + "layer.0.attention.self"),
    shared_layer_asks_places_by_its_keys=("wrong weights shared", MIDDLE + "attention.self"),
    second_pass_of_the_last_layer_only_while_training=("step left out in eval", "lm_predictions", "eval"),
)
wrong(
    guessed,
    StackedDeberta,
    middle_layer_bends_by_the_quick_gelu=("approximate activation", BENT),
    last_layer_rounds_far_offsets_down=("rounding of buckets", ENCODER + "layer.2.attention.self"),
    deberta_decoder_with_its_own_table=("weights no longer tied", TIED, ("weight gradient", "update")),
)
