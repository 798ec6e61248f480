"""Two ports of a small TimeSformer: a tree of grids with channels last, and one class of packed stacks."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _thirty_second_timesformer as origin
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

HEADS, HIDDEN, HIGH, PATCH, WIDTH = origin.HEADS, origin.HIDDEN, origin.HIGH, origin.PATCH, origin.WIDTH
task = few("thirty_second_timesformer", origin.VisionTransformer, origin.clips, origin.third_of_cross_entropy)


class Affine(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.matrix, self.offset = leaf(weight.T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.matrix + self.offset


class Even(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.gain, self.offset, self.eps = leaf(norm.weight), leaf(norm.bias), norm.eps

    def forward(self, x: Tensor) -> Tensor:
        spread, middle = torch.var_mean(x, -1, correction=0, keepdim=True)
        return (x - middle) * (spread + self.eps).rsqrt() * self.gain + self.offset


class Mixing(nn.Module):
    """Attention along the last axis but one, whatever stands before it."""

    def __init__(self, norm: nn.LayerNorm, attn: nn.Module):
        super().__init__()
        self.even, self.onward, self.held = Even(norm), False, False
        halves = zip(attn.qkv.weight.chunk(3), attn.qkv.bias.chunk(3), strict=True)
        self.ask, self.offer, self.give = (Affine(*pair) for pair in halves)
        self.out = Affine(attn.proj.weight, attn.proj.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.even(x)
        q, k, v = (
            f(x).unflatten(-1, (HEADS, -1)).transpose(-3, -2) for f in (self.ask, self.offer, self.give)
        )
        k = k.detach() if self.held else k
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.onward)
        return self.out(y.transpose(-3, -2).flatten(-2))


class Layer(nn.Module):
    """A class token [B, C] and a grid [B, T, H, W, C]."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.times = Mixing(block.temporal_norm1, block.temporal_attn)
        self.after = Affine(block.temporal_fc.weight, block.temporal_fc.bias)
        self.places = Mixing(block.norm1, block.attn)
        up, down = (Affine(x.weight, x.bias) for x in (block.mlp.fc1, block.mlp.fc2))
        self.feed = nn.Sequential(Even(block.norm2), up, nn.GELU(), down)

    def forward(self, token: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        grid = grid + self.after(self.times(grid.movedim(1, 3))).movedim(3, 1)
        each = token[:, None, None].expand(-1, grid.shape[1], -1, -1)
        move = self.places(torch.cat([grid.flatten(2, 3), each], 2))
        grid = grid + move[:, :, :-1].unflatten(2, grid.shape[2:4])
        token = token + move[:, :, -1].mean(1)
        return token + self.feed(token), grid + self.feed(grid)


class Opening(nn.Module):
    def __init__(self, model: origin.VisionTransformer):
        super().__init__()
        proj, ground = model.patch_embed.proj, model.pos_embed[0, 1:]
        self.look = Affine(proj.weight.permute(0, 2, 3, 1).flatten(1), proj.bias)
        self.where, self.when = leaf(ground.unflatten(0, (HIGH // PATCH, -1))), leaf(model.time_embed[0])
        self.token, self.start = leaf(model.cls_token[0, 0]), leaf(model.pos_embed[0, 0])
        self.timed = False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x.movedim(1, 4).unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        grid = self.look(x.transpose(3, 4).flatten(4)) + self.where + self.when[:, None, None]
        token = self.token + self.start + (self.when[0] if self.timed else 0)
        return token.expand(len(x), -1), grid


class TimeSformerOfGrids(Port):
    """An opening, layers that pass a token and a grid on, and an ending; q, k and v are split."""

    def take(self, model: origin.VisionTransformer) -> None:
        self.opening = Opening(model)
        self.opening.timed = self.fault == "timesformer_class_token_takes_the_first_time_embedding_too"
        self.layers = nn.ModuleList(map(Layer, model.blocks))
        self.layers[0].times.onward = self.fault == "timesformer_first_temporal_attention_is_causal"
        self.layers[1].places.held = self.fault == "timesformer_second_spatial_attention_detaches_its_keys"
        self.ending = nn.Sequential(Even(model.norm), Affine(model.head.weight, model.head.bias))

    def forward(self, x: Tensor) -> Tensor:
        token, grid = self.opening(x)
        for layer in self.layers:
            token, grid = layer(token, grid)
        scores = self.ending(token)
        if self.fault == "timesformer_scores_through_a_softmax_in_evaluation" and not self.training:
            scores = scores.softmax(1)
        return scores


SIZES = (3 * WIDTH, WIDTH, WIDTH, 3 * WIDTH, WIDTH, HIDDEN)


def linears(block: nn.Module) -> list[nn.Linear]:
    time, space = block.temporal_attn, block.attn
    return [time.qkv, time.proj, block.temporal_fc, space.qkv, space.proj, block.mlp.fc1, block.mlp.fc2]


def columns(block: nn.Module) -> Tensor:
    """All matrices of a block side by side, with the width down."""
    *first, last = (x.weight for x in linears(block))
    return torch.cat([*(x.T for x in first), last], 1)


class PackedTimeSformer(Port):
    """Tokens [B, N, T, C] beside the class token; a table of columns, one of offsets and one of norms."""

    def take(self, model: origin.VisionTransformer) -> None:
        self.matrices = pile(map(columns, model.blocks))
        self.offsets = pile(torch.cat([x.bias for x in linears(block)]) for block in model.blocks)
        trios = [(x.temporal_norm1, x.norm1, x.norm2) for x in model.blocks]
        norms = [norm for trio in trios for norm in trio] + [model.norm]
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        proj = model.patch_embed.proj
        self.look = leaf(torch.cat([proj.weight.flatten(1), proj.bias[:, None]], 1))
        self.start = leaf(torch.cat([model.cls_token, model.time_embed, model.pos_embed], 1)[0])
        self.head = leaf(torch.cat([model.head.weight, model.head.bias[:, None]], 1))

    def even(self, x: Tensor, i: int) -> Tensor:
        return F.layer_norm(x, (WIDTH,), *self.norms[i], 1e-6)

    def attend(self, x: Tensor, pairs: list, size: int = WIDTH // HEADS) -> Tensor:
        (inner, shift), (outer, last) = pairs
        q, k, v = (x @ inner + shift).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        share = (torch.einsum("abihd,abjhd->abhij", q, k) / math.sqrt(size)).softmax(-1)
        return torch.einsum("abhij,abjhd->abihd", share, v).flatten(3) @ outer + last

    def block(self, i: int, c: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        pieces = self.matrices[i].split([*SIZES, HIDDEN], 1), self.offsets[i].split([*SIZES, WIDTH])
        pairs = list(zip(*pieces, strict=True))
        before, (mix, shift) = x, pairs[2]
        x = x + self.attend(self.even(x, 3 * i), pairs[:2]) @ mix + shift
        seen = before if self.fault == "timesformer_second_spatial_attention_sees_no_time" and i == 1 else x
        frames = torch.cat([c[:, None, None].expand(-1, -1, x.shape[2], -1), seen], 1).transpose(1, 2)
        wide = self.fault == "timesformer_first_spatial_attention_scaled_by_the_whole_width" and i == 0
        size = WIDTH if wide else WIDTH // HEADS
        move = self.attend(self.even(frames, 3 * i + 1), pairs[3:5], size).transpose(1, 2)
        late = self.fault == "timesformer_third_class_token_of_the_last_frame" and i == 2
        c = c + (move[:, 0, -1] if late else move[:, 0].sum(1) / move.shape[2])
        flat = torch.cat([c[:, None], (x + move[:, 1:]).flatten(1, 2)], 1)
        (up, low), (down, end) = pairs[5:]
        rough = self.fault == "timesformer_second_mlp_takes_the_tanh_of_gelu" and i == 1
        y = F.gelu(self.even(flat, 3 * i + 2) @ up + low, approximate="tanh" if rough else "none")
        flat = flat + y @ down.T + end
        return flat[:, 0], flat[:, 1:].unflatten(1, x.shape[1:3])

    def forward(self, x: Tensor) -> Tensor:
        first, when, where = self.start.split([1, x.shape[2], len(self.start) - 1 - x.shape[2]])
        windows = F.unfold(x.transpose(1, 2).flatten(0, 1), PATCH, stride=PATCH).unflatten(0, (len(x), -1))
        x = torch.einsum("btkn,ck->bntc", windows, self.look[:, :-1]) + self.look[:, -1]
        x, c = x + where[1:, None] + when, (first + where[:1]).repeat(len(x), 1)
        for i in range(len(self.matrices)):
            c, x = self.block(i, c, x)
        return self.even(c, -1) @ self.head[:, :-1].T + self.head[:, -1]


SLOPES = ("input gradient", "weight gradient")
right(
    task, "timesformer_of_grids_and_a_token", "a tree, channels last, split projections", TimeSformerOfGrids
)
right(task, "timesformer_of_packed_stacks", "flat code, tables of columns, einsums", PackedTimeSformer)
wrong(
    task,
    TimeSformerOfGrids,
    timesformer_class_token_takes_the_first_time_embedding_too=("an embedding too many", ""),
    timesformer_first_temporal_attention_is_causal=("a mask too many", "blocks.0.temporal_attn"),
    timesformer_second_spatial_attention_detaches_its_keys=("detach", "blocks.1.attn", SLOPES),
    timesformer_scores_through_a_softmax_in_evaluation=("a softmax in eval", ("", "head"), "eval"),
)
wrong(
    task,
    PackedTimeSformer,
    timesformer_second_spatial_attention_sees_no_time=("a stale input", "blocks.1"),
    timesformer_first_spatial_attention_scaled_by_the_whole_width=("another scale", "blocks.0.attn"),
    timesformer_third_class_token_of_the_last_frame=("one frame for the mean", "blocks.2"),
    timesformer_second_mlp_takes_the_tanh_of_gelu=("another activation", "blocks.1.mlp.act"),
)
