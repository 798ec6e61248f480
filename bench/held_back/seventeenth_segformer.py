"""Two ports of a SegFormer: levels of residual maps, and rows of tokens with all weights in lists."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._seventeenth_segformer import SegformerForSemanticSegmentation, entropy, scenes
from bench.held_back._sixth_ports import few

task = few("seventeenth_segformer", SegformerForSemanticSegmentation, scenes, entropy)


class Normed(nn.Module):
    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.eps, self.affine = norm.eps, pile([norm.weight, norm.bias])

    def forward(self, x: Tensor) -> Tensor:
        (gain, shift), x = self.affine[:, :, None, None], x - x.mean(1, keepdim=True)
        return x / (x.square().mean(1, keepdim=True) + self.eps).sqrt() * gain + shift


class Conv(nn.Module):
    """One or more layers as one convolution; ``whole`` if no pixel may be left over at the far edges."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        weight, conv, self.whole = torch.cat([x.weight for x in layers]), layers[0], False
        self.weight = leaf(weight if weight.ndim == 4 else weight[:, :, None, None])
        self.bias = leaf(torch.cat([x.bias for x in layers]))
        self.stride, self.edge = getattr(conv, "stride", (1,))[0], getattr(conv, "padding", (0,))[0]
        self.groups = getattr(conv, "groups", 1)

    def forward(self, x: Tensor) -> Tensor:
        if self.whole:
            x = F.pad(x, (0, -x.shape[3] % self.stride, 0, -x.shape[2] % self.stride))
        return F.conv2d(x, self.weight, self.bias, self.stride, self.edge, 1, self.groups)


class Look(nn.Module):
    def __init__(self, own: nn.Module, out: nn.Linear):
        super().__init__()
        small = [Conv(own.sr), Normed(own.layer_norm)] if own.ratio > 1 else []
        self.heads, self.small, self.out = own.heads, nn.Sequential(*small), Conv(out)
        self.ask, self.tell = Conv(own.query), Conv(own.key, own.value)

    def forward(self, x: Tensor) -> Tensor:
        q = self.ask(x).flatten(2).unflatten(1, (self.heads, -1)).mT
        k, v = self.tell(self.small(x)).flatten(2).unflatten(1, (2, self.heads, -1)).mT.unbind(1)
        seen = F.scaled_dot_product_attention(q, k, v)
        return self.out(seen.mT.flatten(1, 2).unflatten(2, x.shape[2:]))


class Level(nn.Module):
    def __init__(self, embed: nn.Module, layers: nn.Module, norm: nn.Module, side: nn.Module, mixing: Tensor):
        super().__init__()
        self.start, self.steps = nn.Sequential(Conv(embed.proj), Normed(embed.layer_norm)), nn.ModuleList()
        for x in layers:
            mlp, look = x.mlp, Look(x.attention.self, x.attention.output.dense)
            mix = Conv(mlp.dense1), Conv(mlp.dwconv.dwconv), nn.GELU(), Conv(mlp.dense2)
            self.steps.append(nn.Sequential(Normed(x.layer_norm_1), look))
            self.steps.append(nn.Sequential(Normed(x.layer_norm_2), *mix))
        self.norm, self.side, self.mixing, self.bare = Normed(norm), Conv(side.proj), leaf(mixing), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        y = self.start(x)
        for step in self.steps:
            y = y + step(y)
        shown = self.norm(y)
        return y if self.bare else shown, shown, F.conv2d(self.side(shown), self.mixing)


class SegformerLevels(Port):
    def take(self, model: nn.Module) -> None:
        body, head = model.segformer.encoder, model.decode_head
        order = 1 if self.fault == "segformer_fusion_takes_the_stages_from_the_finest_on" else -1
        mixing = head.linear_fuse.weight.chunk(3, 1)[::order]
        stages = zip(body.patch_embeddings, body.block, body.layer_norm, head.linear_c, mixing, strict=True)
        self.levels = nn.ModuleList(Level(*stage) for stage in stages)
        self.rows, self.scores = Rows(head.batch_norm), Conv(head.classifier)
        self.levels[1].bare = self.fault == "segformer_last_stage_starts_from_tokens_not_yet_normed"
        self.levels[1].steps[2][1].small[0].whole = self.fault == "segformer_last_reduction_pads_odd_sides"
        self.rows.rate = 0.9 if self.fault == "segformer_fusion_norm_with_the_momentum_of_keras" else 0.1

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        maps, total = [], 0
        for level in self.levels:
            x, shown, mixed = level(x)
            maps.append(shown)
            total = total + F.interpolate(mixed, maps[0].shape[2:], mode="bilinear", align_corners=False)
        return self.scores(self.rows(total.movedim(1, 3)).movedim(3, 1).relu()), *maps


