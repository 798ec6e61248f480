"""Two ports of Segment Anything: a tree of rows gathered into panes, and stacks of weights over maps."""

from copy import deepcopy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_first_segment_anything import PATCH, SamModel, missed, scene

task = few("twenty_first_segment_anything", SamModel, scene, missed)
USES = "layer_norm1", "attn.qkv", "attn.proj", "layer_norm2", "mlp.lin1", "mlp.lin2"


class Dense(nn.Module):
    def __init__(self, layer: nn.Module, part: slice = slice(None)):
        super().__init__()
        self.kernel, self.shift = leaf(layer.weight[part].flatten(1).T), leaf(layer.bias[part])

    def forward(self, x: Tensor) -> Tensor:
        return torch.matmul(x, self.kernel) + self.shift


def between(table: Tensor, size: int) -> Tensor:
    """What the table says of each two cells of a line of that size, between its rows: [Q, K, D]."""
    spots = ((torch.arange(2 * size - 1).to(table) + 0.5) * len(table) / (2 * size - 1) - 0.5).clamp(min=0)
    low = spots.long()
    rows = torch.lerp(table[low], table[(low + 1).clamp(max=len(table) - 1)], (spots - low)[:, None])
    return rows.unfold(0, size, 1).mT.flip(1)


class Gaze(nn.Module):
    """A layer of rows [N, L, C] that look at those in their pane; an empty row fills what juts out."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        old, width = layer.attn, layer.attn.proj.in_features
        self.side, self.level, self.back = layer.window_size, deepcopy(layer.layer_norm1), Dense(old.proj)
        self.parts = nn.ModuleList(Dense(old.qkv, slice(i, i + width)) for i in range(0, 3 * width, width))
        self.down, self.across = leaf(old.rel_pos_h), leaf(old.rel_pos_w)
        thought = deepcopy(layer.layer_norm2), Dense(layer.mlp.lin1), nn.GELU(), Dense(layer.mlp.lin2)
        self.thought, self.hidden, self.whole, self.scaled = nn.Sequential(*thought), False, False, False

    def panes(self, high: int, wide: int, device: torch.device) -> tuple[Tensor, int, int]:
        rows = torch.arange(high * wide, device=device).view(high, wide)
        if self.side and (self.training or not self.whole):
            rows = F.pad(rows, (0, -wide % self.side, 0, -high % self.side), value=high * wide)
            high = wide = self.side
        return rows.unfold(0, high, high).unfold(1, wide, wide).flatten(2).flatten(0, 1), high, wide

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:
        index, high, wide = self.panes(*grid, x.device)
        cells = F.pad(self.level(x), (0, 0, 0, 1))[:, index]
        q, k, v = (part(cells).unflatten(3, (2, -1)).transpose(2, 3) for part in self.parts)
        pairs = between(self.down, high)[:, None, :, None] + between(self.across, wide)[:, None]
        asked = q / q.shape[-1] ** 0.5 if self.scaled else q
        bias = torch.einsum("nwhqd,qkd->nwhqk", asked, pairs.flatten(2, 3).flatten(0, 1))
        bias = bias.masked_fill((index == x.shape[1])[:, None, None], -torch.inf) if self.hidden else bias
        seen = F.scaled_dot_product_attention(q, k, v, bias).transpose(2, 3).flatten(3).flatten(1, 2)
        x = x + self.back(seen[:, index.flatten().argsort()[: x.shape[1]]])
        return x + self.thought(x)


class RowsInPanes(Port):
    def take(self, model: SamModel) -> None:
        body, prompts, decoder = model.vision_encoder, model.prompt_encoder, model.mask_decoder
        self.patches, self.places = Dense(body.patch_embed.projection), leaf(body.pos_embed.flatten(1, 2))
        self.gazes = nn.ModuleList(map(Gaze, body.layers))
        self.narrow, self.around = leaf(body.neck[0].weight), leaf(body.neck[2].weight)
        self.ends = pile(torch.stack([*norm.parameters()]) for norm in body.neck[1::2])
        signs = prompts.not_a_point_embed, *prompts.point_embed, decoder.mask_tokens
        self.signs, self.worth = (
            leaf(torch.cat([x.weight for x in signs])),
            Dense(decoder.iou_prediction_head),
        )
        self.register_buffer("waves", model.shared_image_embedding.positional_embedding.clone())
        wish, _, mask = decoder.output_hypernetworks_mlp
        self.wish = nn.Sequential(Dense(wish), nn.ReLU(), Dense(mask))
        self.gazes[0].hidden = self.fault == "segment_anything_first_layer_hides_its_padding"
        self.gazes[1].whole = self.fault == "segment_anything_middle_layer_attends_globally_in_evaluation"
        self.gazes[2].scaled = self.fault == "segment_anything_last_layer_scales_queries_too_early"

    def at(self, places: Tensor) -> Tensor:
        turns = torch.pi * (4 * places - 2) @ self.waves
        return torch.view_as_real(torch.polar(torch.ones_like(turns), turns)).flip(-1).mT.flatten(-2)

    def forward(self, pixel_values: Tensor, input_points: Tensor, input_labels: Tensor) -> dict:
        high, wide = grid = tuple(length // PATCH for length in pixel_values.shape[2:])
        x = self.patches(F.unfold(pixel_values, PATCH, stride=PATCH).mT) + self.places
        for gaze in self.gazes:
            x = gaze(x, grid)
        for weight, norm in zip((self.narrow, self.around), self.ends, strict=True):
            x = F.layer_norm(tapped(x.view(-1, *grid, x.shape[-1]), weight), norm[0].shape, *norm, 1e-6)
        places = torch.cartesian_prod(*((torch.arange(n).to(x) + 0.5) / n for n in grid)).flip(1)
        rows, size = x.flatten(1, 2) + self.at(places), PATCH * torch.tensor([wide, high]).to(x)
        asked = self.at((input_points + 0.5) / size) * (input_labels >= 0)[..., None]
        asked = asked + self.signs[input_labels + 1] + self.signs[3]
        masks = torch.einsum("npc,nlc->npl", self.wish(asked), rows) / rows.shape[-1] ** 0.5
        rows = rows.detach() if self.fault == "segment_anything_scores_send_the_map_no_gradient" else rows
        scores = self.worth(asked + torch.einsum("npl,nlc->npc", masks.softmax(-1), rows))[..., 0]
        masks, x = masks.unflatten(2, grid), x.permute(0, 3, 1, 2)
        return {"pred_masks": masks, "iou_scores": scores, "image_embeddings": x}


class StacksOverMaps(Port):
    def take(self, model: SamModel) -> None:
        body, prompts, decoder = model.vision_encoder, model.prompt_encoder, model.mask_decoder
        stacks = {use.split(".")[-1]: [x.get_submodule(use) for x in body.layers] for use in USES}
        stacks |= {"ends": body.neck[1::2], "patch": body.patch_embed, "worth": [decoder.iou_prediction_head]}
        stacks["wish"] = decoder.output_hypernetworks_mlp[::2]
        self.w = nn.ParameterDict({use: pile(x.weight for x in layers) for use, layers in stacks.items()})
        self.b = nn.ParameterDict({use: pile(x.bias for x in layers) for use, layers in stacks.items()})
        self.tables = nn.ParameterList(leaf(x) for layer in body.layers for x in layer.attn.parameters(False))
        self.sides = [layer.window_size for layer in body.layers]
        self.narrow, self.around = leaf(body.neck[0].weight), leaf(body.neck[2].weight)
        signs = *prompts.point_embed, prompts.not_a_point_embed, decoder.mask_tokens
        self.signs, self.places = pile(x.weight[0] for x in signs), leaf(body.pos_embed[0].movedim(2, 0))
        self.register_buffer("waves", model.shared_image_embedding.positional_embedding.T.clone())

    def by(self, use: str, i: int, x: Tensor) -> Tensor:
        return torch.einsum("nc...,oc->no...", x, self.w[use][i]) + self.b[use][i][:, None, None]

    def normed(self, use: str, i: int, x: Tensor, axes: tuple = (1,)) -> Tensor:
        spread, center = torch.var_mean(x, axes, correction=0, keepdim=True)
        gain, shift = (part[use][i][:, None, None] for part in (self.w, self.b))
        return (x - center) / (spread + 1e-6).sqrt() * gain + shift

    def table(self, table: Tensor, size: int) -> Tensor:
        """What is added for each query and key of a line, by a hat around each row of the table."""
        line, count = torch.arange(size).to(table), len(table)
        steps = line[:, None, None] - line[:, None] + size - 1
        spots = ((2 * steps + 1) * count / (2 * size - 1) - 1).clamp(0, 2 * count - 2) / 2
        if self.fault == "segment_anything_last_layer_stretches_positions_from_end_to_end":
            spots = steps * (count - 1) / (2 * size - 2)
        return F.relu(1 - (spots - torch.arange(count).to(table)).abs()) @ table

    def attend(self, i: int, x: Tensor) -> Tensor:
        high, wide = (self.sides[i],) * 2 if self.sides[i] else x.shape[2:]
        cells = self.by("qkv", i, F.pad(x, (0, -x.shape[3] % wide, 0, -x.shape[2] % high)))
        q, k, v = cells.unflatten(3, (-1, wide)).unflatten(2, (-1, high)).unflatten(1, (3, 2, -1)).unbind(1)
        down, across = (self.table(self.tables[2 * i + j], side) for j, side in enumerate((high, wide)))
        scores = torch.einsum("nmdrasb,nmdresf->nmrsabef", q / q.shape[2] ** 0.5, k)
        scores = scores + torch.einsum("nmdrasb,aed->nmrsabe", q, down)[..., None]
        scores = scores + torch.einsum("nmdrasb,bfd->nmrsabf", q, across)[..., None, :]
        shares = scores.flatten(-2).softmax(-1).view_as(scores)
        seen = torch.einsum("nmrsabef,nmdresf->nmdrasb", shares, v).flatten(5).flatten(3, 4).flatten(1, 2)
        return self.by("proj", i, seen[:, :, : x.shape[2], : x.shape[3]])

    def waved(self, x: Tensor, y: Tensor) -> Tensor:
        turns = self.waves @ torch.stack([2 * x - 1, 2 * y - 1], -2)
        return torch.sin(2 * torch.pi * torch.cat([turns, turns + 0.25], -2))

    def forward(self, pixel_values: Tensor, input_points: Tensor, input_labels: Tensor) -> dict:
        fixed = self.fault == "segment_anything_map_of_positions_gets_no_gradient"
        places = self.places.detach() if fixed else self.places
        x = F.conv2d(pixel_values, self.w["patch"][0], self.b["patch"][0], PATCH) + places
        for i in range(len(self.sides)):
            x = x + self.attend(i, self.normed("layer_norm1", i, x))
            y = self.by("lin1", i, self.normed("layer_norm2", i, x))
            x = x + self.by("lin2", i, 0.5 * y * (1 + torch.erf(y / 2**0.5)))
        axes = (1, 2, 3) if self.fault == "segment_anything_neck_first_normalises_whole_maps" else (1,)
        x = self.normed("ends", 0, F.conv2d(x, self.narrow), axes)
        x = self.normed("ends", 1, F.conv2d(x, self.around, padding=1))
        down, across = ((torch.arange(n).to(x) + 0.5) / n for n in x.shape[2:])
        maps = x.flatten(2) + self.waved(across.repeat(len(down)), down.repeat_interleave(len(across)))
        shift = 0 if self.fault == "segment_anything_points_lie_at_corners_of_pixels" else 0.5
        spots = [(input_points[..., i] + shift) / pixel_values.shape[3 - i] for i in (0, 1)]
        asked = torch.where(input_labels[:, None] < 0, 0, self.waved(*spots))
        asked = (asked.mT + self.signs[input_labels % 3] + self.signs[3]).mT[..., None]
        wish = self.by("wish", 1, F.relu(self.by("wish", 0, asked)))[..., 0]
        masks = wish.mT @ maps / wish.shape[1] ** 0.5
        scores = self.by("worth", 0, asked + (maps @ masks.softmax(-1).mT)[..., None])[:, 0, :, 0]
        return {"pred_masks": masks.unflatten(2, x.shape[2:]), "iou_scores": scores, "image_embeddings": x}


SLOPES, layers = ("input gradient", "weight gradient"), [f"vision_encoder.layers.{i}" for i in range(3)]
first, middle, last = ((layer + ".attn", layer) for layer in layers)
right(task, "segment_anything_of_rows_in_panes", "a tree of gathered rows, distances by pair", RowsInPanes)
right(task, "segment_anything_of_stacks_over_maps", "stacked weights, windows as axes", StacksOverMaps)
wrong(
    task,
    RowsInPanes,
    segment_anything_first_layer_hides_its_padding=("a mask too many", first),
    segment_anything_middle_layer_attends_globally_in_evaluation=("windows lost in eval", middle, "eval"),
    segment_anything_last_layer_scales_queries_too_early=("a scale before its turn", last[0]),
    segment_anything_scores_send_the_map_no_gradient=("detach", "mask_decoder", SLOPES),
)
wrong(
    task,
    StacksOverMaps,
    segment_anything_map_of_positions_gets_no_gradient=("frozen", "vision_encoder", "weight gradient"),
    segment_anything_last_layer_stretches_positions_from_end_to_end=("corners aligned", last[0]),
    segment_anything_neck_first_normalises_whole_maps=("another norm", "vision_encoder.neck.layer_norm1"),
    segment_anything_points_lie_at_corners_of_pixels=("half a pixel", "prompt_encoder"),
)
