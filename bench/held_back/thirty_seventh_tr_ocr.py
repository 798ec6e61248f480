"""Two ports of a small TrOCR: a tree of readers and writers, and one class of packed weights in columns."""

import math
from copy import deepcopy
from operator import attrgetter

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back import _thirty_seventh_tr_ocr as known
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

Model, PAD, PATCH = known.VisionEncoderDecoderModel, known.PAD, known.PATCH
task = few("thirty_seventh_tr_ocr", Model, known.written, known.misread)


class Heads(nn.Module):
    """Asks with one product and takes keys and values with another, packed by head."""

    def __init__(self, layer: nn.Module, out: nn.Linear, heads: int, causal: bool = False):
        super().__init__()
        both = (layer.k_proj, layer.v_proj)
        self.ask, self.offset = leaf(layer.q_proj.weight.T), leaf(layer.q_proj.bias)
        self.give = leaf(torch.cat([x.weight.unflatten(0, (heads, -1)) for x in both], 1))
        self.lift = leaf(torch.cat([x.bias.unflatten(0, (heads, -1)) for x in both], 1))
        self.out, self.heads, self.causal = deepcopy(out), heads, causal
        self.scale, self.loose, self.silent = (len(layer.q_proj.bias) / heads) ** -0.5, False, False

    def forward(self, x: Tensor, given: Tensor) -> Tensor:
        q = (x @ self.ask + self.offset).unflatten(2, (self.heads, -1)).transpose(1, 2)
        both = torch.einsum("ntc,hdc->nhtd", given, self.give) + self.lift[:, None]
        k, v = both.chunk(2, -1)
        if self.silent:
            both = torch.einsum("ntc,hdc->nhtd", given.detach(), self.give) + self.lift[:, None]
            v = both.chunk(2, -1)[1]
        causal = self.causal and (self.training or not self.loose)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=self.scale)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Reader(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.calm = nn.ModuleList(map(deepcopy, (layer.layernorm_before, layer.layernorm_after)))
        self.mix = Heads(layer.attention, layer.attention.o_proj, known.SEEN_HEADS)
        self.think = nn.Sequential(deepcopy(layer.mlp.fc1), nn.GELU(), deepcopy(layer.mlp.fc2))

    def forward(self, x: Tensor) -> Tensor:
        y = self.calm[0](x)
        x = x + self.mix(y, y)
        return x + self.think(self.calm[1](x))


class Writer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        self.calm = nn.ModuleList(map(deepcopy, norms))
        self.recall = Heads(layer.self_attn, layer.self_attn.out_proj, known.TEXT_HEADS, True)
        self.look = Heads(layer.encoder_attn, layer.encoder_attn.out_proj, known.TEXT_HEADS)
        self.think = nn.Sequential(deepcopy(layer.fc1), nn.GELU(), deepcopy(layer.fc2))

    def forward(self, x: Tensor, seen: Tensor) -> Tensor:
        x = self.calm[0](self.recall(x, x) + x)
        x = self.calm[1](self.look(x, seen) + x)
        return self.calm[2](self.think(x) + x)


class TrOCROfReaders(Port):
    """Readers and writers; the picture is cut into rows of pixels."""

    def take(self, model: Model) -> None:
        marks, text, fault = model.encoder.embeddings, model.decoder.model, self.fault
        self.cut = leaf(marks.patch_embeddings.weight.permute(2, 3, 1, 0).flatten(0, 2))
        self.lift, self.first = leaf(marks.patch_embeddings.bias), leaf(marks.cls_token[0, 0])
        self.second, self.spots = leaf(marks.distillation_token[0, 0]), leaf(marks.position_embeddings[0])
        self.readers = nn.Sequential(*map(Reader, model.encoder.layers), deepcopy(model.encoder.layernorm))
        self.words, self.places = leaf(text.embed_tokens.weight), leaf(text.embed_positions.weight)
        self.calm = deepcopy(text.layernorm_embedding)
        self.writers = nn.ModuleList(map(Writer, text.layers))
        self.tell = leaf(model.decoder.output_projection.weight.T)
        tanh = fault == "tr_ocr_second_picture_layer_takes_the_tanh_gelu"
        self.readers[1].think[1].approximate = "tanh" if tanh else "none"
        if fault == "tr_ocr_second_cross_scores_scaled_by_the_picture":
            self.writers[1].look.scale = (known.SEEN / known.TEXT_HEADS) ** -0.5
        self.writers[0].recall.loose = fault == "tr_ocr_first_text_layer_looks_ahead_in_evaluation"
        self.writers[0].look.silent = fault == "tr_ocr_first_cross_values_do_not_reach_the_encoder"

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = pixel_values.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).permute(0, 2, 3, 4, 5, 1)
        x = x.flatten(3).flatten(1, 2) @ self.cut + (self.lift + self.spots[2:])
        firsts = torch.stack([self.first, self.second]) + self.spots[:2]
        seen = self.readers(torch.cat([firsts.expand(len(x), -1, -1), x], 1))
        before = F.pad(labels[:, :-1], (1, 0), value=known.START)
        before = torch.where(before == known.IGNORED, PAD, before)
        y = F.embedding(before, self.words, PAD) * self.words.shape[1] ** 0.5
        y = self.calm(y + self.places[2 : 2 + y.shape[1]])
        for writer in self.writers:
            y = writer(y, seen)
        return {"logits": y @ self.tell, "encoder_last_hidden_state": seen}


