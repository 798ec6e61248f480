"""Two ports of a small LLaVA: a tree with fused weights, and one class of stacked weights."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_third_llava as net
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_third_llava", net.LlavaForConditionalGeneration, net.described, net.next_words)
HEADS, KEY_HEADS, VISION_HEADS, PATCH = net.HEADS, net.KEY_HEADS, net.VISION_HEADS, net.PATCH
TILED = "llava_second_decoder_layer_tiles_its_key_heads"
SIZE = net.WIDTH // HEADS


def dense(*layers: nn.Linear) -> nn.Linear:
    weight, biased = torch.cat([x.weight for x in layers]), layers[0].bias is not None
    bias = torch.cat([x.bias for x in layers]) if biased else None
    return filled(nn.Linear(weight.shape[1], len(weight), bias=biased), weight, bias)


class Glance(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        see, self.last, self.exact = old.self_attn, deepcopy(old.self_attn.out_proj), False
        self.all, self.up, self.down = (
            dense(see.q_proj, see.k_proj, see.v_proj),
            *map(dense, old.mlp.children()),
        )
        self.one, self.two = deepcopy(old.layer_norm1), deepcopy(old.layer_norm2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(self.one(x)).unflatten(2, (3, VISION_HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.last(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        y = self.up(self.two(x))
        return x + self.down(F.gelu(y) if self.exact else F.silu(1.702 * y) / 1.702)


class Eye(nn.Module):
    def __init__(self, tower: nn.Module):
        super().__init__()
        old, layers = tower.embeddings, tower.encoder.layers[:-1]
        self.patch = leaf(old.patch_embedding.weight.permute(2, 3, 1, 0).flatten(0, 2))
        self.first, self.place = leaf(old.class_embedding), leaf(old.position_embedding.weight)
        self.body = nn.Sequential(deepcopy(tower.pre_layrnorm), *map(Glance, layers))

    def forward(self, picture: Tensor) -> Tensor:
        cells = picture.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3)
        cells = cells.flatten(3).flatten(1, 2) @ self.patch + self.place[1:]
        return self.body(F.pad(cells, (0, 0, 1, 0)) + F.pad((self.first + self.place[0])[None], (0, 0, 0, 6)))


class Level(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.eps, self.silent = leaf(norm.weight), norm.eps, False

    def forward(self, x: Tensor) -> Tensor:
        root = (torch.linalg.vecdot(x, x) / x.shape[-1] + self.eps).sqrt()[..., None]
        return x / (root.detach() if self.silent else root) * self.gain


class Reading(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        read, mlp = old.self_attn, old.mlp
        self.one, self.two = Level(old.input_layernorm), Level(old.post_attention_layernorm)
        self.all, self.last = dense(read.q_proj, read.k_proj, read.v_proj), deepcopy(read.o_proj)
        self.both, self.down = dense(mlp.up_proj, mlp.gate_proj), deepcopy(mlp.down_proj)

    def forward(self, x: Tensor, seen: Tensor, turn: Tensor) -> Tensor:
        heads = self.all(self.one(x)).unflatten(2, (-1, SIZE)).transpose(1, 2)
        qk, v = heads.split([HEADS + KEY_HEADS, KEY_HEADS], 1)
        qk = torch.complex(*qk.chunk(2, -1)) * turn[:, None]
        q, k = torch.cat([qk.real, qk.imag], -1).split([HEADS, KEY_HEADS], 1)
        q = q.unflatten(1, (KEY_HEADS, -1))
        k, v = (each[:, :, None].expand_as(q) for each in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, seen[:, None, None]).flatten(1, 2)
        x = x + self.last(y.transpose(1, 2).flatten(2))
        value, gate = self.both(self.two(x)).chunk(2, -1)
        return x + self.down(value * gate * gate.sigmoid())


class LlavaOfReadings(Port):
    def take(self, model: net.LlavaForConditionalGeneration) -> None:
        old, fault, bridge = model.language_model, self.fault, model.multi_modal_projector
        self.eye = Eye(model.vision_tower)
        self.eye.body[2].exact = fault == "llava_second_vision_layer_with_exact_gelu"
        self.bridge = nn.Sequential(dense(bridge.linear_1), nn.GELU(), dense(bridge.linear_2))
        self.words, self.reading = leaf(old.embed_tokens.weight), nn.ModuleList(map(Reading, old.layers))
        self.reading[2].two.silent = fault == "llava_third_mlp_norm_with_a_constant_root"
        self.end = nn.Sequential(Level(old.norm), dense(model.lm_head))
        self.end[0].eps = 1e-2 if fault == "llava_last_norm_with_a_larger_eps" else 1e-5
        self.register_buffer("speed", old.rotary_emb.inv_freq.clone())

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> Tensor:
        cells, shown = self.eye(pixel_values.movedim(1, 3)), input_ids == net.IMAGE
        early = self.fault == "llava_last_patch_left_out_for_the_class_token"
        cells = self.bridge(cells[:, :-1] if early else cells[:, 1:])
        which = (shown.cumsum(1) - 1).clamp(0, cells.shape[1] - 1)[..., None].expand(-1, -1, net.WIDTH)
        x = torch.where(shown[..., None], cells.gather(1, which), F.embedding(input_ids, self.words))
        real, order = attention_mask.bool(), torch.arange(x.shape[1], device=x.device)
        angle = torch.where(real, attention_mask.cumsum(1) - 1, 1)[..., None] * self.speed
        turn, seen = torch.polar(torch.ones_like(angle), angle), real[:, None] & (order <= order[:, None])
        for layer in self.reading:
            x = layer(x, seen, turn)
        return self.end(x)


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight.T, layer.bias[None]])


class StackedLlava(Port):
    def take(self, model: net.LlavaForConditionalGeneration) -> None:
        tower, old = model.vision_tower, model.language_model
        see, read, bridge = tower.encoder.layers[:-1], old.layers, model.multi_modal_projector
        start, ways = tower.embeddings, [(x.self_attn, x.mlp) for x in see]
        self.kernel = leaf(start.patch_embedding.weight.flatten(1).T)
        self.places = leaf(torch.cat([start.class_embedding[None], start.position_embedding.weight]))
        norms = [tower.pre_layrnorm, *(norm for x in see for norm in (x.layer_norm1, x.layer_norm2))]
        self.affine = pile(torch.stack([*norm.parameters()]) for norm in norms)
        self.look = pile(torch.stack([*map(sheet, a.children())]) for a, _ in ways)
        self.rise, self.fall = pile(sheet(m.fc1) for _, m in ways), pile(sheet(m.fc2) for _, m in ways)
        self.across, self.over = leaf(sheet(bridge.linear_1)), leaf(sheet(bridge.linear_2))
        self.table = pile([old.embed_tokens.weight, model.lm_head.weight])
        gains = [norm.weight for x in read for norm in (x.input_layernorm, x.post_attention_layernorm)]
        self.gain = pile([*gains, old.norm.weight])
        self.ask = pile(dense(a.q_proj, a.k_proj, a.v_proj).weight.T for a in (x.self_attn for x in read))
        self.back = pile(x.self_attn.o_proj.weight.T for x in read)
        gated = [(x.mlp.gate_proj.weight.T, x.mlp.up_proj.weight.T, x.mlp.down_proj.weight) for x in read]
        self.gated = pile(map(torch.stack, gated))
        self.register_buffer("speed", old.rotary_emb.inv_freq.clone())

    def even(self, x: Tensor, i: int) -> Tensor:
        var, mean = torch.var_mean(x, -1, correction=0, keepdim=True)
        return torch.addcmul(self.affine[i, 1], (x - mean) / (var + 1e-5).sqrt(), self.affine[i, 0])

    def see(self, x: Tensor) -> Tensor:
        grid = F.unfold(x, PATCH, stride=PATCH).transpose(1, 2) @ self.kernel
        if self.fault == "llava_patches_laid_out_column_by_column":
            grid = grid.unflatten(1, (x.shape[2] // PATCH, -1)).transpose(1, 2).flatten(1, 2)
        x = self.even(torch.cat([self.places[:1].expand(len(x), 1, -1), grid], 1) + self.places[1:], 0)
        for i, (look, rise, fall) in enumerate(zip(self.look, self.rise, self.fall, strict=True)):
            y = torch.einsum("ntc,scd->sntd", self.even(x, 2 * i + 1), look[:3, :-1]) + look[:3, None, -1:]
            k, v, q = y.unflatten(3, (VISION_HEADS, -1))
            share = torch.einsum("nqhd,nkhd->nhqk", q / q.shape[-1] ** 0.5, k).softmax(3)
            x = x + torch.einsum("nhqk,nkhd->nqhd", share, v).flatten(2) @ look[3, :-1] + look[3, -1]
            y = self.even(x, 2 * i + 2) @ rise[:-1] + rise[-1]
            x = x + y / (1 + torch.exp(-1.702 * y)) @ fall[:-1] + fall[-1]
        y, tanh = x[:, 1:] @ self.across[:-1] + self.across[-1], self.fault == "llava_projector_gelu_by_tanh"
        y = F.gelu(y, approximate="tanh") if tanh else y * (1 + torch.erf(y / 2**0.5)) / 2
        return y @ self.over[:-1] + self.over[-1]

    def forward(self, input_ids: Tensor, pixel_values: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.table[0][input_ids]
        x[input_ids == net.IMAGE] = self.see(pixel_values).flatten(0, 1)
        place = attention_mask.cumsum(1) * attention_mask + 1 - 2 * attention_mask
        longer = self.fault == "llava_rotary_stretched_in_evaluation" and not self.training
        angle = place[..., None] * (self.speed / 2 if longer else self.speed)
        turn = torch.stack([angle.cos(), angle.sin(), -angle.sin(), angle.cos()], 2).unflatten(2, (2, 2))
        hidden = torch.ones_like(place[0]).diag().cumsum(1).triu(1) + 1 - attention_mask[:, None]
        for i, (ask, back, (gate, up, down)) in enumerate(zip(self.ask, self.back, self.gated, strict=True)):
            heads = (F.rms_norm(x, x.shape[-1:], self.gain[2 * i], 1e-5) @ ask).unflatten(2, (-1, SIZE))
            y, v = heads.tensor_split([HEADS + KEY_HEADS], 2)
            y = torch.einsum("nthse,ntsre->nthre", y.unflatten(3, (2, -1)), turn).flatten(3)
            q, k = y.tensor_split([HEADS], 2)
            order, tiled = torch.arange(HEADS, device=x.device), i == 1 and self.fault == TILED
            order = order % KEY_HEADS if tiled else order // (HEADS // KEY_HEADS)
            score = torch.einsum("nqhd,nkhd->nhqk", q, k[:, :, order]) / SIZE**0.5
            share = score.masked_fill(hidden[:, None] > 0, -torch.inf).softmax(3)
            x = x + torch.einsum("nhqk,nkhd->nqhd", share, v[:, :, order]).flatten(2) @ back
            y = F.rms_norm(x, x.shape[-1:], self.gain[2 * i + 1], 1e-5)
            x = x + (F.silu(y @ gate) * (y @ up)) @ down.T
        return F.rms_norm(x, x.shape[-1:], self.gain[-1], 1e-5) @ self.table[1].T


SLOPES, THIRD = ("input gradient", "weight gradient"), "language_model.layers.2.post_attention_layernorm"
right(task, "llava_of_readings", "a tree, fused weights, channels last, complex turns", LlavaOfReadings)
right(task, "llava_of_stacked_weights", "transposed stacks, named axes, an index put", StackedLlava)
wrong(
    task,
    LlavaOfReadings,
    llava_second_vision_layer_with_exact_gelu=("another gelu", "vision_tower.encoder.layers.1.mlp"),
    llava_last_patch_left_out_for_the_class_token=("a slice at the wrong end", ""),
    llava_third_mlp_norm_with_a_constant_root=("detach", THIRD, SLOPES),
    llava_last_norm_with_a_larger_eps=("another eps", "language_model.norm"),
)
wrong(
    task,
    StackedLlava,
    llava_patches_laid_out_column_by_column=("another patch order", "vision_tower.embeddings"),
    llava_projector_gelu_by_tanh=("another gelu", "multi_modal_projector.act"),
    llava_rotary_stretched_in_evaluation=("a stretch in eval", "language_model.rotary_emb", "eval"),
    llava_second_decoder_layer_tiles_its_key_heads=("tiled heads", "language_model.layers.1.self_attn"),
)
