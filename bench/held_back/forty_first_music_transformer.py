"""Two ports of a small Music Transformer: a tree of residual parts, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_first_music_transformer import (
    CLIPPED,
    HEADS,
    LAYERS,
    PAD,
    WIDTH,
    MusicTransformer,
    motifs,
    smooth_cross_entropy,
)
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_first_music_transformer", MusicTransformer, motifs, smooth_cross_entropy)


class Dense(nn.Module):
    """A product from the right, of one layer or of several side by side."""

    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.kernel = leaf(torch.cat([layer.weight for layer in layers]).T)
        self.offset = leaf(torch.cat([layer.bias for layer in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.offset, x.flatten(0, 1), self.kernel).unflatten(0, x.shape[:2])


class Distances(nn.Module):
    """What each query says to a distance, by a table from none on; its last row is for all beyond."""

    def __init__(self, table: Tensor):
        super().__init__()
        self.table, self.silent = leaf(table.flip(1).transpose(1, 2)), False

    def forward(self, q: Tensor) -> Tensor:
        said = (q.detach() if self.silent else q) @ self.table
        place = torch.arange(q.shape[2], device=q.device)
        back = (place[:, None] - place).clamp(0, self.table.shape[2] - 1)
        return said.gather(3, back.expand(*q.shape[:2], -1, -1))


class Listen(nn.Module):
    def __init__(self, rga: nn.Module):
        super().__init__()
        self.project, self.merge = Dense(rga.Wq, rga.Wk, rga.Wv), Dense(rga.fc)
        self.distances, self.scale = Distances(rga.E), rga.dh**-0.5

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        q, k, v = self.project(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        bias = (self.distances(q) * self.scale).masked_fill(hidden, -math.inf)
        return self.merge(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Think(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.wide, self.narrow = Dense(layer.FFN_pre), Dense(layer.FFN_suf)

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        return self.narrow(self.wide(x).clamp(min=0))


class Added(nn.Module):
    """A part's result added to what it is given, and normed."""

    def __init__(self, part: nn.Module, norm: nn.LayerNorm):
        super().__init__()
        self.part, self.gain, self.shift = part, leaf(norm.weight), leaf(norm.bias)
        self.eps, self.less = norm.eps, 0

    def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
        x = x + self.part(x, hidden)
        spread, center = torch.var_mean(x, -1, correction=self.less, keepdim=True)
        return (x - center) * ((spread + self.eps).rsqrt() * self.gain) + self.shift


class MusicOfParts(Port):
    """Residual parts one after another, with fused projections and distances that are gathered."""

    def take(self, model: MusicTransformer) -> None:
        source, fault = model.Decoder, self.fault
        self.events, self.parts = leaf(source.embedding.weight.T), nn.ModuleList()
        for layer in source.enc_layers:
            self.parts.append(Added(Listen(layer.rga), layer.layernorm1))
            self.parts.append(Added(Think(layer), layer.layernorm2))
        places = source.pos_encoding.positional_embedding
        if fault == "music_transformer_sines_before_cosines":
            places = torch.cat([places[:, ::2], places[:, 1::2]], 1)
        self.register_buffer("places", places.clone())
        if fault == "music_transformer_first_layer_leaves_distances_unscaled":
            self.parts[0].part.scale = 1
        if fault == "music_transformer_second_layer_norm_divides_by_one_less":
            self.parts[2].less = 1
        self.parts[4].part.distances.silent = fault == "music_transformer_last_layer_detaches_queries"
        self.ask = Dense(model.fc)

    def forward(self, x: Tensor) -> Tensor:
        place = torch.arange(x.shape[1], device=x.device)
        hidden = (place > place[:, None]) | (x == PAD)[:, None, None]
        y = self.events.T[x] * WIDTH**0.5 + self.places[place]
        for part in self.parts:
            y = part(y, hidden)
        return self.ask(y)


def sheet(layer: nn.Linear) -> Tensor:
    """The bias as one more column of the weight."""
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def times(x: Tensor, rows: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1) @ rows.mT