def sheets(*layers: nn.Module) -> Tensor:
    """Weights with the offsets as the last column, stacked."""
    return torch.stack([torch.cat([x.weight.reshape(len(x.bias), -1), x.bias[:, None]], 1) for x in layers])


def affine(w: Tensor, x: Tensor) -> Tensor:
    return w[:, :-1] @ x + w[:, -1:]


def calm(w: Tensor, x: Tensor, eps: float = 1e-5, less: int = 0) -> Tensor:
    spread, middle = torch.var_mean(x, 1, correction=less, keepdim=True)
    return (x - middle) / (spread + eps).sqrt() * w[:, :1] + w[:, 1:]


def attend(w: Tensor, given: Tensor, x: Tensor, y: Tensor, heads: int, ahead: Tensor | None = None) -> Tensor:
    """``w`` asks and ends, ``given`` makes keys and values; columns are tokens."""
    found = (affine(w[0], x), affine(given[0], y), affine(given[1], y))
    q, k, v = (z.unflatten(1, (heads, -1)) for z in found)
    scores = torch.einsum("nhcs,nhct->nhst", k, q / math.sqrt(q.shape[2]))
    if ahead is not None:
        scores = scores.masked_fill(ahead, -torch.inf)
    return affine(w[1], (v @ (scores - scores.logsumexp(2, True)).exp()).flatten(1, 2))


