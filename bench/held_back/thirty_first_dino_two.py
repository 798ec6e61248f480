"""Two ports of a small DINOv2: a tree of split projections, and flat code over stacked weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_first_dino_two as dino
from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("thirty_first_dino_two", dino.SSLMetaArch, dino.crops, dino.summed)
HEADS, WIDTH, PATCH, GRID = dino.HEADS, dino.WIDTH, dino.PATCH, dino.GRID


def dense(weight: Tensor, bias: Tensor) -> nn.Linear:
    return filled(nn.Linear(*weight.shape[::-1]), weight, bias)


class Layer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.before, self.between = block.norm1, block.norm2
        qkv, pair = block.attn.qkv, block.mlp.w12
        self.query, self.key, self.value = map(dense, qkv.weight.chunk(3), qkv.bias.chunk(3))
        self.gate, self.up = map(dense, pair.weight.chunk(2), pair.bias.chunk(2))
        self.out, self.down = (dense(x.weight, x.bias) for x in (block.attn.proj, block.mlp.w3))
        self.first, self.second, self.size = leaf(block.gamma1), leaf(block.gamma2), WIDTH // HEADS

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        q, k, v = (f(y).unflatten(2, (HEADS, -1)) for f in (self.query, self.key, self.value))
        mixing = (torch.einsum("bqhd,bkhd->bhqk", q, k) / self.size**0.5).softmax(3)
        x = torch.addcmul(x, self.first, self.out(torch.einsum("bhqk,bkhd->bqhd", mixing, v).flatten(2)))
        y = self.between(x)
        return torch.addcmul(x, self.second, self.down(F.silu(self.gate(y)) * self.up(y)))


class Tower(nn.Module):
    def __init__(self, body: nn.Module):
        super().__init__()
        self.paint = dense(body.patch_embed.proj.weight.flatten(1), body.patch_embed.proj.bias)
        front = body.cls_token, body.mask_token, body.register_tokens
        self.front, self.blank, self.extra = (leaf(x.view(-1, WIDTH)) for x in front)
        self.place, self.field = leaf(body.pos_embed[0, :1]), leaf(body.pos_embed[0, 1:].unflatten(0, GRID))
        self.layers = nn.Sequential(*map(Layer, body.blocks))
        self.last, self.late = filled(nn.LayerNorm(WIDTH, 1e-6), body.norm.weight, body.norm.bias), False

    def forward(self, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        size, field = [n // PATCH for n in x.shape[2:]], self.field
        if size != [*GRID]:
            field = F.interpolate(field.movedim(2, 0)[None], size, mode="bicubic")[0].movedim(0, 2)
        x, field = self.paint(F.unfold(x, PATCH, stride=PATCH).mT), field.flatten(0, 1)
        hidden = torch.zeros_like(x[..., :1], dtype=torch.bool) if hidden is None else hidden[..., None]
        x = self.blank * hidden + (x + field) * ~hidden + (0 if self.late else field * hidden)
        ahead = torch.cat([self.front + self.place, self.extra])
        x = self.last(self.layers(torch.cat([ahead.expand(len(x), -1, -1), x], 1)))
        return x[:, 0], x[:, len(ahead) :]


class Projector(nn.Module):
    def __init__(self, head: nn.Module):
        super().__init__()
        self.one, self.two, self.three = (dense(head.mlp[i].weight, head.mlp[i].bias) for i in (0, 2, 4))
        kept = head.last_layer.parametrizations.weight
        self.length, self.way = leaf(kept.original0[:, 0]), leaf(kept.original1.T)

    def forward(self, x: Tensor) -> Tensor:
        x = self.three(F.gelu(self.two(F.gelu(self.one(x)))))
        return x @ self.way / x.norm(dim=-1, keepdim=True) * (self.length / self.way.norm(dim=0))


def balanced(logits: Tensor, rounds: int = 3) -> Tensor:
    y = logits / dino.TEACHER_TEMP
    for _ in range(rounds):
        y = y.log_softmax(0).log_softmax(1)
    return y.exp()


class Pair(Port):
    """The losses of a port that can ``see`` by a ``body`` of weights; there are two, with two heads each."""

    def take(self, model: dino.SSLMetaArch) -> None:
        kinds, sides = (self.body, Projector, Projector), (model.student, model.teacher)
        nets = ([make(x) for make, x in zip(kinds, side.values(), strict=True)] for side in sides)
        self.pupil, self.guide = map(nn.ModuleList, nets)
        dino.frozen(self.guide)

    def spread(self, x: Tensor) -> Tensor:
        x = x / x.norm(dim=1, keepdim=True)
        near = x[(x @ x.T - 3 * torch.eye(len(x)).to(x)).argmax(1).detach()]
        if self.fault == "dino_two_koleo_neighbour_is_a_constant":
            near = near.detach()
        return -((x - near + 1e-8).square().sum(1).sqrt() + 1e-8).log().mean()

    def forward(self, global_crops: Tensor, local_crops: Tensor, masks: Tensor) -> dict[str, Tensor]:
        count, rounds = len(masks), 2 if self.fault == "dino_two_patches_balanced_two_rounds" else 3
        whole, small, hidden = (x.flatten(0, 1) for x in (global_crops, local_crops, masks))
        with torch.no_grad():
            top, rest = self.see(self.guide, whole)
            aims = balanced(self.guide[1](top)).unflatten(0, (count, 2))
            goals = balanced(self.guide[2](rest[hidden]), rounds)
        top, rest = self.see(self.pupil, whole, hidden)
        seen = (top, 1), (self.see(self.pupil, small)[0], 1), (rest[hidden], 2)
        near, far, found = ((self.pupil[i](x) / dino.STUDENT_TEMP).log_softmax(1) for x, i in seen)
        near, far, top = (x.unflatten(0, (count, -1)) for x in (near, far, top))
        terms, owner = count * (2 + 2 * far.shape[1]), hidden.nonzero()[:, 0]
        local, whole = torch.einsum("nik,njk->", aims, far), (aims.flip(1) * near).sum()
        words = ((goals * found).sum(1) / hidden.sum(1)[owner]).sum() / len(hidden)
        if self.training:
            still = 2 if self.fault == "dino_two_teacher_patch_head_never_moves" else 3
            for old, new in zip(self.guide[:still].buffers(), self.pupil[:still].parameters(), strict=True):
                old.data.lerp_(new.data, 1 - dino.MOMENTUM)
        koleo = sum(self.spread(x) if count > 1 else 0 * x.sum() for x in top.unbind(1))
        return {"local": -local / terms, "global": -whole / terms, "koleo": koleo, "ibot": -words, "cls": top}


class DinoOfSplitLayers(Pair):
    body = Tower

    def take(self, model: dino.SSLMetaArch) -> None:
        super().take(model)
        self.pupil[0].late = self.fault == "dino_two_mask_token_without_a_position"
        if self.fault == "dino_two_second_attention_scaled_by_the_whole_width":
            self.pupil[0].layers[1].size = WIDTH

    def see(self, net: nn.ModuleList, x: Tensor, hidden: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return net[0](x, hidden)


def sheet(x: nn.Module) -> Tensor:
    return torch.cat([x.weight.flatten(1).T, x.bias[None]])


def packed(body: nn.Module) -> nn.ParameterDict:
    """Weights by a short name: transposed with the bias as last row, stacked by layer."""
    w = {"paint": leaf(sheet(body.patch_embed.proj)), "place": leaf(body.pos_embed[0])}
    w["tokens"] = leaf(torch.cat([body.cls_token[0], body.register_tokens[0], body.mask_token]))
    for name in ("attn.qkv", "attn.proj", "mlp.w12", "mlp.w3"):
        w[name.split(".")[1]] = pile(sheet(x.get_submodule(name)) for x in body.blocks)
    norms = [x for block in body.blocks for x in (block.norm1, block.norm2)]
    w["norms"] = pile(torch.stack([x.weight, x.bias]) for x in (*norms, body.norm))
    w["scales"] = pile(x for block in body.blocks for x in (block.gamma1, block.gamma2))
    return nn.ParameterDict(w)


def affine(x: Tensor, w: Tensor) -> Tensor:
    return x @ w[:-1] + w[-1]


class FlatDino(Pair):
    """One function over packed weights, positions by a matrix; the heads are as in the tree."""

    body = staticmethod(packed)

    def see(self, net: nn.ModuleList, x: Tensor, masks: Tensor | None = None) -> tuple[Tensor, Tensor]:
        w, size = net[0], tuple(n // PATCH for n in x.shape[2:])
        x = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH)).permute(0, 2, 4, 1, 3, 5)
        x, (first, table) = affine(x.flatten(3).flatten(1, 2), w["paint"]), w["place"].tensor_split([1])
        front, *extra, blank = w["tokens"]
        if masks is not None and (self.training or self.fault != "dino_two_masks_ignored_in_evaluation"):
            x = x + masks[..., None] * (blank - x)
        if size != GRID:
            corners = self.fault == "dino_two_positions_interpolated_from_corner_to_corner"
            dots = torch.eye(len(table)).to(table).unflatten(1, GRID)[None]
            rows = F.interpolate(dots, size, mode="bicubic", align_corners=corners)[0].flatten(1)
            table = rows.T @ table
        x = torch.cat([torch.stack([front + first[0], *extra]).expand(len(x), -1, -1), x + table], 1)
        for i in range(len(w["qkv"])):
            y = affine(F.layer_norm(x, (WIDTH,), *w["norms"][2 * i], 1e-6), w["qkv"][i])
            q, k, v = y.unflatten(2, (3, HEADS, -1)).unbind(2)
            y = F.scaled_dot_product_attention(*(z.transpose(1, 2) for z in (q, k, v))).transpose(1, 2)
            x = x + affine(y.flatten(2), w["proj"][i]) * w["scales"][2 * i]
            a, b = affine(F.layer_norm(x, (WIDTH,), *w["norms"][2 * i + 1], 1e-6), w["w12"][i]).chunk(2, 2)
            if self.fault == "dino_two_last_gate_on_the_other_half" and i == 2 and net is self.pupil:
                a, b = b, a
            x = x + affine(F.silu(a) * b, w["w3"][i]) * w["scales"][2 * i + 1]
        x = F.layer_norm(x, (WIDTH,), *w["norms"][-1], 1e-6)
        return x[:, 0], x[:, 1 + dino.REGISTERS :]


BODY, SLOPES = "student.backbone", ("input gradient", "weight gradient")
right(task, "dino_two_of_split_layers", "a tree, split projections, logarithms", DinoOfSplitLayers)
right(task, "dino_two_flat", "packed weights, one class", FlatDino)
wrong(
    task,
    DinoOfSplitLayers,
    dino_two_mask_token_without_a_position=("mask after positions", BODY),
    dino_two_second_attention_scaled_by_the_whole_width=("another scale", BODY + ".blocks.1.attn"),
    dino_two_koleo_neighbour_is_a_constant=("detach", "koleo_loss", SLOPES),
    dino_two_teacher_patch_head_never_moves=("a buffer left out", ("", "teacher.ibot_head"), "buffer"),
)
wrong(
    task,
    FlatDino,
    dino_two_masks_ignored_in_evaluation=("a step left out in eval", BODY, "eval"),
    dino_two_positions_interpolated_from_corner_to_corner=("aligned corners", BODY),
    dino_two_last_gate_on_the_other_half=("swapped halves", BODY + ".blocks.2.mlp"),
    dino_two_patches_balanced_two_rounds=("a round fewer", ("ibot_patch_loss", "")),
)
