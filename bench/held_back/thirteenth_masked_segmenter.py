"""Two ports of a Mask2Former: a tree of other parts, and flat code, channels last, that samples by tents."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirteenth_masked_segmenter import HEADS, LEVELS, POINTS, Mask2Former, assigned, scenes

task = few("thirteenth_masked_segmenter", Mask2Former, scenes, assigned)
FIRST, SECOND = (f"decoder.encoder.layers.{i}.self_attn" for i in range(2))
TOP, MASK = "transformer_module.", "transformer_module.mask_predictor"


def plan(size: tuple[int, int], like: Tensor, inset: float = 0.5, scaled: bool = True) -> tuple:
    """Of each cell of a map: the sines and cosines of its row and column, and where it lies, x before y."""
    tables = []
    for s in size:
        at = torch.arange(s).to(like)[:, None]
        turn = (at + 1) / 10 ** torch.arange(4).to(like) * (2 * torch.pi / (s + 1e-6) if scaled else 1)
        tables.append(torch.cat([torch.stack([turn.sin(), turn.cos()], 2).flatten(1), (at + inset) / s], 1))
    y, x = tables[0].repeat_interleave(size[1], 0), tables[1].repeat(size[0], 1)
    return torch.cat([y[:, :8], x[:, :8]], 1), torch.stack([x[:, 8:], y[:, 8:]], 2)


class Around(nn.Module):
    def __init__(self, norm: nn.Module, *body: nn.Module):
        super().__init__()
        self.norm, self.body = deepcopy(norm), nn.Sequential(*deepcopy(body))

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        return self.norm(x + self.body(x if y is None else y))


class Sampler(Around):
    def __init__(self, old: nn.Module, norm: nn.Module):
        super().__init__(norm, old.output_proj)
        self.value, asks = deepcopy(old.value_proj), (old.sampling_offsets, old.attention_weights)
        self.ask, self.ask_b = (leaf(torch.cat([getattr(x, k) for x in asks])) for k in ("weight", "bias"))

    def forward(self, x: Tensor, pos: Tensor, places: Tensor, shapes: list) -> Tensor:
        ask = F.linear(x + pos, self.ask, self.ask_b).mT.split(HEADS * LEVELS * POINTS, 1)
        where = torch.cat(ask[:2], 1).unflatten(1, (HEADS, LEVELS, POINTS, 2)).movedim(5, 2)
        share = ask[2].unflatten(1, (HEADS, -1)).softmax(2).unflatten(2, (LEVELS, POINTS)).flatten(0, 1)
        value, y = self.value(x).mT.unflatten(1, (HEADS, -1)).split([h * w for h, w in shapes], 3), 0
        for i, (h, w) in enumerate(shapes):
            grid = (2 * (places + where[:, :, :, i] / x.new_tensor([w, h])) - 1).flatten(0, 1)
            seen = F.grid_sample(value[i].unflatten(3, (h, w)).flatten(0, 1), grid, align_corners=False)
            y = y + torch.einsum("bdsp,bps->bds", seen, share[:, i])
        return super().forward(x, y.unflatten(0, (-1, HEADS)).flatten(1, 2).mT)


class Look(Around):
    def __init__(self, old: nn.MultiheadAttention, norm: nn.LayerNorm):
        super().__init__(norm, old.out_proj)
        both = old.in_proj_weight, old.in_proj_bias[:, None]
        self.w, self.b = (leaf(values.unflatten(0, (3, HEADS, -1)).mT) for values in both)

    def forward(self, x: Tensor, *sides: Tensor, keep: Tensor | None = None) -> Tensor:
        q, k, v = (y[:, None] @ w + b for y, w, b in zip(sides, self.w, self.b, strict=True))
        return super().forward(x, F.scaled_dot_product_attention(q, k, v, keep).transpose(1, 2).flatten(2))


class TreeOfLooks(Port):
    def take(self, model: Mask2Former) -> None:
        low, top = model.decoder, model.transformer_module
        layers, mask = [*low.encoder.layers, *top.layers], top.mask_predictor.mask_embedder
        self.trunk, self.enter, self.side = deepcopy((model.encoder, low.input_projections, low.adapter_1))
        self.feeds = nn.ModuleList(Around(x.final_layer_norm, x.fc1, nn.ReLU(), x.fc2) for x in layers)
        self.samplers = nn.ModuleList(Sampler(x.self_attn, x.self_attn_layer_norm) for x in layers[:2])
        self.meet = nn.ModuleList(Look(x.self_attn, x.self_attn_layer_norm) for x in layers[2:])
        self.seek = nn.ModuleList(Look(x.cross_attn, x.cross_attn_layer_norm) for x in layers[2:])
        self.leave = nn.Sequential(*deepcopy(low.layer_1), deepcopy(low.mask_projection))
        self.norm, self.embed, self.word = deepcopy((top.layernorm, mask, model.class_predictor))
        self.levels = pile([low.level_embed, top.level_embed.weight])
        self.start = pile([top.queries_features.weight, top.queries_embedder.weight])
        self.trunk[2][1].momentum = 0.9 if self.fault == "segmenter_averages_keep_one_tenth" else 0.1

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine, *maps = [x := stage(x) for stage in self.trunk]
        shapes = [y.shape[2:] for y in maps[::-1]]
        x = torch.cat([enter(y).flatten(2).mT for enter, y in zip(self.enter, maps[::-1], strict=True)], 1)
        inset = 0 if self.fault == "sampling_starts_at_corners_of_cells" else 0.5
        pos, places = zip(*(plan(shape, x, inset) for shape in shapes), strict=True)
        pos, places = torch.cat([p + self.levels[0, i] for i, p in enumerate(pos)]), torch.cat(places)
        for sampler, feed in zip(self.samplers, self.feeds, strict=False):
            x = feed(sampler(x, pos, places, shapes))
        maps = x.split([h * w for h, w in shapes], 1)
        rise = "nearest" if self.fault == "sampled_level_raised_to_pixels_by_nearest" else "bilinear"
        above = F.interpolate(maps[-1].mT.unflatten(2, shapes[-1]), fine.shape[2:], mode=rise)
        pixels, (x, tags), classes, masks = self.leave(self.side(fine) + above), self.start, [], []
        x = x.expand(len(fine), -1, -1)
        for i, shape in enumerate([*shapes, *shapes[:2]]):
            classes.append(self.word(y := self.norm(x)))
            masks.append(torch.einsum("nqc,nchw->nqhw", self.embed(y), pixels))
            if i < len(self.seek):
                small = F.interpolate(masks[-1].detach(), shape, mode="bilinear").flatten(2)
                small = small if self.fault == "logits_of_query_masks_cut_at_one_half" else small.sigmoid()
                keep = (small >= 0.5) | (small < 0.5).all(2, keepdim=True)
                memory = maps[i % LEVELS] + self.levels[1, i % LEVELS]
                x = self.seek[i](x, x + tags, memory + plan(shape, x)[0], memory, keep=keep[:, None])
                x = self.feeds[i + 2](self.meet[i](x, x + tags, x + tags, x))
        return {"class_queries_logits": torch.stack(classes), "masks_queries_logits": torch.stack(masks)}


class ListOfWeights(Port):
    def take(self, model: Mask2Former) -> None:
        kept = {k: p for k, p in model.named_parameters() if p.ndim > 1 or k[:8] != "encoder."}
        self.index = {name: i for i, name in enumerate(kept)}
        self.weights = nn.ParameterList(leaf(p.movedim(0, -1)) for p in kept.values())
        self.rows = nn.ModuleList(Rows(stage[1]) for stage in model.encoder)

    def w(self, name: str) -> Tensor:
        return self.weights[self.index[name]]

    def linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.w(name + ".weight").flatten(0, -2) + self.w(name + ".bias")

    def norm(self, at: str, x: Tensor, groups: int = 0) -> Tensor:
        y = x.unflatten(-1, (groups or 1, -1)).flatten(1, -3)
        var, mean = torch.var_mean(y, (1, 3) if groups else 3, correction=0, keepdim=True)
        return ((y - mean) * (var + 1e-5).rsqrt()).view_as(x) * self.w(at + ".weight") + self.w(at + ".bias")

    def feed(self, layer: str, x: Tensor) -> Tensor:
        y = self.linear(layer + "fc2", self.linear(layer + "fc1", x).relu())
        return self.norm(layer + "final_layer_norm", x + y)

    def sample(self, layer: str, x: Tensor, pos: Tensor, places: Tensor, shapes: list) -> Tensor:
        where = self.linear(layer + ".sampling_offsets", x + pos).unflatten(2, (HEADS, LEVELS, POINTS, 2))
        share = self.linear(layer + ".attention_weights", x + pos).unflatten(2, (HEADS, LEVELS, POINTS))
        value, y, start = self.linear(layer + ".value_proj", x).unflatten(2, (HEADS, -1)), 0, 0
        if self.fault == "first_sampling_offsets_detached" and layer == FIRST:
            where = where.detach()
        over = 4 if self.fault == "second_sampling_shares_whole_per_level" and layer == SECOND else (3, 4)
        share = (share - share.logsumexp(over, keepdim=True)).exp()
        for j, (h, w) in enumerate(shapes):
            at = places[:, None] * x.new_tensor([w, h]) + where[:, :, :, j] - 0.5
            tents = [(1 - (at[..., k, None] - torch.arange((w, h)[k]).to(x)).abs()).relu() for k in (0, 1)]
            part, start = value[:, start : start + h * w].unflatten(1, (h, w)), start + h * w
            y = y + torch.einsum("nshp,nshpc,nshpr,nrchd->nshd", share[..., j, :], *tents, part)
        return self.norm(layer + "_layer_norm", x + self.linear(layer + ".output_proj", y.flatten(2)))

    def look(self, name: str, x: Tensor, *sides: Tensor, hide: Tensor | float = 0) -> Tensor:
        w, b = self.w(name + ".in_proj_weight").chunk(3, 1), self.w(name + ".in_proj_bias").chunk(3)
        q, k, v = ((y @ w[i] + b[i]).unflatten(2, (HEADS, -1)) for i, y in enumerate(sides))
        scores = torch.einsum("nqhd,nkhd->nqkh", q, k) / q.shape[3] ** 0.5
        y = torch.einsum("nqkh,nkhd->nqhd", (scores + hide).softmax(2), v).flatten(2)
        return self.norm(name + "_layer_norm", x + self.linear(name + ".out_proj", y))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        x, stages, classes, masks = x.movedim(1, 3), zip(self.weights, self.rows, strict=False), [], []
        maps = [x := rows(spatial(x, kernel.movedim(-1, 0), None, 2)).relu() for kernel, rows in stages]
        fine, shapes, enter = maps[0], [y.shape[1:3] for y in maps[:0:-1]], "decoder.input_projections."
        x = [self.linear(f"{enter}{i}.0", y.flatten(1, 2)) for i, y in enumerate(maps[:0:-1])]
        x = torch.cat([self.norm(f"{enter}{i}.1", y, 4) for i, y in enumerate(x)], 1)
        level, (pos, places) = self.w("decoder.level_embed"), zip(*(plan(s, x) for s in shapes), strict=True)
        pos, places = torch.cat([p + level[:, i] for i, p in enumerate(pos)]), torch.cat(places)
        for layer in (FIRST, SECOND):
            x = self.feed(layer[:-9], self.sample(layer, x, pos, places, shapes))
        maps = x.split([h * w for h, w in shapes], 1)
        above = F.interpolate(maps[2].mT.unflatten(2, shapes[2]), fine.shape[1:3], mode="bilinear")
        y = self.norm("decoder.adapter_1.1", fine @ self.w("decoder.adapter_1.0.weight").flatten(0, -2), 4)
        y = spatial(y + above.movedim(1, 3), self.w("decoder.layer_1.0.weight").movedim(-1, 0))
        pixels = self.linear("decoder.mask_projection", self.norm("decoder.layer_1.1", y, 4).relu())
        x = self.w(TOP + "queries_features.weight").T.expand(len(y), -1, -1)
        tags, level = self.w(TOP + "queries_embedder.weight").T, self.w(TOP + "level_embed.weight")
        for i in range(5):
            y, shape, layer = self.norm(TOP + "layernorm", x), shapes[i % LEVELS], f"{TOP}layers.{i}."
            classes.append(self.linear("class_predictor", y))
            y = self.linear(MASK + ".mask_embedder.2", self.linear(MASK + ".mask_embedder.0", y).relu())
            masks.append(torch.einsum("nqc,nhwc->nqhw", y, pixels))
            if i < 4:
                hide = F.interpolate(masks[i], shape, mode="bilinear").flatten(2).sigmoid() < 0.5
                hide = torch.where(hide & ~hide.all(2, keepdim=True), -torch.inf, 0.0)[..., None]
                memory = maps[i % LEVELS] + level[:, i % LEVELS]
                wave, _ = plan(shape, x, scaled=self.fault != "query_decoder_sine_positions_left_unscaled")
                x = self.look(layer + "cross_attn", x, x + tags, memory + wave, memory, hide=hide)
                y = x + tags if self.fault == "positions_in_values_of_third_queries" and i == 2 else x
                x = self.feed(layer, self.look(layer + "self_attn", x, x + tags, x + tags, y))
        return {"class_queries_logits": torch.stack(classes), "masks_queries_logits": torch.stack(masks)}


right(task, "mask2former_as_a_tree_of_looks", "other borders, fused weights", TreeOfLooks)
right(task, "mask2former_as_a_list_of_weights", "flat, channels last, dense sampling", ListOfWeights)
wrong(
    task,
    TreeOfLooks,
    segmenter_averages_keep_one_tenth=("momentum for its complement", "encoder.2.1", "buffer"),
    sampling_starts_at_corners_of_cells=("half a cell missing", ("decoder.encoder", FIRST)),
    sampled_level_raised_to_pixels_by_nearest=("another interpolation", "decoder"),
    logits_of_query_masks_cut_at_one_half=("threshold before sigmoid", MASK),
)
wrong(
    task,
    ListOfWeights,
    first_sampling_offsets_detached=("a detach too many", (FIRST, FIRST + ".sampling_offsets"), GRADIENTS),
    second_sampling_shares_whole_per_level=("softmax over part", SECOND),
    query_decoder_sine_positions_left_unscaled=("a flag left out", TOP + "position_embedder"),
    positions_in_values_of_third_queries=("wrong values", (TOP + "layers.2", TOP + "layers.2.self_attn")),
)
