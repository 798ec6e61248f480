"""Two ports of Qwen2-VL: products with norms inside, one frame after the other, and stacks, frames padded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _fourteenth_qwen_vision as qwen
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fourteenth_qwen_vision", qwen.Qwen2VL, qwen.conversations, qwen.next_token)


def even(x: Tensor, gain: Tensor, shift: Tensor | None = None) -> Tensor:
    if shift is None:
        return gain * x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return F.layer_norm(x, gain.shape, gain, shift, 1e-6)


def quick(x: Tensor) -> Tensor:
    return x * (1.702 * x).sigmoid()


def turned(x: Tensor, angles: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.addcmul(x * angles.cos(), torch.cat([-b, a], -1), angles.sin())


def seats(frames: list[tuple[int, int]], by_squares: bool = True) -> Tensor:
    i = torch.cat([torch.arange(h * w) for h, w in frames])
    w = torch.tensor([w for h, w in frames for _ in range(h * w)])
    square = i // (2 * w) * 2 + i % 4 // 2, i % (2 * w) // 4 * 2 + i % 2
    return torch.stack(square if by_squares else (i // w, i % w), 1)


def places(image: Tensor, kept: Tensor, grids: Tensor, early: bool = False) -> Tensor:
    """Time, row and column [N, T, 3] of each token; the last of an image moves on by its longest side."""
    grids = grids // grids.new_tensor([1, 2, 2])
    sizes, steps = grids.prod(1), kept.clone()
    i, (_, h, w) = torch.arange(len(steps[image])).to(kept), grids.repeat_interleave(sizes, 0).T
    i = i - (sizes.cumsum(0) - sizes).repeat_interleave(sizes)
    steps[image] = torch.zeros_like(i).index_put((sizes.cumsum(0) - 1,), grids.amax(1) - int(early))
    start = (steps.cumsum(1) - steps)[..., None].repeat(1, 1, 3)
    start[image] += torch.stack([i // (h * w), i // w % h, i % w], 1)
    return start


class Dense(nn.Module):
    """Layers of one input as one product, the input normed if there is a norm; ``fold`` joins two axes."""

    def __init__(self, norm: nn.Module | None, *layers: nn.Linear, fold: bool = False):
        super().__init__()
        self.weight, self.fold = leaf(torch.cat([layer.weight for layer in layers])), fold
        self.bias = None if layers[0].bias is None else leaf(torch.cat([layer.bias for layer in layers]))
        self.gain = None if norm is None else leaf(norm.weight)
        self.offset = leaf(norm.bias) if isinstance(norm, nn.LayerNorm) else None

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.gain is None else even(x, self.gain, self.offset)
        return F.linear(x.flatten(-2) if self.fold else x, self.weight, self.bias)


class Block(nn.Module):
    def __init__(self, norms: list, qkv: list, out: nn.Linear, mlp: list, heads: list, turn: tuple):
        super().__init__()
        self.entry, self.exit = Dense(norms[0], *qkv), Dense(None, out)
        self.rise, self.fall = Dense(norms[1], *mlp[:-1]), Dense(None, mlp[-1])
        self.heads, self.gated, self.scale, (self.axis, speeds) = heads, len(mlp) == 3, 1.0, turn
        self.register_buffer("speeds", speeds.repeat(len(self.axis) // len(speeds)))

    def forward(self, x: Tensor, where: Tensor, lengths: list[int], mask: Tensor | None = None) -> Tensor:
        angles = (where[..., self.axis] * self.speeds)[:, None]
        q, k, v = self.entry(x).unflatten(2, (sum(self.heads), -1)).transpose(1, 2).split(self.heads, 1)
        q, k = turned(q, angles) * q.shape[3] ** -0.5, turned(k, angles)
        frames = zip(*(part.split(lengths, 2) for part in (q, k, v)), strict=True)
        y = [F.scaled_dot_product_attention(*f, mask, scale=self.scale, enable_gqa=True) for f in frames]
        x = x + self.exit(torch.cat(y, 2).transpose(1, 2).flatten(2))
        y, *others = self.rise(x).chunk(1 + self.gated, 2)
        return x + self.fall(F.silu(y) * others[0] if self.gated else quick(y))


class Tower(nn.Module):
    def __init__(self, visual: nn.Module):
        super().__init__()
        self.patch = leaf(visual.patch_embed.proj.weight.flatten(1).T)
        self.blocks, by = nn.ModuleList(), ([0, 0, 1, 1] * 2, visual.rotary_pos_emb.inv_freq)
        for b in visual.blocks:
            self.blocks.append(Block((b.norm1, b.norm2), [b.attn.qkv], b.attn.proj, b.mlp[::2], [2] * 3, by))
        first, _, last = visual.merger.mlp
        self.join, self.last = Dense(visual.merger.ln_q, first, fold=True), Dense(None, last)

    def forward(self, x: Tensor, grids: Tensor) -> Tensor:
        frames = [(h, w) for t, h, w in grids.tolist() for _ in range(t)]
        where, x = seats(frames, self.by_squares)[None].to(grids), (x @ self.patch)[None]
        for block in self.blocks:
            x = block(x, where, [h * w for h, w in frames])
        return self.last(self.bend(self.join(x[0].unflatten(0, (-1, 4)))))


class QwenReader(Port):
    def take(self, model: nn.Module) -> None:
        text, self.tower, self.layers = model.model, Tower(model.visual), nn.ModuleList()
        self.words, self.head = leaf(text.embed_tokens.weight), Dense(text.norm, model.lm_head)
        turn = [0, 1, 1, 2, 2] * 2, text.rotary_emb.inv_freq
        for layer in text.layers:
            a, m, norms = layer.self_attn, layer.mlp, (layer.input_layernorm, layer.post_attention_layernorm)
            qkv, mlp = (a.q_proj, a.k_proj, a.v_proj), (m.gate_proj, m.up_proj, m.down_proj)
            self.layers.append(Block(norms, qkv, a.o_proj, mlp, [4, 2, 2], turn))
        self.idle = qwen.END if self.fault == "qwenvl_end_token_taken_for_padding_never_learns" else None
        self.tower.by_squares = self.fault != "qwenvl_patch_places_in_raster_order"
        self.tower.bend = quick if self.fault == "qwenvl_merger_bends_by_quick_gelu" else F.gelu
        if self.fault == "qwenvl_first_patch_attention_scaled_twice":
            self.tower.blocks[0].scale = None
        if self.fault == "qwenvl_first_text_sections_twice_as_long":
            self.layers[0].axis = sorted(self.layers[0].axis)

    def forward(self, patches: Tensor, grids: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
        image, own = ids == qwen.IMAGE, torch.eye(ids.shape[1], dtype=torch.bool, device=ids.device)
        index = torch.where(image, image.flatten().cumsum(0).view_as(ids) + len(self.words) - 1, ids)
        x = F.embedding(index, torch.cat([self.words, self.tower(patches, grids)]), self.idle)
        where, mask = places(image, kept, grids), (kept.bool()[:, None] | own).tril()[:, None]
        for layer in self.layers:
            x = layer(x, where, [ids.shape[1]], mask)
        return self.head(x)


class QwenStacks(Port):
    """Like weights of all blocks in stacks; frames padded to the longest, queries grouped by their keys."""

    def take(self, model: nn.Module) -> None:
        eye, text = model.visual, model.model
        self.eye, self.text = nn.ParameterDict(), nn.ParameterDict()
        for held, blocks in ((self.eye, eye.blocks), (self.text, text.layers)):
            for name, _ in blocks[0].named_parameters():
                held["_".join(name.split(".")[-2:])] = pile(b.get_parameter(name).t() for b in blocks)
        self.merger = nn.ParameterList(leaf(weight.t()) for weight in eye.merger.parameters())
        self.patch = leaf(eye.patch_embed.proj.weight.permute(1, 2, 3, 4, 0))
        self.words, self.gain = leaf(text.embed_tokens.weight), leaf(text.norm.weight)
        self.head, turns = leaf(model.lm_head.weight.T), F.one_hot(torch.tensor([0, 1, 1, 2, 2] * 2)).T
        self.register_buffer("speeds", eye.rotary_pos_emb.inv_freq.clone())
        self.register_buffer("turns", turns * text.rotary_emb.inv_freq.repeat(2))

    def look(self, i: int, x: Tensor, angles: Tensor, table: Tensor) -> Tensor:
        w, real = {name: stack[i] for name, stack in self.eye.items()}, table < len(x)
        y = torch.addmm(w["qkv_bias"], even(x, w["norm1_weight"], w["norm1_bias"]), w["qkv_weight"])
        y = y.unflatten(1, (3, qwen.VISION_HEADS, -1))
        rows = torch.cat([turned(y[:, :2], angles[:, None, None]), y[:, 2:]], 1)
        q, k, v = F.pad(rows, (0, 0, 0, 0, 0, 0, 0, 1))[table].unbind(2)
        scores = torch.einsum("fqhd,fkhd->fhqk", q, k) / q.shape[3] ** 0.5
        if not (self.fault == "qwenvl_last_patch_attention_counts_empty_keys" and i == 1):
            scores = scores.masked_fill(~real[:, None, None], float("-inf"))
        y = torch.einsum("fhqk,fkhd->fqhd", scores.softmax(3), v)[real].flatten(1)
        x = x + y @ w["proj_weight"] + w["proj_bias"]
        y = even(x, w["norm2_weight"], w["norm2_bias"]) @ w["fc1_weight"] + w["fc1_bias"]
        return x + quick(y) @ w["fc2_weight"] + w["fc2_bias"]

    def read(self, i: int, x: Tensor, angles: Tensor, mask: Tensor) -> Tensor:
        w = {name: stack[i] for name, stack in self.text.items()}
        y, shape = even(x, w["input_layernorm_weight"]), (qwen.KEY_HEADS, -1, angles.shape[2])
        q, k, v = (y @ w[f"{name}_proj_weight"] + w[f"{name}_proj_bias"] for name in "qkv")
        q, k = turned(q.unflatten(2, shape), angles[:, :, None, None]), k.unflatten(2, (shape[0], -1))
        scores = torch.einsum("ntgrd,nsgd->ngrts", q, turned(k, angles[:, :, None])) / shape[2] ** 0.5
        shares = scores.masked_fill(~mask[:, None, None], float("-inf")).softmax(4)
        x = x + torch.einsum("ngrts,nsgd->ntgrd", shares, v.view_as(k)).flatten(2) @ w["o_proj_weight"]
        y = even(x, w["post_attention_layernorm_weight"])
        return x + (F.silu(y @ w["gate_proj_weight"]) * (y @ w["up_proj_weight"])) @ w["down_proj_weight"]

    def forward(self, patches: Tensor, grids: Tensor, ids: Tensor, kept: Tensor) -> Tensor:
        frames = [(h, w) for t, h, w in grids.tolist() for _ in range(t)]
        spans = torch.arange(len(patches), device=ids.device).split([h * w for h, w in frames])
        table = nn.utils.rnn.pad_sequence(spans, True, len(patches))
        x = torch.einsum("pcfhw,cfhwo->po", patches.unflatten(1, qwen.PATCH), self.patch)
        angles = (seats(frames).to(ids)[..., None] * self.speeds).flatten(1).repeat(1, 2)
        x = self.look(1, self.look(0, x, angles, table), angles, table)
        gain, shift, square, bias, last, last_bias = self.merger
        square, x = square.unflatten(0, (4, -1)), even(x, gain, shift).unflatten(0, (-1, 4))
        image, past = ids == qwen.IMAGE, torch.ones(2 * ids.shape[1:], device=ids.device).tril().bool()
        y = F.gelu(torch.einsum("nic,ico->no", x, square) + bias) @ last + last_bias
        where = places(image, kept, grids, self.fault == "qwenvl_text_after_an_image_begins_one_early")
        angles, seen = where.to(x) @ self.turns, past & ((kept[:, None] > 0) | torch.eye(len(past)).to(past))
        blind = self.fault == "qwenvl_last_text_layer_sees_padding_in_evaluation" and not self.training
        x = self.read(0, self.words[ids].index_put((image,), y), angles, seen)
        return even(self.read(1, x, angles, past[None] if blind else seen), self.gain) @ self.head


right(task, "qwenvl_of_blocks_of_one_kind", "one block for both networks", QwenReader)
right(task, "qwenvl_of_stacks_with_padded_frames", "stacked weights, frames padded", QwenStacks)
gelu = ("visual.merger.mlp.1", "visual.merger.mlp", "visual.merger")
wrong(
    task,
    QwenReader,
    qwenvl_patch_places_in_raster_order=("another order of places", "visual"),
    qwenvl_first_patch_attention_scaled_twice=("scaled twice", "visual.blocks.0.attn"),
    qwenvl_merger_bends_by_quick_gelu=("another activation", gelu),
    qwenvl_first_text_sections_twice_as_long=("sections misread", "model.layers.0.self_attn"),
    qwenvl_end_token_taken_for_padding_never_learns=("padding row", "model.embed_tokens", "weight gradient"),
)
wrong(
    task,
    QwenStacks,
    qwenvl_text_after_an_image_begins_one_early=("off by one", ""),
    qwenvl_last_patch_attention_counts_empty_keys=("padding counted in a softmax", "visual.blocks.1.attn"),
    qwenvl_last_text_layer_sees_padding_in_evaluation=("mask dropped", "model.layers.1.self_attn", "eval"),
)
