"""Two ports of a small CrossViT: a tree that keeps class tokens apart, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fifty_third_cross_vit import EPS, HEADS, SIZES, VisionTransformer, classes, gratings
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("fifty_third_cross_vit", VisionTransformer, gratings, classes)
WAYS = ("leave", "go", "there", "cross", "back")


class Looking(nn.Module):
    """Attention of some tokens to others, a matrix for each head."""

    def __init__(self, weights: tuple, biases: tuple, out: nn.Linear, heads: int):
        super().__init__()
        self.ask, self.key, self.value = (leaf(w.unflatten(0, (heads, -1))) for w in weights)
        self.b = nn.ParameterList(leaf(b.unflatten(0, (heads, 1, -1))) for b in biases)
        self.out, self.offset = leaf(out.weight.unflatten(1, (heads, -1))), leaf(out.bias)
        self.fixed = False

    def forward(self, x: Tensor, others: Tensor) -> Tensor:
        pairs = zip((x, others, others), (self.ask, self.key, self.value), self.b, strict=True)
        q, k, v = (torch.einsum("ntc,hdc->nhtd", y, w) + b for y, w, b in pairs)
        share = torch.einsum("nhqd,nhkd->nhqk", q / q.shape[-1] ** 0.5, k).softmax(-1)
        share = share.detach() if self.fixed else share
        return torch.einsum("nhqk,nhkd,ohd->nqo", share, v, self.out) + self.offset


class Layer(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        attn, mlp = block.attn, block.mlp
        self.even = nn.ModuleList([block.norm1, block.norm2])
        self.look = Looking(attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), attn.proj, attn.num_heads)
        self.wide = nn.Sequential(mlp.fc1, nn.GELU(), mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.even[0](x)
        x = x + self.look(y, y)
        return x + self.wide(self.even[1](x))


class Visit(nn.Module):
    """A class token goes to the other branch, looks around there and comes home."""

    def __init__(self, stage: nn.Module, i: int):
        super().__init__()
        ways, there = (stage.projs[i], stage.revert_projs[i]), stage.fusion[i]
        self.go, self.back = (nn.Sequential(*x) for x in ways)
        self.even, attn, self.normed = there.norm1, there.attn, False
        weights, biases = zip(*((x.weight, x.bias) for x in (attn.wq, attn.wk, attn.wv)), strict=True)
        self.look = Looking(weights, biases, attn.proj, attn.num_heads)

    def forward(self, token: Tensor, patches: Tensor) -> Tensor:
        token = self.go(token)
        guest = self.even(token)
        seen = self.look(guest, torch.cat([self.even(patches), guest], 1))
        return self.back((guest if self.normed else token) + seen)


class CrossViTOfVisits(Port):
    """Pictures with the channels last; class tokens stand after the patches."""

    def take(self, model: VisionTransformer) -> None:
        fault, stems = self.fault, [x.proj for x in model.patch_embed]
        self.stems = nn.ParameterList(leaf(x.weight.permute(2, 3, 1, 0)) for x in stems)
        self.shifts = nn.ParameterList(leaf(x.bias) for x in stems)
        self.first = nn.ParameterList(map(leaf, model.cls_token))
        self.where = nn.ParameterList(leaf(x.roll(-1, 1)) for x in model.pos_embed)
        stacks = ([nn.Sequential(*map(Layer, x)) for x in stage.blocks] for stage in model.blocks)
        self.layers = nn.ModuleList(map(nn.ModuleList, stacks))
        self.visits = nn.ModuleList(nn.ModuleList(Visit(x, i) for i in (0, 1)) for x in model.blocks)
        self.ends = nn.ModuleList(map(nn.Sequential, model.norm, model.head))
        self.corners = fault == "cross_vit_resize_aligns_the_corners"
        self.visits[0][1].normed = fault == "cross_vit_first_large_fusion_adds_to_the_normed_token"
        self.visits[1][0].look.fixed = fault == "cross_vit_last_small_fusion_detaches_its_shares"

    def forward(self, x: Tensor) -> Tensor:
        pictures, xs = (x, F.interpolate(x, SIZES[1], mode="bicubic", align_corners=self.corners)), []
        for i, (stem, shift) in enumerate(zip(self.stems, self.shifts, strict=True)):
            tiles = pictures[i].movedim(1, 3).unfold(1, size := len(stem), size).unfold(2, size, size)
            patches = torch.einsum("nhwcij,ijco->nhwo", tiles, stem).flatten(1, 2) + shift
            xs.append(torch.cat([patches, self.first[i].expand(len(x), 1, -1)], 1) + self.where[i])
        for layers, visits in zip(self.layers, self.visits, strict=True):
            xs = [layer(y) for layer, y in zip(layers, xs, strict=True)]
            patches, tokens = [y[:, :-1] for y in xs], [y[:, -1:] for y in xs]
            tokens = [visits[i](tokens[i], patches[1 - i]) for i in (0, 1)]
            xs = [torch.cat(pair, 1) for pair in zip(patches, tokens, strict=True)]
        one, two = (end(y[:, -1]) for end, y in zip(self.ends, xs, strict=True))
        if self.fault == "cross_vit_heads_average_probabilities_in_evaluation" and not self.training:
            return ((one.softmax(1) + two.softmax(1)) / 2).log()
        return (one + two) / 2


def sheet(*layers: nn.Module) -> Tensor:
    """[in + 1, out of all]: the weights transposed, over a row of the biases."""
    return torch.cat([torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in layers]).T


def lines(*norms: nn.LayerNorm) -> Tensor:
    return torch.stack([y for x in norms for y in (x.weight, x.bias)])


def by(x: Tensor, matrix: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1) @ matrix


def even(x: Tensor, line: Tensor, eps: float = EPS) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], eps=eps) * line[0] + line[1]


def look(q: Tensor, k: Tensor, v: Tensor, heads: int, wide: int = 0) -> Tensor:
    q, k, v = (y.unflatten(2, (heads, -1)).transpose(1, 2) for y in (q, k, v))
    scale = (wide or q.shape[-1]) ** -0.5
    return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(2)


class PackedCrossViT(Port):
    """Weights of a kind in one stack for each branch, biases in their last rows."""

    def take(self, model: VisionTransformer) -> None:
        self.w = nn.ParameterDict()
        for i in (0, 1):
            own = [x for stage in model.blocks for x in stage.blocks[i]]
            ways = [(s.projs[i], s.fusion[i], s.revert_projs[i]) for s in model.blocks]
            packs = {
                "norms": pile(lines(x.norm1, x.norm2) for x in own),
                **{k: pile(sheet(getattr(x.attn, k)) for x in own) for k in ("qkv", "proj")},
                **{k: pile(sheet(getattr(x.mlp, k)) for x in own) for k in ("fc1", "fc2")},
                "leave": pile(lines(go[0]) for go, *_ in ways),
                "go": pile(sheet(go[2]) for go, *_ in ways),
                "there": pile(lines(f.norm1, back[0]) for _, f, back in ways),
                "cross": pile(sheet(f.attn.wq, f.attn.wk, f.attn.wv, f.attn.proj) for _, f, _ in ways),
                "back": pile(sheet(back[2]) for *_, back in ways),
                "tile": leaf(sheet(model.patch_embed[i].proj)),
                "first": leaf(model.cls_token[i][0]),
                "where": leaf(model.pos_embed[i][0]),
                "norm": leaf(lines(model.norm[i])),
                "head": leaf(sheet(model.head[i])),
            }
            self.w.update({f"{name}{i}": pack for name, pack in packs.items()})

    def embed(self, x: Tensor, i: int) -> Tensor:
        tiles = F.unfold(x, size := (4, 6)[i], stride=size)
        if self.fault == "cross_vit_large_patches_read_by_columns" and i:
            tiles = tiles.unflatten(1, (-1, size, size)).transpose(2, 3).flatten(1, 3)
        y = by(tiles.mT, self.w[f"tile{i}"])
        return torch.cat([self.w[f"first{i}"].expand(len(x), -1, -1), y], 1) + self.w[f"where{i}"]

    def within(self, x: Tensor, i: int, j: int) -> Tensor:
        norms, qkv, out, up, down = (self.w[f"{k}{i}"][j] for k in ("norms", "qkv", "proj", "fc1", "fc2"))
        x = x + by(look(*by(even(x, norms[:2]), qkv).chunk(3, 2), HEADS[i]), out)
        return x + by(F.gelu(by(even(x, norms[2:]), up)), down)

    def across(self, x: Tensor, other: Tensor, i: int, j: int) -> Tensor:
        leave, go, there, cross, back = (self.w[f"{k}{i}"][j] for k in WAYS)
        here = f"cross_vit_{('first', 'last')[j]}_{('small', 'large')[i]}"
        fault = self.fault if self.fault.startswith(here) else ""
        whole, keras, rough = (fault.endswith(x) for x in ("whole_width", "epsilon_of_keras", "gelu_by_tanh"))
        y = torch.cat([by(F.gelu(even(x[:, :1], leave, 1e-3 if keras else EPS)), go), other[:, 1:]], 1)
        q, k, v, out = cross.chunk(4, 1)
        z, wide = even(y, there[:2]), y.shape[2] if whole else 0
        y = y[:, :1] + by(look(by(z[:, :1], q), by(z, k), by(z, v), HEADS[1 - i], wide), out)
        y = by(F.gelu(even(y, there[2:]), approximate="tanh" if rough else "none"), back)
        return torch.cat([y, x[:, 1:]], 1)

    def forward(self, x: Tensor) -> Tensor:
        small, large = self.embed(x, 0), self.embed(F.interpolate(x, SIZES[1], mode="bicubic"), 1)
        for j in (0, 1):
            small = self.within(small, 0, j)
            large = self.within(self.within(large, 1, 2 * j), 1, 2 * j + 1)
            small, large = self.across(small, large, 0, j), self.across(large, small, 1, j)
        w, pair = self.w, enumerate((small[:, 0], large[:, 0]))
        return sum(by(even(y, w[f"norm{i}"]), w[f"head{i}"]) / 2 for i, y in pair)


right(task, "cross_vit_of_visits", "a tree, class tokens apart and last, channels last", CrossViTOfVisits)
right(task, "cross_vit_packed", "flat code, packed transposed weights", PackedCrossViT)
wrong(
    task,
    CrossViTOfVisits,
    cross_vit_resize_aligns_the_corners=("other corners", ""),
    cross_vit_first_large_fusion_adds_to_the_normed_token=("another residual", "blocks.0.fusion.1"),
    cross_vit_last_small_fusion_detaches_its_shares=("detach", "blocks.1.fusion.0.attn", GRADIENTS),
    cross_vit_heads_average_probabilities_in_evaluation=("another average in eval", "", "eval"),
)
wrong(
    task,
    PackedCrossViT,
    cross_vit_large_patches_read_by_columns=("another pixel order", "patch_embed.1.proj"),
    cross_vit_first_small_fusion_scales_by_the_whole_width=("another scale", "blocks.0.fusion.0.attn"),
    cross_vit_first_large_projection_has_epsilon_of_keras=("another epsilon", "blocks.0.projs.1.0"),
    cross_vit_last_small_reversion_has_gelu_by_tanh=("another gelu", "blocks.1.revert_projs.0.1"),
)
