"""Two ports of a small OWL-ViT: a tree with the channels last, and one class of stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_first_owl_vit import COLUMNS, EMPTY, PATCH, ROWS, TEXT, VISION, matched, scenes
from bench.held_back._thirty_first_owl_vit import OwlViTForObjectDetection as Owl

task = few("thirty_first_owl_vit", Owl, scenes, matched)


def joint(*layers: nn.Linear) -> nn.Linear:
    """Layers side by side, as one."""
    weight, bias = torch.cat([x.weight for x in layers]), torch.cat([x.bias for x in layers])
    return filled(nn.Linear(*weight.T.shape), weight, bias)


def prior(x: Tensor, less: float = 0.0) -> Tensor:
    """Log odds of the boxes of the grid, [P, 4]."""
    cell = torch.arange(ROWS * COLUMNS, device=x.device).to(x)
    middle = (cell % COLUMNS + 1 - less) / COLUMNS, ((cell / COLUMNS).floor() + 1 - less) / ROWS
    p = torch.stack([*middle, torch.full_like(cell, 1 / COLUMNS), torch.full_like(cell, 1 / ROWS)], 1)
    return ((p + 1e-4) / (1 + 1e-4 - p)).log()


def unseen(ids: Tensor, kept: Tensor) -> Tensor:
    return ids.new_ones(ids.shape[1], ids.shape[1]).triu(1).bool() | (kept == 0)[:, None, None]


class Block(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        part, self.smooth = layer.self_attn, False
        self.heads, self.before, self.between = part.num_heads, layer.layer_norm1, layer.layer_norm2
        self.qkv, self.out = joint(part.q_proj, part.k_proj, part.v_proj), joint(part.out_proj)
        self.up, self.down = joint(layer.mlp.fc1), joint(layer.mlp.fc2)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(self.before(x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.up(self.between(x))
        return x + self.down(F.gelu(y) if self.smooth else F.silu(1.702 * y) / 1.702)


class Eye(nn.Module):
    """Pictures [N, H, W, 3] -> the token of the whole [N, 1, D], and those of the patches [N, P, D]."""

    def __init__(self, vision: nn.Module):
        super().__init__()
        made, places = vision.embeddings, vision.embeddings.position_embedding.weight
        self.kernel = leaf(made.patch_embedding.weight.permute(2, 3, 1, 0).flatten(0, 2))
        self.whole, self.place, self.places = leaf(made.class_embedding), leaf(places[0]), leaf(places[1:])
        self.before, self.after = vision.pre_layernorm, vision.post_layernorm
        self.tower, self.by_columns = nn.Sequential(*map(Block, vision.encoder.layers)), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH)).transpose(2, 3)
        x = x.transpose(1, 2) if self.by_columns else x
        patches = self.before(x.flatten(3).flatten(1, 2) @ self.kernel + self.places)
        whole = self.before(self.whole + self.place).expand(len(x), 1, -1)
        return self.after(self.tower(torch.cat([whole, patches], 1))).tensor_split([1], 1)


class OwlOfTrees(Port):
    """An eye, a text tower, and heads; shift and scale of the logits are one product."""

    def take(self, model: Owl) -> None:
        fault, heads, box = self.fault, model.class_head, model.box_head
        text, self.eye, self.norm = model.owlvit.text_model, Eye(model.owlvit.vision_model), model.layer_norm
        self.words, self.places = (leaf(x.weight) for x in text.embeddings.children())
        self.tower, self.last = nn.ModuleList(map(Block, text.encoder.layers)), text.final_layer_norm
        self.turn = leaf(model.owlvit.text_projection.weight.T)
        self.seen = joint(heads.dense0, heads.logit_shift, heads.logit_scale)
        self.box = nn.Sequential(box.dense0, nn.GELU(), box.dense1, nn.GELU(), box.dense2)
        self.eye.by_columns = fault == "owl_vit_patches_counted_by_columns"
        self.eye.tower[1].smooth = fault == "owl_vit_second_picture_layer_takes_the_exact_gelu"

    def read(self, ids: Tensor, kept: Tensor) -> Tensor:
        x, bias = self.words[ids] + self.places[: ids.shape[1]], -1e30 * unseen(ids, kept).to(self.turn)
        for block in self.tower:
            x = block(x, bias)
        end = F.one_hot(ids.argmax(1), ids.shape[1]).to(x)
        return F.normalize(self.last(torch.einsum("mt,mtd->md", end, x)) @ self.turn, dim=1)

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        whole, patches = self.eye(pixel_values.movedim(1, 3))
        held = self.fault == "owl_vit_patches_times_a_detached_class_token"
        x = self.norm((whole.detach() if held else whole) * patches)
        y, shift, scale = self.seen(x).tensor_split([-2, -1], 2)
        asked = torch.stack([self.read(*pair) for pair in zip(input_ids, attention_mask, strict=True)])
        y, asked = (v / (v.square().sum(2, True).sqrt() + 1e-6) for v in (y, asked))
        logits = (y @ asked.mT + shift) * (1 + F.elu(scale))
        if self.training or self.fault != "owl_vit_empty_queries_answered_in_evaluation":
            logits = torch.where(input_ids[:, None, :, 0] > 0, logits, EMPTY)
        return {"logits": logits, "pred_boxes": (self.box(x) + prior(x)).sigmoid()}


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight, layer.bias[:, None]], 1)


def sheets(layer: nn.Module) -> tuple[Tensor, ...]:
    part, one, two = layer.self_attn, layer.layer_norm1, layer.layer_norm2
    norms = torch.stack([one.weight, one.bias, two.weight, two.bias])
    inward = torch.stack([sheet(x) for x in (part.q_proj, part.k_proj, part.v_proj)])
    return norms, inward, sheet(part.out_proj), sheet(layer.mlp.fc1), sheet(layer.mlp.fc2)


def product(x: Tensor, rows: Tensor) -> Tensor:
    return torch.einsum("...i,oi->...o", x, rows[:, :-1]) + rows[:, -1]


def normed(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    x = x - x.mean(-1, True)
    return x * (x.square().mean(-1, True) + 1e-5).rsqrt() * gain + offset


class StackedOwl(Port):
    """Stacks of sheets by tower, all norms outside of them packed, and functions."""

    def take(self, model: Owl) -> None:
        owl, heads, box = model.owlvit, model.class_head, model.box_head
        see, read, start = owl.vision_model, owl.text_model, owl.vision_model.embeddings
        towers = [[pile(x) for x in zip(*map(sheets, t.encoder.layers), strict=True)] for t in (see, read)]
        self.w = nn.ParameterList(towers[0] + towers[1])
        norms = see.pre_layernorm, see.post_layernorm, model.layer_norm, read.final_layer_norm
        *three, last = (torch.stack([x.weight, x.bias]) for x in norms)
        self.norms, self.end = pile(three), leaf(last)
        self.patch, self.whole = leaf(start.patch_embedding.weight.flatten(1)), leaf(start.class_embedding)
        self.spots = leaf(start.position_embedding.weight)
        self.words, self.places = (leaf(x.weight) for x in read.embeddings.children())
        self.turn = leaf(owl.text_projection.weight)
        self.seen = leaf(torch.cat([sheet(x) for x in (heads.logit_shift, heads.logit_scale, heads.dense0)]))
        self.boxes = nn.ParameterList(leaf(sheet(x)) for x in (box.dense0, box.dense1, box.dense2))

    def tower(self, x: Tensor, first: int, heads: int, hidden: Tensor | None = None) -> Tensor:
        for i, (norms, inward, out, up, down) in enumerate(zip(*self.w[first : first + 5], strict=True)):
            y = normed(x, norms[0], norms[1])
            q, k, v = (product(y, rows).unflatten(2, (heads, -1)) for rows in inward)
            scores = torch.einsum("nqhd,nkhd->nhqk", q, k) / q.shape[-1] ** 0.5
            if hidden is not None:
                early = self.fault == "owl_vit_first_text_layer_sees_later_words" and i == 0
                scores = scores.masked_fill(hidden[:, :, -1:] if early else hidden, -1e30)
            shares = (scores - scores.logsumexp(3, True)).exp()
            x = x + product(torch.einsum("nhqk,nkhd->nqhd", shares, v).flatten(2), out)
            y = product(normed(x, norms[2], norms[3]), up)
            x = x + product(y / (1 + torch.exp(-1.702 * y)), down)
        return x

    def asked(self, ids: Tensor, kept: Tensor) -> Tensor:
        places = self.places.detach() if self.fault == "owl_vit_text_positions_held_fixed" else self.places
        x = self.tower(F.embedding(ids, self.words) + places[: ids.shape[1]], 5, TEXT[1], unseen(ids, kept))
        x = normed(x.take_along_dim(ids.argmax(1)[:, None, None], 1)[:, 0], *self.end) @ self.turn.T
        return x * x.square().sum(1, True).rsqrt()

    def forward(self, pixel_values: Tensor, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        asked = self.asked(input_ids.flatten(0, 1), attention_mask.flatten(0, 1))
        x = F.unfold(pixel_values, PATCH, stride=PATCH).mT @ self.patch.T
        x = torch.cat([self.whole.expand(len(x), 1, -1), x], 1) + self.spots
        x = normed(self.tower(normed(x, *self.norms[0]), 0, VISION[1]), *self.norms[1])
        x = normed(torch.einsum("npd,nd->npd", x[:, 1:], x[:, 0]), *self.norms[2])
        shift, scale, y = product(x, self.seen).split([1, 1, len(self.seen) - 2], 2)
        lengths = y.norm(dim=2, keepdim=True) + 1e-6, asked.norm(dim=1, keepdim=True) + 1e-6
        logits = (y / lengths[0]) @ (asked / lengths[1]).view(*input_ids.shape[:2], -1).mT
        scale = torch.where(scale > 0, scale + 1, scale.clamp(max=0).exp())
        late = self.fault == "owl_vit_logits_shifted_after_their_scale"
        logits = logits * scale + (shift if late else shift * scale)
        here = (input_ids[:, None, :, 0] > 0).to(x)
        y = F.gelu(product(F.gelu(product(x, self.boxes[0])), self.boxes[1]))
        half = self.fault == "owl_vit_box_bias_at_the_middle_of_the_patch"
        odds = product(y, self.boxes[2]) + prior(x, 0.5 if half else 0.0)
        return {"logits": logits * here + EMPTY * (1 - here), "pred_boxes": 1 / (1 + torch.exp(-odds))}


VIEW, READ = "owlvit.vision_model", "owlvit.text_model"
SLOPES, SECOND = ("input gradient", "weight gradient"), f"{VIEW}.encoder.layers.1.mlp"
HELD = (f"{READ}.embeddings.position_embedding", f"{READ}.embeddings")
right(task, "owl_vit_of_trees_with_channels_last", "a tree, fused heads, a split class token", OwlOfTrees)
right(task, "owl_vit_of_stacked_weights", "packed stacks, functions, einsum", StackedOwl)
wrong(
    task,
    OwlOfTrees,
    owl_vit_patches_counted_by_columns=("another order of patches", f"{VIEW}.embeddings"),
    owl_vit_second_picture_layer_takes_the_exact_gelu=("activation", (f"{SECOND}.activation_fn", SECOND)),
    owl_vit_patches_times_a_detached_class_token=("detach", "", SLOPES),
    owl_vit_empty_queries_answered_in_evaluation=("no mask in eval", "class_head", "eval"),
)
wrong(
    task,
    StackedOwl,
    owl_vit_text_positions_held_fixed=("detach", HELD, "weight gradient"),
    owl_vit_first_text_layer_sees_later_words=("no causal mask", f"{READ}.encoder.layers.0.self_attn"),
    owl_vit_logits_shifted_after_their_scale=("another order of operations", "class_head"),
    owl_vit_box_bias_at_the_middle_of_the_patch=("an offset of half", ""),
)