def packed(layer: nn.Module) -> nn.Parameter:
    return leaf(torch.cat([layer.weight.reshape(len(layer.bias), -1), layer.bias[:, None]], 1).T.contiguous())


def line(w: Tensor, x: Tensor) -> Tensor:
    return x @ w[:-1] + w[-1]


def normed(w: Tensor, x: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], *w)


def windows(x: Tensor, size: int, stride: int, edge: int) -> Tensor:
    return F.pad(x, (0, 0, *[edge] * 4)).unfold(1, size, stride).unfold(2, size, stride).flatten(3)


class SegformerRows(Port):
    def take(self, model: nn.Module) -> None:
        body, head = model.segformer.encoder, model.decode_head
        layers = [x for stage in body.block for x in stage]
        self.stages = [[layers.index(x) for x in stage] for stage in body.block]
        self.sizes = [(x.proj.kernel_size[0], x.proj.stride[0]) for x in body.patch_embeddings]
        own = [x.attention.self for x in layers]
        self.looks = [(x.heads, x.ratio) for x in own]
        embed = [y for x in body.patch_embeddings for y in (x.proj, x.layer_norm)]
        small = [y for x in own if x.ratio > 1 for y in (x.sr, x.layer_norm)]
        look = [y for x in layers for y in (x.layer_norm_1, x.attention.output.dense)]
        mix = [y for x in layers for y in (x.layer_norm_2, x.mlp.dense1, x.mlp.dwconv.dwconv, x.mlp.dense2)]
        ends = [*body.layer_norm, *(x.proj for x in head.linear_c), head.batch_norm, head.classifier]
        kept = (nn.ParameterList(packed(y) for y in x) for x in (embed, small, look, mix, ends))
        self.embed, self.small, self.look, self.mix, self.ends = kept
        self.qkv = nn.ParameterList(pile(packed(y) for y in (x.query, x.key, x.value)) for x in own)
        self.fuse = leaf(head.linear_fuse.weight.flatten(1).T.unflatten(0, (3, -1)).flip(0))
        for name, values in zip(("center", "spread", "seen"), head.batch_norm.buffers(), strict=True):
            self.register_buffer(name, values.clone())

    def looked(self, i: int, x: Tensor, grid: tuple) -> Tensor:
        (heads, ratio), (norm, out), w = self.looks[i], self.look[2 * i : 2 * i + 2], self.qkv[i]
        x = source = normed(norm, x)
        if ratio > 1:
            cells = windows(x.unflatten(1, grid), ratio, ratio, 0).flatten(1, 2)
            source = normed(self.small[2 * i + 1], line(self.small[2 * i], cells))
        q = line(w[0], x).unflatten(2, (heads, -1))
        k, v = torch.einsum("nlc,scd->snld", source, w[1:, :-1]) + w[1:, -1, None, None]
        whole = self.fault == "segformer_last_attention_scaled_by_its_full_width" and i == 3
        q = q * (x if whole else q).shape[-1] ** -0.5
        shares = torch.einsum("nlhd,nmhd->nhlm", q, k.unflatten(2, (heads, -1))).softmax(3)
        return line(out, torch.einsum("nhlm,nmhd->nlhd", shares, v.unflatten(2, (heads, -1))).flatten(2))

    def mixed(self, i: int, x: Tensor, grid: tuple) -> Tensor:
        norm, wide, taps, narrow = self.mix[4 * i : 4 * i + 4]
        if self.fault == "segformer_first_depthwise_grid_read_as_wide_by_high" and i == 0:
            grid = grid[::-1]
        y = F.pad(line(wide, normed(norm, x)).unflatten(1, grid), (0, 0, 1, 1, 1, 1))
        shifted = (y[:, t // 3 :, t % 3 :][:, : grid[0], : grid[1]] * taps[t] for t in range(9))
        y = (taps[9] + sum(shifted)).flatten(1, 2)
        gate = (1 + torch.erf(y * 0.5**0.5)) / 2
        still = self.fault == "segformer_gelu_of_the_second_block_with_its_gate_detached" and i == 1
        return line(narrow, y * (gate.detach() if still else gate))

    def grown(self, s: int, x: Tensor, size: tuple) -> Tensor:
        x = line(self.ends[s + 3], x)
        corners = self.fault == "segformer_coarsest_projection_grown_with_aligned_corners" and s == 2
        for axis, (fine, coarse) in enumerate(zip(size, x.shape[1:3], strict=True)):
            at = torch.arange(fine).to(x)
            at = at * (coarse - 1) / (fine - 1) if corners else (at + 0.5) * coarse / fine - 0.5
            at = at.clamp(0, coarse - 1)[:, None] - torch.arange(coarse).to(x)
            x = torch.tensordot((1 - at.abs()).relu(), x.movedim(axis + 1, 0), 1).movedim(0, axis + 1)
        return x

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, maps = x.movedim(1, 3), []
        for s, (stage, (size, stride)) in enumerate(zip(self.stages, self.sizes, strict=True)):
            grid = (x := windows(x, size, stride, size // 2)).shape[1:3]
            x = normed(self.embed[2 * s + 1], line(self.embed[2 * s], x.flatten(1, 2)))
            for i in stage:
                x = x + self.looked(i, x, grid)
                x = x + self.mixed(i, x, grid)
            maps.append(x := normed(self.ends[s], x).unflatten(1, grid))
        sides = [self.grown(s, y, maps[0].shape[1:3]) for s, y in enumerate(maps)]
        y = torch.einsum("snhwc,scd->nhwd", torch.stack(sides), self.fuse)
        self.seen += self.training
        y = F.batch_norm(y.flatten(0, 2), self.center, self.spread, *self.ends[6], self.training).view_as(y)
        return tuple(x.movedim(3, 1) for x in (line(self.ends[7], y.relu()), *maps))


ENCODER, BLOCK, HEAD = "segformer.encoder", "segformer.encoder.block", "decode_head"
LOOK, MIX, BENT = f"{BLOCK}.1.1.attention.self", f"{BLOCK}.0.0.mlp", f"{BLOCK}.1.0.mlp"
LAST = (ENCODER, f"{ENCODER}.patch_embeddings.2", f"{ENCODER}.layer_norm.1")
GRID, ACT = (f"{MIX}.dwconv", f"{MIX}.dwconv.dwconv", MIX), (f"{BENT}.intermediate_act_fn", BENT)
right(task, "segformer_of_levels_that_mix_their_own_share", "a tree of residual maps", SegformerLevels)
right(task, "segformer_by_rows_of_windows", "packed weights in lists, windows, shifted grids", SegformerRows)
wrong(
    task,
    SegformerLevels,
    segformer_fusion_takes_the_stages_from_the_finest_on=("order of a join", (HEAD, f"{HEAD}.linear_fuse")),
    segformer_last_stage_starts_from_tokens_not_yet_normed=("a value taken before its norm", LAST),
    segformer_last_reduction_pads_odd_sides=("padding of odd sides", (f"{LOOK}.sr", LOOK)),
    segformer_fusion_norm_with_the_momentum_of_keras=("momentum of averages", f"{HEAD}.batch_norm", "buffer"),
)
wrong(
    task,
    SegformerRows,
    segformer_last_attention_scaled_by_its_full_width=("another scale", f"{BLOCK}.2.0.attention.self"),
    segformer_first_depthwise_grid_read_as_wide_by_high=("axes swapped", GRID),
    segformer_gelu_of_the_second_block_with_its_gate_detached=("a detach in an activation", ACT, GRADIENTS),
    segformer_coarsest_projection_grown_with_aligned_corners=("aligned corners", HEAD),
)
