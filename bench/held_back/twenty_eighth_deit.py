"""Two ports of a small distilled DeiT: a tree with the tokens first, and one class of packed weights."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_eighth_deit import HEADS, PATCH, VisionTransformerDistilled, gratings, losses

task = few("twenty_eighth_deit", VisionTransformerDistilled, gratings, losses)


class Tiles(nn.Module):
    """[N, C, H, W] -> [tiles, N, D]: tiles of channels-last pixels, then a product."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.matrix, self.offset = leaf(conv.weight.permute(2, 3, 1, 0).flatten(0, 2)), leaf(conv.bias)
        self.by_columns = False

    def forward(self, pictures: Tensor) -> Tensor:
        tiles = pictures.movedim(1, 3).unflatten(2, (-1, PATCH)).unflatten(1, (-1, PATCH))
        order = (3, 1, 0, 2, 4, 5) if self.by_columns else (1, 3, 0, 2, 4, 5)
        return tiles.permute(order).flatten(3).flatten(0, 1) @ self.matrix + self.offset


class Level(nn.Module):
    """A layer norm from the mean square less the squared mean."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.shift, self.small = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        middle = x.mean(-1, True)
        rate = (x.square().mean(-1, True) - middle.square() + self.small).rsqrt()
        return x * (rate * self.gain) + (self.shift - middle * rate * self.gain)


class Reading(nn.Module):
    """Attention over the first axis, with a question, a key and a value matrix for each head."""

    def __init__(self, attention: nn.Module):
        super().__init__()
        weights, biases = attention.qkv.weight.chunk(3), attention.qkv.bias.chunk(3)
        self.ask, self.key, self.value = (leaf(w.unflatten(0, (HEADS, -1))) for w in weights)
        self.ask0, self.key0, self.value0 = (leaf(b.unflatten(0, (HEADS, -1))) for b in biases)
        self.join = leaf(attention.proj.weight.T.unflatten(0, (HEADS, -1)))
        self.join0 = leaf(attention.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        total = self.join0
        for h in range(HEADS):
            ask, key = x @ self.ask[h].T + self.ask0[h], x @ self.key[h].T + self.key0[h]
            scores = torch.einsum("ind,jnd->nij", ask, key) / math.sqrt(ask.shape[-1])
            share = (scores - scores.logsumexp(2, True)).exp()
            found = torch.einsum("nij,jnd->ind", share, x @ self.value[h].T + self.value0[h])
            total = total + found @ self.join[h]
        return total


class Widening(nn.Module):
    def __init__(self, mlp: nn.Module):
        super().__init__()
        self.into, self.back = copy.deepcopy(mlp.fc1), copy.deepcopy(mlp.fc2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.into(x)
        return self.back(x * (1 + torch.erf(x / math.sqrt(2))) / 2)


class Addition(nn.Module):
    """The stream plus a weighed branch of it."""

    def __init__(self, norm: nn.LayerNorm, inner: nn.Module, scale: nn.Module):
        super().__init__()
        self.level, self.inner, self.weight, self.frozen = Level(norm), inner, leaf(scale.gamma), False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.detach() if self.frozen else self.weight
        return torch.addcmul(x, self.inner(self.level(x)), weight)


class Opening(nn.Module):
    """Two tokens with places of their own, before the tiles with theirs."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.tiles, place = Tiles(model.patch_embed.proj), model.pos_embed[0]
        self.tokens = leaf(torch.cat([model.cls_token, model.dist_token], 1)[0])
        self.first, self.rest = leaf(place[:2]), leaf(place[2:])

    def forward(self, pictures: Tensor) -> Tensor:
        tiles = self.tiles(pictures) + self.rest[:, None]
        return torch.cat([(self.tokens + self.first)[:, None].expand(-1, len(pictures), -1), tiles])


class DeitOfAdditions(Port):
    """An opening, six additions to a stream of [tokens, N, D], and one product for both heads."""

    def take(self, model: VisionTransformerDistilled) -> None:
        fault, self.opening, self.stream = self.fault, Opening(model), nn.Sequential()
        for block in model.blocks:
            self.stream.append(Addition(block.norm1, Reading(block.attn), block.ls1))
            self.stream.append(Addition(block.norm2, Widening(block.mlp), block.ls2))
        heads, self.level = (model.head, model.head_dist), Level(model.norm)
        self.weight, self.offset = pile(x.weight for x in heads), pile(x.bias for x in heads)
        self.opening.tiles.by_columns = fault == "deit_patches_run_down_the_columns"
        if fault == "deit_second_blocks_second_norm_has_the_epsilon_of_keras":
            self.stream[3].level.small = 1e-3
        self.stream[5].frozen = fault == "deit_last_layer_scale_is_a_constant"

    def forward(self, x: Tensor) -> tuple[Tensor, ...] | Tensor:
        x = self.level(self.stream(self.opening(x))[:2])
        y = torch.einsum("knd,kcd->knc", x, self.weight) + self.offset[:, None]
        if self.training:
            return tuple(y)
        return y[0] if self.fault == "deit_evaluation_gives_the_class_head_alone" else y.mean(0)


