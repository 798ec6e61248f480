"""Two ports of a small CaiT: a tree of residual branches with the heads last, and one class of sheets."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_seventh_cait import DIM, EPS, HEADS, PATCH, Cait, classes, gratings

ROWS = ("norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias", "gamma_1", "gamma_2")
task = few("twenty_seventh_cait", Cait, gratings, classes)


class Affine(nn.Module):
    def __init__(self, *layers: nn.Linear):
        super().__init__()
        self.w = leaf(torch.cat([x.weight for x in layers]).T)
        self.b = leaf(torch.cat([x.bias for x in layers]))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.w + self.b


class Tiles(nn.Module):
    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.w, self.b = leaf(conv.weight.permute(2, 3, 1, 0).flatten(0, 2)), leaf(conv.bias)
        self.columns_first = False

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, 3).unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
        y = x.permute(0, 1, 3, 2, 4, 5).flatten(3) @ self.w + self.b
        return (y.transpose(1, 2) if self.columns_first else y).flatten(1, 2)


class Talking(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.given, self.early = Affine(attn.qkv), False
        self.before, self.after, self.out = map(Affine, (attn.proj_l, attn.proj_w, attn.proj))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.given(x).unflatten(2, (3, HEADS, -1)).unbind(2)
        scores = self.before(torch.einsum("nqhd,nkhd->nqkh", q, k) / q.shape[3] ** 0.5)
        shares = self.after(scores).softmax(2) if self.early else self.after(scores.softmax(2))
        return self.out(torch.einsum("nqkh,nkhd->nqhd", shares, v).flatten(2))


class Glance(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        self.ask, self.tell = Affine(attn.q), Affine(attn.k, attn.v)
        self.out, self.outward = Affine(attn.proj), False

    def forward(self, token: Tensor, tiles: Tensor) -> Tensor:
        q = self.ask(token).unflatten(1, (HEADS, -1))
        k, v = self.tell(tiles).unflatten(2, (2, HEADS, -1)).unbind(2)
        own_k, own_v = self.tell(token).unflatten(1, (2, HEADS, -1)).unbind(1)
        far = torch.einsum("nhd,nkhd->nhk", q, k) / q.shape[2] ** 0.5
        own = (q * own_k).sum(2, True) / q.shape[2] ** 0.5
        own = torch.full_like(own, -torch.inf) if self.outward else own
        whole = torch.logaddexp(own, far.logsumexp(2, True))
        found = torch.einsum("nhk,nkhd->nhd", (far - whole).exp(), v) + (own - whole).exp() * own_v
        return self.out(found.flatten(1))


class Branch(nn.Module):
    def __init__(self, norm: nn.LayerNorm, body: nn.Module, gain: Tensor):
        super().__init__()
        self.norm, self.body, self.gain, self.thinned = deepcopy(norm), body, leaf(gain), False

    def forward(self, x: Tensor, *seen: Tensor) -> Tensor:
        y = self.body(self.norm(x), *map(self.norm, seen)) * self.gain
        return x + (0.9 * y if self.thinned and not self.training else y)


def pair(block: nn.Module, attention: type[nn.Module]) -> list[Branch]:
    mlp = nn.Sequential(Affine(block.mlp.fc1), nn.GELU(), Affine(block.mlp.fc2))
    first = Branch(block.norm1, attention(block.attn), block.gamma_1)
    return [first, Branch(block.norm2, mlp, block.gamma_2)]


class CaitOfBranches(Port):
    """Branches over tiles, then branches of a token that is never joined to the tiles."""

    def take(self, model: Cait) -> None:
        self.tiles, self.place = Tiles(model.patch_embed.proj), leaf(model.pos_embed[0])
        self.token = leaf(model.cls_token.flatten())
        self.trunk = nn.Sequential(*(x for block in model.blocks for x in pair(block, Talking)))
        self.reader = nn.ModuleList(x for block in model.blocks_token_only for x in pair(block, Glance))
        self.end = nn.Sequential(deepcopy(model.norm), Affine(model.head))
        self.tiles.columns_first = self.fault == "cait_patches_numbered_down_the_columns"
        self.trunk[2].body.early = self.fault == "cait_second_talking_map_comes_before_the_softmax"
        self.trunk[5].thinned = self.fault == "cait_last_block_thins_its_mlp_branch_in_evaluation"
        self.reader[0].body.outward = self.fault == "cait_class_token_does_not_look_at_itself"

    def forward(self, x: Tensor) -> Tensor:
        x = self.trunk(self.tiles(x) + self.place)
        token = self.token.expand(len(x), -1)
        for i, branch in enumerate(self.reader):
            token = branch(token) if i % 2 else branch(token, x)
        return self.end(token)


class Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, gain: Tensor, averaged: bool) -> Tensor:
        ctx.save_for_backward(x, gain)
        ctx.total = torch.mean if averaged else torch.sum
        return x * gain

    @staticmethod
    def backward(ctx, slope: Tensor) -> tuple[Tensor, Tensor, None]:
        x, gain = ctx.saved_tensors
        return slope * gain, ctx.total(slope * x, 1).sum(0), None


def sheet(layer: nn.Linear) -> Tensor:
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def through(x: Tensor, layer: Tensor) -> Tensor:
    return F.linear(x, layer[:, :-1], layer[:, -1])


class CaitOfSheets(Port):
    """Stacks over the blocks of a kind; the talking maps are factors of two products."""

    def take(self, model: Cait) -> None:
        for kind, blocks in (("tile", model.blocks), ("token", model.blocks_token_only)):
            rows = (torch.stack([x.get_parameter(y) for y in ROWS]) for x in blocks)
            setattr(self, f"{kind}_lines", pile(rows))
            setattr(self, f"{kind}_up", pile(sheet(x.mlp.fc1) for x in blocks))
            setattr(self, f"{kind}_down", pile(sheet(x.mlp.fc2) for x in blocks))
            setattr(self, f"{kind}_out", pile(sheet(x.attn.proj) for x in blocks))
        self.qkv = pile(sheet(x.attn.qkv) for x in model.blocks)
        self.talk = pile(torch.stack([sheet(x.attn.proj_l), sheet(x.attn.proj_w)]) for x in model.blocks)
        self.ask = pile(torch.stack([sheet(x.attn.get_submodule(y)) for y in "qkv"]) for x in blocks)
        self.patch, self.head = leaf(sheet(model.patch_embed.proj)), leaf(sheet(model.head))
        self.table = leaf(torch.cat([model.cls_token[0], model.pos_embed[0]]))
        self.last = pile([model.norm.weight, model.norm.bias])

    def mixed(self, i: int, x: Tensor) -> Tensor:
        q, k, v = through(x, self.qkv[i]).unflatten(2, (3, HEADS, -1)).unbind(2)
        (first, shift), (second, floor) = ((t[:, :-1], t[:, -1]) for t in self.talk[i])
        if self.fault == "cait_first_block_transposes_its_second_talking_map" and i == 0:
            second = second.T
        scores = torch.einsum("gh,nqhd,nkhd->ngqk", first, q * q.shape[3] ** -0.5, k)
        shares = (scores + shift[:, None, None]).softmax(3)
        found = torch.einsum("gh,nhqk,nkgd->nqgd", second, shares, v)
        return through((found + floor[:, None] * v.sum(1, True)).flatten(2), self.tile_out[i])

    def read(self, i: int, u: Tensor) -> Tensor:
        full = self.fault == "cait_first_class_attention_scaled_by_the_full_width" and i == 0
        q, k, v = (through(u, w).unflatten(2, (HEADS, -1)).transpose(1, 2) for w in self.ask[i])
        found = F.scaled_dot_product_attention(q[:, :, :1], k, v, scale=DIM**-0.5 if full else None)
        return through(found.transpose(1, 2).flatten(2), self.token_out[i])

    def deep(self, kind: str, i: int, x: Tensor, c: Tensor, d: Tensor, rough: bool = False) -> Tensor:
        y = through(F.layer_norm(x, (DIM,), c, d, EPS), self.get_parameter(f"{kind}_up")[i])
        y = y * (torch.sigmoid(1.702 * y) if rough else torch.special.ndtr(y))
        return through(y, self.get_parameter(f"{kind}_down")[i])

    def forward(self, x: Tensor) -> Tensor:
        averaged = self.fault == "cait_second_layer_scale_gradient_averaged_over_tokens"
        rough = self.fault == "cait_last_class_block_takes_gelu_by_a_sigmoid"
        x = through(F.unfold(x, PATCH, stride=PATCH).mT, self.patch) + self.table[1:]
        for i, (a, b, c, d, one, two) in enumerate(self.tile_lines):
            x = x + Gain.apply(self.mixed(i, F.layer_norm(x, (DIM,), a, b, EPS)), one, averaged and i == 1)
            x = x + Gain.apply(self.deep("tile", i, x, c, d), two, False)
        token = self.table[:1].expand(len(x), 1, -1)
        for i, (a, b, c, d, one, two) in enumerate(self.token_lines):
            token = token + one * self.read(i, F.layer_norm(torch.cat([token, x], 1), (DIM,), a, b, EPS))
            token = token + two * self.deep("token", i, token, c, d, rough and i == 1)
        return through(F.layer_norm(token[:, 0], (DIM,), *self.last, EPS), self.head)


DROPPED, READER = ("blocks.2", "blocks.2.drop_path"), ("blocks_token_only.0.attn", "blocks_token_only.0")
right(task, "cait_of_branches_with_heads_last", "a tree, joined weights, heads last", CaitOfBranches)
right(task, "cait_of_sheets", "packed stacks, fused products, gradients by hand", CaitOfSheets)
wrong(
    task,
    CaitOfBranches,
    cait_patches_numbered_down_the_columns=("another order of tokens", "patch_embed"),
    cait_second_talking_map_comes_before_the_softmax=("operations swapped", "blocks.1.attn"),
    cait_last_block_thins_its_mlp_branch_in_evaluation=("scaled in eval", DROPPED, "eval"),
    cait_class_token_does_not_look_at_itself=("a key left out", READER),
)
wrong(
    task,
    CaitOfSheets,
    cait_first_block_transposes_its_second_talking_map=("transposed", "blocks.0.attn.proj_w"),
    cait_second_layer_scale_gradient_averaged_over_tokens=("a mean for a sum", "blocks.1", "weight gradient"),
    cait_first_class_attention_scaled_by_the_full_width=("another scale", "blocks_token_only.0.attn"),
    cait_last_class_block_takes_gelu_by_a_sigmoid=("an activation", "blocks_token_only.1.mlp.act"),
)