class PackedMusic(Port):
    """Stacks by layer, keys that are moved by their distance (Shaw's form), and exponentials by hand."""

    def take(self, model: MusicTransformer) -> None:
        source, layers = model.Decoder, model.Decoder.enc_layers
        rgas = [layer.rga for layer in layers]
        self.square = pile(torch.stack([sheet(w) for w in (x.Wq, x.Wk, x.Wv, x.fc)]) for x in rgas)
        self.up, self.down = pile(sheet(x.FFN_pre) for x in layers), pile(sheet(x.FFN_suf) for x in layers)
        norms = [[x.layernorm1, x.layernorm2] for x in layers]
        self.norms = pile(torch.stack([torch.stack([n.weight, n.bias]) for n in pair]) for pair in norms)
        self.far = pile(x.E for i, x in enumerate(rgas) if i != CLIPPED)
        self.near = leaf(rgas[CLIPPED].E)
        self.events, self.ask = leaf(source.embedding.weight), leaf(sheet(model.fc))
        self.register_buffer("places", source.pos_encoding.positional_embedding.clone())

    def norm(self, x: Tensor, i: int, j: int) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        gain, shift = self.norms[i, j]
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain + shift

    def moves(self, i: int, length: int) -> Tensor:
        """The row of the table for each pair of places, [HEADS, T, T, D]."""
        table = self.near if i == CLIPPED else self.far[(i > CLIPPED) * 1]
        reach = table.shape[1] - 1
        place = torch.arange(length, device=table.device)
        short = self.fault == "music_transformer_clipped_one_step_too_near" and i == CLIPPED
        return table[:, reach + (place - place[:, None]).clamp(short - reach, 0)]

    def attend(self, i: int, x: Tensor, seen: Tensor) -> Tensor:
        q, k, v = (times(x, rows).unflatten(2, (HEADS, -1)) for rows in self.square[i, :3])
        keys = k.transpose(1, 2)[:, :, None] + self.moves(i, x.shape[1])
        score = torch.einsum("nqhd,nhqkd->nhqk", q / math.sqrt(q.shape[3]), keys)
        score = (score - score.detach().amax(-1, True)).exp() * seen
        mixed = torch.einsum("nhqk,nkhd->nqhd", score / score.sum(-1, True), v)
        return times(mixed.flatten(2), self.square[i, 3])

    def forward(self, x: Tensor) -> Tensor:
        seen = (x != PAD)[:, None, None]
        if self.fault == "music_transformer_padding_seen_in_evaluation" and not self.training:
            seen = torch.ones_like(seen)
        seen = seen & torch.ones(x.shape[1], x.shape[1], device=x.device).tril().bool()
        y = math.sqrt(WIDTH) * self.events[x] + self.places[: x.shape[1]]
        for i in range(LAYERS):
            z = self.norm(y + self.attend(i, y, seen), i, 0)
            inner = times(z, self.up[i])
            zero, kept = torch.zeros_like(inner), z
            if self.fault == "music_transformer_first_relu_lets_all_gradients_back" and i == 0:
                zero = inner - inner.detach()
            if self.fault == "music_transformer_last_feed_forward_added_to_the_layer_input" and i == 2:
                kept = y
            y = self.norm(kept + times(torch.where(inner > 0, inner, zero), self.down[i]), i, 1)
        return times(y, self.ask)


SLOPES, LAYER = ("input gradient", "weight gradient"), "Decoder.enc_layers."
right(task, "music_transformer_of_residual_parts", "a tree, fused, gathered distances", MusicOfParts)
right(task, "music_transformer_of_packed_weights", "packed stacks, moved keys, own softmax", PackedMusic)
wrong(
    task,
    MusicOfParts,
    music_transformer_sines_before_cosines=("another channel order", "Decoder.pos_encoding"),
    music_transformer_first_layer_leaves_distances_unscaled=("a factor left out", LAYER + "0.rga"),
    music_transformer_second_layer_norm_divides_by_one_less=("unbiased variance", LAYER + "1.layernorm1"),
    music_transformer_last_layer_detaches_queries=("detach", LAYER + "2.rga", SLOPES),
)
wrong(
    task,
    PackedMusic,
    music_transformer_first_relu_lets_all_gradients_back=("a wrong backward", LAYER + "0", SLOPES),
    music_transformer_clipped_one_step_too_near=("a count off by one", LAYER + "1.rga"),
    music_transformer_last_feed_forward_added_to_the_layer_input=("another residual", LAYER + "2"),
    music_transformer_padding_seen_in_evaluation=("a mask left out in eval", "", "eval"),
)
