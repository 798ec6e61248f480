"""Two ports of a small CoCa: a tree with the tokens first, and one class of stacks by shape."""

import math
from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fortieth_co_ca import CoCa, caption_and_contrast, captions
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fortieth_co_ca", CoCa, captions, caption_and_contrast)


class Step(nn.Module):
    """Attention of [T, N, C] to itself or a picture, and what is beside it; split weights."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        self.norm, self.turn, self.silent, self.ahead = deepcopy(layer.norm), False, False, 0
        if hasattr(layer, "attn_out"):
            self.turn, out, down = layer.causal, layer.attn_out, layer.ff_out[1:]
            q, k, v, ff = layer.fused_attn_ff_proj.weight.split(layer.fused_dims)
        else:
            q, (k, v), out = layer.to_q.weight, layer.to_kv.weight.chunk(2), layer.to_out
            ff, down = (layer.ff[0].weight, layer.ff[2:]) if layer.ff else (None, ())
        self.q, self.k, self.v, self.out = map(leaf, (q, k, v, out.weight))
        self.beside = nn.ParameterList(leaf(w) for x in down for w in (*ff.chunk(2), x.weight))

    def forward(self, x: Tensor, y: Tensor | None = None, seen: Tensor | None = None) -> Tensor:
        z = self.norm(x)
        y = z if y is None else y
        q, k, v = z @ self.q.T, (y.detach() if self.silent else y) @ self.k.T, y @ self.v.T
        q, k, v = (t.unflatten(2, (-1, 6)).permute(1, 2, 0, 3) for t in (q, k, v))
        if self.turn:
            q, k = self.turned(q), self.turned(k)
            ones = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).tril(self.ahead)
            seen = ones if seen is None else ones & seen
        k, v = (t.expand(-1, q.shape[1], -1, -1) for t in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        y = y.permute(2, 0, 1, 3).flatten(2) @ self.out.T
        if not self.beside:
            return y
        up, gate, down = self.beside
        return x + y + (z @ up.T * F.silu(z @ gate.T)) @ down.T

    def turned(self, x: Tensor) -> Tensor:
        half = 3
        rates = torch.pow(10000, -torch.arange(half).float() / half).to(x)
        angle = torch.outer(torch.arange(x.shape[2]).to(x), rates)
        y = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angle), angle)
        return torch.cat([y.real, y.imag], -1)


class CaptionTree(Port):
    """Steps over [T, N, C], patches by a convolution, split weights, turns by complex numbers."""

    def take(self, model: CoCa) -> None:
        sight, pool, fault = model.img_encoder, model.img_attn_pool, self.fault
        weight = sight.to_patch_embedding.weight.unflatten(1, (4, 4, 3)).permute(0, 3, 1, 2)
        self.weight, self.bias = leaf(weight), leaf(sight.to_patch_embedding.bias)
        self.grid = leaf(sight.pos_embedding.unflatten(1, (2, 3))[0].movedim(2, 0))
        self.sight, self.pool = nn.ModuleList(Step(x.fn) for x in sight.layers), Step(pool)
        norms = sight.norm, pool.context_norm, model.img_attn_pool_norm, model.text_cls_norm
        self.norms = nn.ModuleList(map(deepcopy, (*norms, model.to_logits[0])))
        self.table, self.end = leaf(model.token_emb.weight), leaf(model.text_cls_token)
        self.queries, self.heat = leaf(model.img_queries[:, None]), leaf(model.temperature)
        self.early = nn.ModuleList(Step(x.fn) for x in model.unimodal_layers)
        self.late = nn.ModuleList(Step(x.fn) for pair in model.multimodal_layers for x in pair)
        self.ends = pile(x.to_latents.weight for x in (model.text_to_latents, model.img_to_latents))
        self.pool.silent = fault == "co_ca_pooler_keys_without_gradient_to_the_picture"
        self.late[0].ahead = int(fault == "co_ca_first_multimodal_block_sees_one_token_ahead")
        if fault == "co_ca_pooled_norm_with_a_larger_epsilon":
            self.norms[2].eps = 1e-4

    def forward(self, text: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        x, grid = F.conv2d(images, self.weight, self.bias, stride=4).flatten(2), self.grid
        if self.fault == "co_ca_patch_positions_by_columns":
            grid = grid.transpose(1, 2)
        x = (x + grid.flatten(1)).permute(2, 0, 1)
        for step in self.sight:
            x = step(x)
        queries = self.queries.expand(-1, len(text), -1)
        first, *rest = self.norms[2](self.pool(queries, self.norms[1](self.norms[0](x))))
        y = torch.cat([self.table[text.T], self.end.expand(1, len(text), -1)])
        seen = torch.ones(len(text), 1, len(y), len(y), dtype=torch.bool, device=text.device)
        seen[:, 0, -1, :-1] = text != 0
        for step in self.early:
            y = step(y, seen=seen)
        ends = torch.stack([self.norms[3](y[-1]), first])
        a, b = F.normalize(ends @ self.ends.mT, dim=2)
        y, picture = y[:-1], torch.stack(rest)
        for i, step in enumerate(self.late):
            y = step(y, picture if i % 2 else None)
        return (self.norms[4](y) @ self.table.T).transpose(0, 1), self.heat.exp() * a @ b.T


class StackedCaptioner(Port):
    """All weights of one shape in one stack; attention by exponentials, turns by a matrix for each place."""

    def take(self, model: CoCa) -> None:
        self.where, groups = {}, {}
        for name, weight in model.named_parameters():
            group = groups.setdefault("x".join(map(str, weight.shape)), [])
            self.where[name] = "x".join(map(str, weight.shape)), len(group)
            group.append(weight)
        self.stacks = nn.ParameterDict({shape: pile(group) for shape, group in groups.items()})

    def get(self, name: str) -> Tensor:
        shape, i = self.where[name]
        return self.stacks[shape][i]

    def product(self, x: Tensor, name: str) -> Tensor:
        y = x @ self.get(name + ".weight").T
        return y + self.get(name + ".bias") if name + ".bias" in self.where else y

    def norm(self, x: Tensor, name: str) -> Tensor:
        x = x - x.mean(-1, True)
        x = x / (x.square().mean(-1, True) + 1e-5).sqrt()
        return torch.addcmul(self.get(name + ".bias"), x, self.get(name + ".weight"))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor | float = 1.0) -> Tensor:
        rates = torch.exp(q @ k.mT / math.sqrt(q.shape[-1])) * seen
        return (rates @ v / rates.sum(-1, True)).transpose(1, 2).flatten(2)

    def own(self, x: Tensor, name: str, seen: Tensor | None = None) -> Tensor:
        y = self.product(self.norm(x, name + ".norm"), name + ".fused_attn_ff_proj")
        q, k, v = y[..., :30].unflatten(2, (5, 6)).transpose(1, 2).split([3, 1, 1], 1)
        if seen is not None:
            rates = 1 / 10000 ** (torch.arange(0, 6, 2).float() / 6)
            angle = torch.arange(x.shape[1]).to(x)[:, None] * rates.to(x)
            cos, sin = angle.cos().diag_embed(), angle.sin().diag_embed()
            turn = torch.cat([torch.cat([cos, sin], 2), torch.cat([-sin, cos], 2)], 1)
            q, k = ((z[..., None, :] @ turn)[..., 0, :] for z in (q, k))
        fault = "co_ca_second_unimodal_block_gates_the_other_half"
        swap = self.fault == fault and name == "unimodal_layers.1.fn"
        x = x + self.product(self.attend(q, k, v, 1.0 if seen is None else seen), name + ".attn_out")
        up, gate = y[..., 30:].tensor_split(2, 2)[:: -1 if swap else 1]
        return x + self.product(up * F.silu(gate), name + ".ff_out.1")

    def across(self, x: Tensor, y: Tensor, name: str) -> Tensor:
        q = self.product(x, name + ".to_q").unflatten(2, (3, 6)).transpose(1, 2)
        k, v = self.product(y, name + ".to_kv")[:, None].tensor_split(2, 3)
        return self.product(self.attend(q, k, v), name + ".to_out")

    def see(self, images: Tensor) -> Tensor:
        x = F.unfold(images, 4, stride=4).mT.unflatten(2, (3, 16)).mT.flatten(2)
        x = self.product(x, "img_encoder.to_patch_embedding") + self.get("img_encoder.pos_embedding")
        for i in (0, 1):
            x = self.own(x, f"img_encoder.layers.{i}.fn")
        x = self.norm(self.norm(x, "img_encoder.norm"), "img_attn_pool.context_norm")
        queries = self.norm(self.get("img_queries")[None], "img_attn_pool.norm")
        return self.norm(self.across(queries, x, "img_attn_pool"), "img_attn_pool_norm")

    def forward(self, text: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
        table, picture, last = self.get("token_emb.weight"), self.see(images), text.shape[1]
        x = torch.cat([table[text], self.get("text_cls_token").repeat(len(text), 1, 1)], 1)
        seen = x.new_ones(len(text), 1, last + 1, last + 1).tril()
        seen[:, 0, -1, :-1] = (text != 0).to(x)
        seen[:, 0, -1, -1] = self.fault != "co_ca_class_token_does_not_see_itself"
        for i in (0, 1):
            x = self.own(x, f"unimodal_layers.{i}.fn", seen)
        ends, x = self.norm(x[:, -1], "text_cls_norm"), x[:, :-1]
        for i in (0, 1):
            x = self.own(x, f"multimodal_layers.{i}.0.fn", seen[:, :, :-1, :-1])
            name = f"multimodal_layers.{i}.1.fn"
            y = self.norm(x, name + ".norm")
            bare = self.fault == "co_ca_last_cross_feedforward_skips_the_norm" and i == 1
            up, gate = self.product(x if bare else y, name + ".ff.0").tensor_split(2, 2)
            x = x + self.across(y, picture[:, 1:], name) + self.product(up * F.silu(gate), name + ".ff.2")
        a = self.product(ends, "text_to_latents.to_latents")
        b = self.product(picture[:, 0], "img_to_latents.to_latents")
        cold = self.fault == "co_ca_cosines_without_temperature_in_evaluation" and not self.training
        heat = 1.0 if cold else self.get("temperature").exp()
        sizes = torch.outer(a.norm(dim=1), b.norm(dim=1))
        return self.norm(x, "to_logits.0") @ table.T, heat * (a @ b.T) / sizes


SLOPES, POOL = ("input gradient", "weight gradient"), ("img_attn_pool", "img_attn_pool.to_kv")
right(task, "co_ca_tree_with_tokens_first", "a tree, split weights, complex turns", CaptionTree)
right(task, "co_ca_flat_stacks_by_shape", "flat code, stacks by shape, hand-made attention", StackedCaptioner)
wrong(
    task,
    CaptionTree,
    co_ca_patch_positions_by_columns=("another order of positions", "img_encoder"),
    co_ca_pooled_norm_with_a_larger_epsilon=("another epsilon", "img_attn_pool_norm"),
    co_ca_pooler_keys_without_gradient_to_the_picture=("detach", POOL, SLOPES),
    co_ca_first_multimodal_block_sees_one_token_ahead=("a mask off by one", "multimodal_layers.0.0.fn"),
)
wrong(
    task,
    StackedCaptioner,
    co_ca_class_token_does_not_see_itself=("another mask", ""),
    co_ca_second_unimodal_block_gates_the_other_half=("swapped halves", "unimodal_layers.1.fn.ff_out.0"),
    co_ca_last_cross_feedforward_skips_the_norm=("a norm left out", "multimodal_layers.1.1.fn"),
    co_ca_cosines_without_temperature_in_evaluation=("a factor left out in eval", "", "eval"),
)