class PackedTrOCR(Port):
    """Stacks of sheets; pictures and texts are columns."""

    def take(self, model: Model) -> None:
        marks, text, layers = model.encoder.embeddings, model.decoder.model, model.encoder.layers
        self.cut, self.spots = leaf(sheets(marks.patch_embeddings)[0]), leaf(marks.position_embeddings[0].T)
        self.firsts = leaf(torch.cat([marks.cls_token[0], marks.distillation_token[0]]).T)
        mix = attrgetter(*(f"attention.{x}_proj" for x in "qokv"))
        self.mix = pile(sheets(*mix(x)) for x in layers)
        self.up, self.down = (leaf(sheets(*map(attrgetter(x), layers))) for x in ("mlp.fc1", "mlp.fc2"))
        self.even = pile(sheets(x.layernorm_before, x.layernorm_after) for x in layers)
        norms = (model.encoder.layernorm, text.layernorm_embedding)
        self.ends, self.start = (leaf(torch.stack([x.weight, x.bias], 1)) for x in norms)
        self.words, self.places = leaf(text.embed_tokens.weight.T), leaf(text.embed_positions.weight.T)
        own = [(x.self_attn, x.encoder_attn) for x in text.layers]
        own_parts = attrgetter("q_proj", "out_proj", "k_proj", "v_proj")
        self.own = pile(sheets(*own_parts(x), y.q_proj, y.out_proj) for x, y in own)
        self.look = pile(sheets(y.k_proj, y.v_proj) for _, y in own)
        self.rise, self.fall = (leaf(sheets(*map(attrgetter(x), text.layers))) for x in ("fc1", "fc2"))
        norms = attrgetter("self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm")
        self.level = pile(sheets(*norms(x)) for x in text.layers)
        self.tell = leaf(model.decoder.output_projection.weight)

    def read(self, x: Tensor) -> Tensor:
        x, firsts = affine(self.cut, F.unfold(x, PATCH, stride=PATCH)), self.firsts
        if self.fault == "tr_ocr_distillation_token_before_the_class_token":
            firsts = firsts.flip(1)
        x = torch.cat([firsts.expand(len(x), -1, -1), x], 2) + self.spots
        for i, mix in enumerate(self.mix):
            y = calm(self.even[i, 0], x, 1e-12)
            kept = y if self.fault == "tr_ocr_third_picture_layer_adds_to_the_normalised" and i == 2 else x
            x = kept + attend(mix[:2], mix[2:], y, y, known.SEEN_HEADS)
            x = x + affine(self.down[i], F.gelu(affine(self.up[i], calm(self.even[i, 1], x, 1e-12))))
        return calm(self.ends, x, 1e-12)

    def forward(self, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        seen, before = self.read(pixel_values), known.shift_tokens_right(labels)
        places = self.places[:, 2 : 2 + before.shape[1]]
        if self.fault == "tr_ocr_text_positions_take_no_gradient":
            places = places.detach()
        y = F.embedding(before, self.words.T, PAD).mT * math.sqrt(len(self.words)) + places
        y, ahead = calm(self.start, y), y.new_ones([before.shape[1]] * 2).tril(-1).bool()
        for i, own in enumerate(self.own):
            y = calm(self.level[i, 0], y + attend(own[:2], own[2:4], y, y, known.TEXT_HEADS, ahead))
            y = calm(self.level[i, 1], y + attend(own[4:], self.look[i], y, seen, known.TEXT_HEADS))
            less = self.fault == "tr_ocr_last_norm_of_the_text_counts_one_value_less" and i == 1
            y = y + affine(self.fall[i], F.gelu(affine(self.rise[i], y)))
            y = calm(self.level[i, 2], y, less=int(less))
        return {"logits": (self.tell @ y).mT, "encoder_last_hidden_state": seen.mT}


right(task, "tr_ocr_of_readers_and_writers", "a tree, keys and values packed by head", TrOCROfReaders)
right(task, "tr_ocr_of_packed_weights", "packed stacks, tokens in columns", PackedTrOCR)
TEXT, PICTURE = "decoder.model", "encoder.layers"
wrong(
    task,
    TrOCROfReaders,
    tr_ocr_second_picture_layer_takes_the_tanh_gelu=("another gelu", f"{PICTURE}.1.mlp.activation_fn"),
    tr_ocr_first_text_layer_looks_ahead_in_evaluation=("no mask", f"{TEXT}.layers.0.self_attn", "eval"),
    tr_ocr_first_cross_values_do_not_reach_the_encoder=("detach", f"{TEXT}.layers.0.encoder_attn", GRADIENTS),
    tr_ocr_second_cross_scores_scaled_by_the_picture=("another scale", f"{TEXT}.layers.1.encoder_attn"),
)
wrong(
    task,
    PackedTrOCR,
    tr_ocr_distillation_token_before_the_class_token=("another order", "encoder.embeddings"),
    tr_ocr_third_picture_layer_adds_to_the_normalised=("another residual", f"{PICTURE}.2"),
    tr_ocr_text_positions_take_no_gradient=("detach", f"{TEXT}.embed_positions", "weight gradient"),
    tr_ocr_last_norm_of_the_text_counts_one_value_less=("a count", f"{TEXT}.layers.1.final_layer_norm"),
)