def sheet(layer: nn.Module) -> Tensor:
    """[in + 1, out]: the matrix, and the bias as its last row."""
    return torch.cat([layer.weight.flatten(1).T, layer.bias[None]])


def times(x: Tensor, rows: Tensor) -> Tensor:
    return F.pad(x, (0, 1), value=1.0) @ rows


class PackedDeit(Port):
    """Stacks of sheets by block, with all norms and layer scales in one table."""

    def take(self, model: VisionTransformerDistilled) -> None:
        blocks, ends = model.blocks, (model.head, model.head_dist)
        self.patch, self.ends = leaf(sheet(model.patch_embed.proj)), pile(map(sheet, ends))
        self.qkv, self.out = (pile(sheet(getattr(b.attn, x)) for b in blocks) for x in ("qkv", "proj"))
        self.up, self.down = (pile(sheet(getattr(b.mlp, x)) for b in blocks) for x in ("fc1", "fc2"))
        norms = [*(x for b in blocks for x in (b.norm1, b.norm2)), model.norm]
        scales = [x.gamma for b in blocks for x in (b.ls1, b.ls2)]
        self.table = pile([*(v for x in norms for v in (x.weight, x.bias)), *scales])
        self.start = leaf(torch.cat([model.cls_token, model.dist_token, model.pos_embed], 1)[0])

    def level(self, x: Tensor, i: int) -> Tensor:
        middle, (gain, shift) = x.mean(-1, keepdim=True), self.table[2 * i : 2 * i + 2]
        if i == 6 and self.fault == "deit_final_norm_takes_its_mean_for_a_constant":
            middle = middle.detach()
        x = x - middle
        return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain + shift

    def mix(self, x: Tensor, i: int) -> Tensor:
        if i == 2 and self.fault == "deit_last_block_packs_question_key_and_value_by_head":
            q, k, v = times(x, self.qkv[i]).unflatten(2, (HEADS, 3, -1)).transpose(1, 2).unbind(3)
        else:
            q, k, v = times(x, self.qkv[i]).unflatten(2, (3, HEADS, -1)).transpose(1, 3).unbind(2)
        y = F.scaled_dot_product_attention(q, k, v)
        return times(y.transpose(1, 2).flatten(2), self.out[i])

    def bend(self, x: Tensor, i: int) -> Tensor:
        if i == 0 and self.fault == "deit_first_mlp_bends_by_the_tanh_formula":
            return F.gelu(x, approximate="tanh")
        return x * torch.special.ndtr(x)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        x = times(F.unfold(x, PATCH, stride=PATCH).transpose(1, 2), self.patch)
        first = self.start[:2]
        if self.fault != "deit_leading_tokens_get_no_position":
            first = first + self.start[2:4]
        x = torch.cat([first.expand(len(x), -1, -1), x + self.start[4:]], 1)
        for i in range(len(self.qkv)):
            x = x + self.table[14 + 2 * i] * self.mix(self.level(x, 2 * i), i)
            y = self.bend(times(self.level(x, 2 * i + 1), self.up[i]), i)
            x = x + self.table[15 + 2 * i] * times(y, self.down[i])
        own, taught = times(self.level(x[:, :2], 6)[:, :, None], self.ends).squeeze(2).unbind(1)
        return (own, taught) if self.training else torch.lerp(own, taught, 0.5)


SLOPES = ("input gradient", "weight gradient")
right(task, "deit_of_additions_with_tokens_first", "a tree, heads one by one, joint answers", DeitOfAdditions)
right(task, "deit_of_packed_sheets", "packed stacks with biases as rows, one table of norms", PackedDeit)
wrong(
    task,
    DeitOfAdditions,
    deit_patches_run_down_the_columns=("another order of patches", "patch_embed"),
    deit_second_blocks_second_norm_has_the_epsilon_of_keras=("another epsilon", "blocks.1.norm2"),
    deit_last_layer_scale_is_a_constant=("detach", "blocks.2.ls2", "weight gradient"),
    deit_evaluation_gives_the_class_head_alone=("one head in eval", "", "eval"),
)
wrong(
    task,
    PackedDeit,
    deit_leading_tokens_get_no_position=("positions left out", ""),
    deit_first_mlp_bends_by_the_tanh_formula=("another formula of GELU", "blocks.0.mlp.act"),
    deit_last_block_packs_question_key_and_value_by_head=("another packing", "blocks.2.attn"),
    deit_final_norm_takes_its_mean_for_a_constant=("detached mean", "norm", SLOPES),
)
