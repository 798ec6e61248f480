"""Two ports of Deformable DETR: blocks that read level after level, and packed cells read by their index."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import filled, right
from bench.held_back._fourteenth_deformable_detr import HEADS, LEVELS, POINTS, DeformableDETR, matched, padded
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

FACTS = ("weight", "bias", "running_mean", "running_var")
task = few("fourteenth_deformable_detr", DeformableDETR, padded, matched)
E, D, FIRST = "transformer.encoder", "transformer.decoder", "transformer.encoder.layers.0.self_attn"
NORMS = tuple(f"{D}.layers.0{end}" for end in (".norm2", ".norm1", ""))


def joint(*layers: nn.Module) -> nn.Linear:
    weight = torch.cat([x.weight.flatten(1) for x in layers])
    return filled(nn.Linear(*weight.shape[::-1]), weight, torch.cat([x.bias for x in layers]))


def even(norm: nn.LayerNorm) -> nn.LayerNorm:
    return filled(nn.LayerNorm(len(norm.weight)), norm.weight, norm.bias)


class Side(nn.Module):
    def __init__(self, block: nn.Sequential, proj: nn.Sequential | None, mark: Tensor | None, fault: str):
        super().__init__()
        (conv, norm, _), self.fault, self.thawed = block, fault, False
        self.kernel = leaf(conv.weight.permute(2, 3, 1, 0))
        self.register_buffer("facts", torch.stack([getattr(norm, name) for name in FACTS]))
        if proj:
            self.lateral, self.mark = joint(proj[0]), leaf(mark)
            self.table = pile([proj[1].weight, proj[1].bias])

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, 2).unfold(2, 3, 2)
        x, (gain, shift, middle, width) = torch.einsum("nhwcij,ijco->nhwo", windows, self.kernel), self.facts
        if self.thawed and self.training:
            width, middle = torch.var_mean(x, (0, 1, 2), correction=0)
        return ((x - middle) * (gain / (width + 1e-5).sqrt()) + shift).relu()

    def cells(self, x: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        y, waves, shape = F.group_norm(self.lateral(x).movedim(3, 1), 4, *self.table), [], x.shape[1:3]
        ways = [torch.arange(k, device=x.device) * m // k for k, m in zip(shape, mask.shape[1:], strict=True)]
        real, size = ~mask[:, ways[0]][:, :, ways[1]], x.new_tensor(shape[::-1])
        for axis in (1, 2):
            nth, whole = real.cumsum(axis).to(x), self.fault == "level_waves_spread_over_the_padding"
            last = shape[axis - 1] if whole else nth.narrow(axis, -1, 1)
            turns = (nth - 0.5) / (last + 1e-6) * (2 * torch.pi)
            angles = turns[..., None] / x.new_tensor([1, 10, 100, 1000])
            waves.append(torch.stack([angles.sin(), angles.cos()], 4).flatten(3))
        share = torch.stack([real[:, 0].sum(1), real[:, :, 0].sum(1)], 1)[:, None] / size
        middles = (torch.ones(shape, device=x.device).nonzero().flip(1) + 0.5) / size
        middles = middles / (1 if self.fault == "level_middles_not_in_shares_of_what_is_real" else share)
        y, waves = y.flatten(2).mT, (torch.cat(waves, 3) + self.mark).flatten(1, 2)
        return y, waves, real.flatten(1), middles.expand(len(x), -1, -1), share


class Detector(Port):
    def take(self, model: DeformableDETR) -> None:
        t, seeks, body = model.transformer, model.transformer.decoder.layers, model.backbone[0].body.values()
        levels = zip(body, [None, *model.input_proj], [None, *t.level_embed], strict=True)
        self.sides = nn.ModuleList(Side(*level, self.fault) for level in levels)
        self.sides[3].thawed = self.fault == "last_frozen_backbone_norm_thawed_in_training"
        self.first, self.queries = joint(t.reference_points), leaf(model.query_embed.weight)
        self.heads = nn.ModuleList(nn.Sequential(joint(x[0]), x[1], joint(x[2])) for x in model.bbox_embed)
        self.scores = nn.ModuleList(map(joint, model.class_embed))
        self.own = pile(x.self_attn.in_proj_weight.unflatten(0, (3, HEADS, -1)) for x in seeks)
        self.own_b = pile(x.self_attn.in_proj_bias.unflatten(0, (3, 1, HEADS, -1)) for x in seeks)
        self.back = nn.ModuleList(joint(x.self_attn.out_proj) for x in seeks)
        norms = [[x.norm2, x.norm1] for x in seeks]
        if self.fault == "first_box_decoder_norms_by_number":
            norms[0].reverse()
        self.calm = nn.ModuleList(even(x) for x, _ in norms)
        scans = [(x, x.self_attn, x.norm1, x.norm2) for x in t.encoder.layers]
        self.stock([*scans, *((x, x.cross_attn, y, x.norm3) for x, (_, y) in zip(seeks, norms, strict=True))])

    def mixed(self, i: int, x: Tensor, pos: Tensor) -> Tensor:
        pair = torch.einsum("nqc,shdc->snqhd", x + pos, self.own[i, :2]) + self.own_b[i, :2, None]
        value = torch.einsum("nqc,hdc->nqhd", x, self.own[i, 2]) + self.own_b[i, 2]
        shares = (torch.einsum("nqhd,nkhd->nhqk", *pair) / pair.shape[-1] ** 0.5).softmax(3)
        return self.calm[i](x + self.back[i](torch.einsum("nhqk,nkhd->nqhd", shares, value).flatten(2)))

    def forward(self, images: Tensor, mask: Tensor) -> tuple[Tensor, ...]:
        maps, outputs = [self.sides[0](images.movedim(1, 3))], []
        for side in self.sides[1:]:
            maps.append(side(maps[-1]))
        rows = [side.cells(x, mask) for side, x in zip(self.sides[1:], maps[1:], strict=True)]
        source, pos, real, middles, shares = (torch.cat(parts, 1) for parts in zip(*rows, strict=True))
        rest, shares = (real[..., None], [x.shape[1:3] for x in maps[1:]]), shares[:, None]
        for i in range(2):
            source = self.layer(i, source, pos, middles[:, :, None] * shares, source, *rest)
        pos, x = self.queries.expand(len(mask), -1, -1).chunk(2, 2)
        known = self.first(pos)
        for i in range(2):
            where = known.sigmoid()[:, :, None] * shares.repeat(1, 1, 1, i + 1)
            x = self.layer(i + 2, self.mixed(i, x, pos), pos, where, source, *rest)
            known = F.pad(known, (0, 4 - known.shape[2])) + self.heads[i](x)
            outputs.append((self.scores[i](x), known.sigmoid()))
            known = known if self.fault == "refined_boxes_hand_gradients_back" else known.detach()
        return tuple(map(torch.stack, zip(*outputs, strict=True)))


class Block(nn.Module):
    """Read one level after the other where the query says; ``part`` of a box is its reach. Then the rest."""

    def __init__(self, layer: nn.Module, attn: nn.Module, *norms: nn.Module):
        super().__init__()
        self.ask, self.part, self.corners = joint(attn.attention_weights, attn.sampling_offsets), 0.5, False
        self.give, self.out = joint(attn.value_proj), joint(attn.output_proj)
        self.norms = nn.ModuleList(map(even, norms))
        self.body = nn.Sequential(joint(layer.linear1), nn.ReLU(), joint(layer.linear2))

    def look(self, query: Tensor, where: Tensor, source: Tensor, real: Tensor, sizes: list) -> Tensor:
        value = (self.give(source) * real).mT.unflatten(1, (HEADS, -1)).flatten(0, 1)
        weights, offsets = self.ask(query).mT.tensor_split([HEADS * LEVELS * POINTS], 1)
        weights = weights.unflatten(1, (HEADS, -1)).softmax(2).unflatten(2, (LEVELS, POINTS)).flatten(0, 1)
        offsets = offsets.unflatten(1, (HEADS, LEVELS, POINTS, 2)).permute(2, 0, 1, 5, 3, 4)
        y, cells = 0, value.split([h * w for h, w in sizes], 2)
        for i, (h, w) in enumerate(sizes):
            center, extent = where[:, None, :, i, None].tensor_split([2], -1)
            reach = extent * self.part / POINTS if extent.numel() else 1 / center.new_tensor((w, h))
            grid = (2 * (center + offsets[i] * reach) - 1).flatten(0, 1)
            seen = F.grid_sample(cells[i].unflatten(2, (h, w)), grid, align_corners=self.corners)
            y = y + torch.einsum("bdqp,bpq->bqd", seen, weights[:, i])
        return self.out(y.unflatten(0, (-1, HEADS)).transpose(1, 2).flatten(2))

    def forward(self, x: Tensor, pos: Tensor, *rest: Tensor) -> Tensor:
        x = self.norms[0](x + self.look(x + pos, *rest))
        return self.norms[1](x + self.body(x))


class TreeOfBlocks(Detector):
    def stock(self, layers: list[tuple]) -> None:
        self.blocks = nn.ModuleList(Block(*layer) for layer in layers)
        self.blocks[1].corners = self.fault == "last_deformable_encoder_aligns_its_corners"
        self.blocks[3].part = 1.0 if self.fault == "box_offsets_reach_a_whole_box" else 0.5

    def layer(self, i: int, *given: Tensor) -> Tensor:
        return self.blocks[i](*given)


class PackedCells(Detector):
    def stock(self, layers: list[tuple]) -> None:
        names = ("linear1", "linear2"), ("sampling_offsets", "attention_weights", "value_proj", "output_proj")
        groups = {name: [getattr(x[k], name) for x in layers] for k in (0, 1) for name in names[k]}
        self.w = nn.ParameterDict({name: pile(x.weight.T for x in group) for name, group in groups.items()})
        self.b = nn.ParameterDict({name: pile(x.bias for x in group) for name, group in groups.items()})
        self.norms = pile(torch.stack([norm.weight, norm.bias]) for x in layers for norm in x[2:])

    def line(self, name: str, i: int, x: Tensor) -> Tensor:
        return x @ self.w[name][i] + self.b[name][i]

    def norm(self, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, 2, correction=0, keepdim=True)
        return (x - center) * (spread + 1e-5).rsqrt() * self.norms[i, 0] + self.norms[i, 1]

    def look(self, i: int, query: Tensor, where: Tensor, source: Tensor, real: Tensor, sizes: list) -> Tensor:
        early = self.fault == "first_deformable_encoder_masks_before_its_values" and i == 0
        value = self.line("value_proj", i, source * real if early else source)
        value, y = (value if early else value * real).unflatten(2, (HEADS, -1)), 0
        offsets = self.line("sampling_offsets", i, query).unflatten(2, (HEADS, LEVELS, POINTS, 2))
        weights = self.line("attention_weights", i, query).unflatten(2, (HEADS, -1)).softmax(3)
        where, size = where[:, :, None, :, None], query.new_tensor([(w, h) for h, w in sizes])[:, None]
        start = size.prod(2).cumsum(0) - size.prod(2)
        reach = size * where[..., 2:] / (2 * POINTS) if where.shape[-1] == 4 else 1
        at = where[..., :2] * size + offsets * reach - 0.5
        batch, heads = torch.arange(len(query))[:, None, None, None], torch.arange(HEADS)[:, None]
        for corner in query.new_tensor([(0, 0), (0, 1), (1, 0), (1, 1)]):
            cell = at.floor() + corner
            share = (1 - (cell - at).abs()).prod(-1) * ((cell >= 0) & (cell < size)).all(-1)
            x, row = cell.clamp(min=0).minimum(size - 1).unbind(-1)
            index = (start + row * size[..., 0] + x).long().flatten(3)
            y = y + torch.einsum("nqhpd,nqhp->nqhd", value[batch, index, heads], weights * share.flatten(3))
        return self.line("output_proj", i, y.flatten(2))

    def layer(self, i: int, x: Tensor, pos: Tensor, *rest: Tensor) -> Tensor:
        x = self.norm(2 * i, x + self.look(i, x + pos, *rest))
        return self.norm(2 * i + 1, x + self.line("linear2", i, self.line("linear1", i, x).relu()))


right(task, "deformable_detr_of_blocks_level_by_level", "a tree with one block for both halves", TreeOfBlocks)
right(task, "deformable_detr_of_packed_cells", "stacked weights, cells by their index", PackedCells)
wrong(
    task,
    TreeOfBlocks,
    last_deformable_encoder_aligns_its_corners=("another grid", f"{E}.layers.1.self_attn"),
    box_offsets_reach_a_whole_box=("a factor of a half missing", f"{D}.layers.1.cross_attn"),
    first_box_decoder_norms_by_number=("norms exchanged", NORMS),
    last_frozen_backbone_norm_thawed_in_training=("batch statistics", "backbone.0.body.layer3.1"),
)
wrong(
    task,
    PackedCells,
    refined_boxes_hand_gradients_back=("a detach missing", D, ("weight gradient", "input gradient")),
    first_deformable_encoder_masks_before_its_values=("a mask too early", (FIRST, f"{FIRST}.value_proj")),
    level_waves_spread_over_the_padding=("normalised by the padded size", "backbone.1"),
    level_middles_not_in_shares_of_what_is_real=("valid ratios used once too seldom", E),
)
