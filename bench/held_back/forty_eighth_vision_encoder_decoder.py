"""Two ports of a small captioner: a tree of fused layers, and flat code over packed weights."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_eighth_vision_encoder_decoder import VisionEncoderDecoder, captions, smoothed
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_eighth_vision_encoder_decoder", VisionEncoderDecoder, captions, smoothed)


def packed(*layers: nn.Linear) -> Tensor:
    return torch.cat([torch.cat([x.weight.T, x.bias[None]]) for x in layers], 1)


def norms(*layers: nn.LayerNorm) -> Tensor:
    return torch.stack([torch.stack([x.weight, x.bias]) for x in layers])


def linear(x: Tensor, w: Tensor) -> Tensor:
    return torch.addmm(w[-1], x.flatten(0, -2), w[:-1]).unflatten(0, x.shape[:-1])


def norm(x: Tensor, w: Tensor) -> Tensor:
    spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
    return (x - middle) * (spread + 1e-5).rsqrt() * w[0] + w[1]


class Held(nn.Module):
    def __init__(self, function: Callable, weight: Tensor):
        super().__init__()
        self.function, self.weight = function, leaf(weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight)


def affine(*layers: nn.Linear) -> Held:
    return Held(linear, packed(*layers))


def scale(layer: nn.LayerNorm) -> Held:
    return Held(norm, norms(layer)[0])


def by_head(x: Tensor, count: int, heads: int) -> tuple[Tensor, ...]:
    return x.unflatten(-1, (count, heads, -1)).movedim(-3, 0).transpose(-3, -2).unbind(0)


class Block(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        inner, self.skips_from_norm = block.attention.self, False
        self.before, self.after = scale(block.layernorm_before), scale(block.layernorm_after)
        self.qkv = affine(inner.query, inner.key, inner.value)
        self.out, self.heads = affine(block.attention.output.dense), inner.heads
        self.up, self.down = affine(block.intermediate.dense), affine(block.output.dense)

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        mixed = F.scaled_dot_product_attention(*by_head(self.qkv(y).flatten(1, 2), 3, self.heads))
        x = (y if self.skips_from_norm else x) + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Word(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        own, other = layer.self_attn, layer.encoder_attn
        self.own, self.own_out = affine(own.q_proj, own.k_proj, own.v_proj), affine(own.out_proj)
        self.ask, self.told = affine(other.q_proj), affine(other.k_proj, other.v_proj)
        self.told_out, self.up, self.down = affine(other.out_proj), affine(layer.fc1), affine(layer.fc2)
        norms = (layer.self_attn_layer_norm, layer.encoder_attn_layer_norm, layer.final_layer_norm)
        self.norms, self.by_width, self.still = nn.ModuleList(map(scale, norms)), False, False

    def forward(self, x: Tensor, states: Tensor, mask: Tensor) -> Tensor:
        y = F.scaled_dot_product_attention(*by_head(self.own(x), 3, 4), mask)
        x = self.norms[0](x + self.own_out(y.transpose(1, 2).flatten(2)))
        (q,), (k, v) = by_head(self.ask(x), 1, 4), by_head(self.told(states), 2, 4)
        size = x.shape[-1] if self.by_width else q.shape[-1]
        y = F.scaled_dot_product_attention(q, k.detach() if self.still else k, v, scale=size**-0.5)
        x = self.norms[1](x + self.told_out(y.transpose(1, 2).flatten(2)))
        return self.norms[2](x + self.down(F.gelu(self.up(x))))


class CaptionerOfLayers(Port):
    """Blocks of fused projections; patches and neighbours are axes moved to the end."""

    def take(self, model: VisionEncoderDecoder) -> None:
        start, (one, two) = model.encoder.embeddings, model.encoder.layers
        kernel, words, join, fault = start["projection"], model.decoder, one.downsample, self.fault
        first = torch.cat([kernel.weight.flatten(1), kernel.bias[:, None]], 1).T
        self.start = nn.Sequential(Held(linear, first), scale(start["norm"]), *map(Block, one.blocks))
        self.merge = nn.Sequential(scale(join.norm), Held(torch.matmul, join.reduction.weight.T))
        self.late, self.cross = nn.Sequential(*map(Block, two.blocks)), affine(model.enc_to_dec_proj)
        self.table, self.places = leaf(words.embed_tokens.weight), leaf(words.embed_positions.weight[2:])
        self.ready, self.speak = scale(words.layernorm_embedding), nn.ModuleList(map(Word, words.layers))
        self.register_buffer("prior", words.final_logits_bias[0].clone())
        self.start[3].skips_from_norm = fault == "vision_encoder_decoder_second_block_skips_from_its_norm"
        self.speak[0].by_width = fault == "vision_encoder_decoder_cross_scaled_by_width"
        self.speak[1].still = fault == "vision_encoder_decoder_last_cross_keys_detached"

    def forward(self, pixel_values, decoder_input_ids, decoder_attention_mask) -> Tensor:
        x = pixel_values.unfold(2, 2, 2).unfold(3, 2, 2).permute(0, 2, 3, 1, 4, 5).flatten(3)
        x = self.start(x).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        axes = (3, 2, 4) if self.fault == "vision_encoder_decoder_merging_takes_rows_first" else (3, 4, 2)
        states = self.cross(self.late(self.merge(x.permute(0, 1, *axes, 5).flatten(3))).flatten(1, 2))
        x = self.table[decoder_input_ids] * self.table.shape[1] ** 0.5
        x, steps = self.ready(x + self.places[: x.shape[1]]), torch.arange(x.shape[1], device=x.device)
        mask = decoder_attention_mask.bool()[:, None, None] & (steps <= steps[:, None])
        x = self.speak[1](self.speak[0](x, states, mask), states, mask)
        return torch.einsum("ntd,vd->ntv", x, self.table) + self.prior


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, bias: Tensor | float = 0) -> Tensor:
    q, k, v = (x.unflatten(2, (heads, -1)) for x in (q, k, v))
    scores = torch.einsum("nqhd,nkhd->nhqk", q, k) * q.shape[-1] ** -0.5 + bias
    return torch.einsum("nhqk,nkhd->nqhd", scores.softmax(-1), v).flatten(2)


class PackedCaptioner(Port):
    """Stacks by stage, each bias in the last row of its matrix."""

    def take(self, model: VisionEncoderDecoder) -> None:
        start, stages, words = model.encoder.embeddings, model.encoder.layers, model.decoder
        merging, places = stages[0].downsample, words.embed_positions
        self.kernel, self.bias = leaf(start["projection"].weight), leaf(start["projection"].bias)
        self.w, self.d, self.start = nn.ParameterList(), nn.ParameterList(), leaf(norms(start["norm"])[0])
        for blocks in (x.blocks for x in stages):
            self.w.append(pile(norms(x.layernorm_before, x.layernorm_after) for x in blocks))
            inner, outer = [[getattr(x.attention, y) for x in blocks] for y in ("self", "output")]
            self.w.append(pile(packed(x.query, x.key, x.value) for x in inner))
            for each in (outer, [x.intermediate for x in blocks], [x.output for x in blocks]):
                self.w.append(pile(packed(x.dense) for x in each))
        self.merge, self.merging = leaf(norms(merging.norm)[0]), leaf(merging.reduction.weight)
        for x in words.layers:
            both = (x.self_attn, x.encoder_attn)
            squares = [packed(y) for a in both for y in (a.q_proj, a.k_proj, a.v_proj, a.out_proj)]
            scales = norms(x.self_attn_layer_norm, x.encoder_attn_layer_norm, x.final_layer_norm)
            self.d.extend((pile(squares), *map(leaf, (packed(x.fc1), packed(x.fc2), scales))))
        self.cross, self.table = leaf(packed(model.enc_to_dec_proj)), leaf(words.embed_tokens.weight.T)
        self.places, self.ready = (leaf(x) for x in (places.weight, norms(words.layernorm_embedding)[0]))
        self.register_buffer("prior", words.final_logits_bias.clone())

    def block(self, i: int, j: int, x: Tensor) -> Tensor:
        n, qkv, out, up, down = (w[j] for w in self.w[5 * i : 5 * i + 5])
        given, heads = linear(norm(x, n[0]).flatten(1, 2), qkv).chunk(3, 2), 2 + i
        if self.fault == "vision_encoder_decoder_third_heads_interleaved" and (i, j) == (1, 0):
            given = [y.unflatten(2, (-1, heads)).transpose(2, 3).flatten(2) for y in given]
        x = x + linear(attend(*given, heads), out).view_as(x)
        return x + linear(F.gelu(linear(norm(x, n[1]), up)), down)

    def word(self, i: int, x: Tensor, states: Tensor, bias: Tensor) -> Tensor:
        (q, k, v, o, cq, ck, cv, co), up, down, n = self.d[4 * i : 4 * i + 4]
        x = norm(x + linear(attend(linear(x, q), linear(x, k), linear(x, v), 4, bias), o), n[0])
        x = norm(x + linear(attend(linear(x, cq), linear(states, ck), linear(states, cv), 4), co), n[1])
        rough = self.fault == "vision_encoder_decoder_last_gelu_by_tanh" and i == 1
        return norm(x + linear(F.gelu(linear(x, up), approximate="tanh" if rough else "none"), down), n[2])

    def forward(self, pixel_values, decoder_input_ids, decoder_attention_mask) -> Tensor:
        x = norm(F.conv2d(pixel_values, self.kernel, self.bias, 2).movedim(1, 3), self.start)
        x = self.block(0, 1, self.block(0, 0, x))
        x = torch.cat([x[:, i::2, j::2] for j in (0, 1) for i in (0, 1)], 3)
        x = self.block(1, 1, self.block(1, 0, norm(x, self.merge) @ self.merging.T))
        states, long = linear(x.flatten(1, 2), self.cross), decoder_input_ids.shape[1]
        first = 0 if self.fault == "vision_encoder_decoder_positions_without_offset" else 2
        x = math.sqrt(len(self.table)) * self.table.T[decoder_input_ids] + self.places[first : first + long]
        hidden = torch.ones(long, long, device=x.device).triu(1) + (1 - decoder_attention_mask[:, None, None])
        bias, x = x.new_zeros(hidden.shape).masked_fill(hidden > 0, -math.inf), norm(x, self.ready)
        x = self.word(1, self.word(0, x, states, bias), states, bias)
        bare = self.fault == "vision_encoder_decoder_no_logits_bias_in_eval" and not self.training
        return x @ self.table + (0 if bare else self.prior)


SLOPES, LAST = ("input gradient", "weight gradient"), "decoder.layers.1.encoder_attn"
right(task, "vision_encoder_decoder_of_layers", "a tree, fused products, other norms", CaptionerOfLayers)
right(task, "vision_encoder_decoder_of_packed_weights", "flat, stacks with biases inside", PackedCaptioner)
wrong(
    task,
    CaptionerOfLayers,
    vision_encoder_decoder_second_block_skips_from_its_norm=("another skip", "encoder.layers.0.blocks.1"),
    vision_encoder_decoder_merging_takes_rows_first=("another order", "encoder.layers.0.downsample"),
    vision_encoder_decoder_cross_scaled_by_width=("another scale", "decoder.layers.0.encoder_attn"),
    vision_encoder_decoder_last_cross_keys_detached=("detach", LAST, SLOPES),
)
wrong(
    task,
    PackedCaptioner,
    vision_encoder_decoder_third_heads_interleaved=("head order", "encoder.layers.1.blocks.0.attention.self"),
    vision_encoder_decoder_positions_without_offset=("an offset left out", "decoder.embed_positions"),
    vision_encoder_decoder_last_gelu_by_tanh=("another gelu", "decoder.layers.1.activation_fn"),
    vision_encoder_decoder_no_logits_bias_in_eval=("a term left out in eval", "decoder", "eval"),
)
