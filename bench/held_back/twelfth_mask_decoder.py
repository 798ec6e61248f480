"""Two ports of a small Segment Anything: a tree of other borders, and stacks of weights with einsum."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twelfth_mask_decoder import GRID, IMAGE, Sam, prompted, segmented

task = few("twelfth_mask_decoder", Sam, prompted, segmented)
CELLS = torch.cartesian_prod(*map(torch.arange, GRID)).flip(1)


def placed(waves: Tensor, spots: Tensor, size: tuple[int, int] = IMAGE) -> Tensor:
    phases = 2 * torch.pi * (2 * (spots + 0.5) / spots.new_tensor(size[::-1]) - 1) @ waves
    return torch.cat([phases.sin(), phases.cos()], -1)


class Heads(nn.Module):
    def __init__(self, attn: nn.Module):
        super().__init__()
        *asks, self.leave = attn.children()
        self.tables, self.heads, self.quick = nn.ParameterList(attn.parameters(False)), attn.num_heads, False
        self.kernels = leaf(torch.cat([x.weight for x in asks]))
        self.offsets = leaf(torch.cat([x.bias for x in asks]))

    def forward(self, *given: Tensor, size: tuple = ()) -> Tensor:
        pairs = zip(given, self.kernels.chunk(3), self.offsets.chunk(3), strict=True)
        q, k, v = (F.linear(*x).unflatten(2, (self.heads, -1)).transpose(1, 2) for x in pairs)
        bias = None
        if size and (self.training or not self.quick):
            pairs, asked = zip(self.tables, size, strict=True), q.unflatten(2, size)
            rows, cols = (torch.stack([t[i : i + s].flip(0) for i in range(s)]) for t, s in pairs)
            down = torch.einsum("bgijd,ikd->bgijk", asked, rows)[..., None]
            across = torch.einsum("bgijd,jkd->bgijk", asked, cols)[..., None, :]
            bias = (down + across).flatten(4).flatten(2, 3)
        return self.leave(F.scaled_dot_product_attention(q, k, v, bias).transpose(1, 2).flatten(2))


class Pane(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.size, self.early, (self.even, even, attn, mlp) = block.window_size, False, block.children()
        self.look, self.think = Heads(attn), nn.Sequential(even, *mlp.layers[:1], mlp.act, *mlp.layers[1:])

    def forward(self, x: Tensor) -> Tensor:
        (n, h, w, c), (high, wide) = x.shape, self.size
        edges = (0, 0, 0, -w % wide, 0, -h % high)
        y = self.even(F.pad(x, edges)) if self.early else F.pad(self.even(x), edges)
        y, whole = F.unfold(y.movedim(3, 1), self.size, stride=self.size), y.shape[1:3]
        y = y.view(n, c, high * wide, -1).transpose(1, 3).flatten(0, 1)
        y = self.look(y, y, y, size=self.size).view(n, -1, high * wide, c).transpose(1, 3).flatten(1, 2)
        x = x + F.fold(y, whole, self.size, stride=self.size).movedim(1, 3)[:, :h, :w]
        return x + self.think(x)


class Exchange(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        own, self.think, *evens, out, back = layer.children()
        self.own, self.out, self.back, self.evens = Heads(own), Heads(out), Heads(back), nn.ModuleList(evens)
        self.first = self.fresh = layer.skip_first_layer_pe

    def forward(self, x: Tensor, at: Tensor, cells: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        marked = x if self.first else x + at
        x = self.evens[0](self.own(marked, marked, x) + (0 if self.fresh else x))
        x = self.evens[1](x + self.out(x + at, cells + places, cells))
        x = self.evens[2](x + self.think(x))
        return x, self.evens[3](cells + self.back(cells + places, x + at, x))


class MaskTree(Port):
    def take(self, model: Sam) -> None:
        image, prompt, mask = model.children()
        kinds = prompt.not_a_point_embed, *prompt.point_embeddings, mask.iou_token, mask.mask_tokens
        self.kinds = leaf(torch.cat([x.weight for x in kinds]))
        self.ground, self.neck = leaf(prompt.no_mask_embed.weight), image.neck
        self.register_buffer("waves", next(model.buffers()).clone())
        self.entry, self.places = image.patch_embed, leaf(image.pos_embed.movedim(2, 0))
        layers, final, self.even = mask.transformer.children()
        self.tower, self.trade = nn.Sequential(*map(Pane, image.blocks)), nn.ModuleList(map(Exchange, layers))
        self.final, self.rise = Heads(final), mask.output_upscaling
        self.heads = nn.ModuleList([mask.iou_prediction_head, *mask.output_hypernetworks_mlps])
        self.tower[0].early = self.fault == "sam_window_padded_before_first_norm"
        self.tower[1].look.quick = self.fault == "sam_fast_evaluation_forgets_relative_positions"
        self.trade[0].fresh = self.fault != "sam_first_self_attention_added_to_its_tokens"

    def forward(self, images: Tensor, points: Tensor, labels: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        kinds = torch.cat([labels, labels.new_tensor([[2, 3]]).expand(len(labels), -1)], 1)
        least = -1 if self.fault == "sam_unused_clicks_keep_their_position" else 0
        marks = placed(self.waves, torch.cat([points, boxes.unflatten(1, (2, 2))], 1))
        own = self.kinds[5:].expand(len(labels), -1, -1)
        x = at = torch.cat([own, marks * (kinds >= least)[..., None] + self.kinds[kinds + 1]], 1)
        cells = self.tower((self.entry(images) + self.places).movedim(1, 3)).movedim(3, 1)
        cells = self.neck(cells).flatten(2).mT + self.ground
        places = placed(self.waves, CELLS.to(points), GRID)
        for exchange in self.trade:
            x, cells = exchange(x, at, cells, places)
        x = self.even(x + self.final(x + at, cells + places, cells))
        quality, *weights = (head(x[:, i]) for i, head in enumerate(self.heads))
        masks = torch.einsum("nchw,mnc->nmhw", self.rise(cells.mT.unflatten(2, GRID)), torch.stack(weights))
        return {"masks": masks, "iou_predictions": quality}


class MaskStacks(Port):
    def take(self, model: Sam) -> None:
        groups: dict[str, list[Tensor]] = {}
        for name, p in model.named_parameters():
            key = name.replace("." + next(filter(str.isdigit, name), "-"), "", 1)
            key = key.split(".", 1 + ("transformer" in key))[-1].replace(".", "_")
            groups.setdefault(key, []).append(p)
        for key, values in groups.items():
            alike = len({p.shape for p in values}) == 1
            setattr(self, key, pile(values) if alike else nn.ParameterList(map(leaf, values)))
        self.register_buffer("waves", next(model.buffers()).clone())

    def two(self, key: str, i: int) -> tuple[Tensor, Tensor]:
        return getattr(self, key + "_weight")[i], getattr(self, key + "_bias")[i]

    def dot(self, key: str, x: Tensor, i: int = 0) -> Tensor:
        return F.linear(x, *self.two(key, i))

    def even(self, x: Tensor, gain: Tensor, shift: Tensor, eps: float = 1e-5, lost: int = 0) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=lost, keepdim=True)
        return torch.addcmul(shift, x - center, gain / (spread + eps).sqrt())

    def block(self, i: int, x: Tensor) -> Tensor:
        (h, w), (high, wide) = x.shape[1:3], GRID if i == 1 else (4, 4)
        y = F.pad(self.even(x, *self.two("blocks_norm1", i), 1e-6), (0, 0, 0, -w % wide, 0, -h % high))
        y = self.dot("blocks_attn_qkv", y.unflatten(2, (-1, wide)).unflatten(1, (-1, high)), i)
        q, k, v = y.unflatten(5, (3, 2, -1)).movedim(5, 0)
        scaled = q * q.shape[-1] ** -0.5
        q = scaled if self.fault == "sam_scaled_queries_ask_for_relative_positions" and i == 2 else q
        at, to = (torch.arange(size)[:, None] - torch.arange(size) + size - 1 for size in (high, wide))
        rows = torch.einsum("naibjgd,ikd->nabgijk", q, self.blocks_attn_rel_pos_h[i][at])
        columns = torch.einsum("naibjgd,jld->nabgijl", q, self.blocks_attn_rel_pos_w[i][to])
        share = torch.einsum("naibjgd,nakblgd->nabgijkl", scaled, k) + rows[..., None] + columns[..., None, :]
        y = torch.einsum("nabgijkl,nakblgd->naibjgd", share.flatten(6).softmax(-1).view_as(share), v)
        x = x + self.dot("blocks_attn_proj", y.flatten(5).flatten(3, 4).flatten(1, 2)[:, :h, :w], i)
        y = self.dot("blocks_mlp_layers_0", self.even(x, *self.two("blocks_norm2", i), 1e-6), i)
        return x + self.dot("blocks_mlp_layers_1", F.gelu(y), i)

    def look(self, key: str, i: int, *given: Tensor) -> Tensor:
        named = zip("qkv", given, strict=True)
        q, k, v = (self.dot(f"{key}_{t}_proj", x, i).unflatten(2, (3, -1)) for t, x in named)
        share = (torch.einsum("nqgd,nkgd->ngqk", q, k) * q.shape[3] ** -0.5).softmax(-1)
        return self.dot(f"{key}_out_proj", torch.einsum("ngqk,nkgd->nqgd", share, v).flatten(2), i)

    def forward(self, images: Tensor, points: Tensor, labels: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        used, kinds = labels[..., None] >= 0, self.point_embeddings_weight[:, 0]
        clicks = placed(self.waves, points) + F.one_hot(labels.clamp(0), 2).to(images) @ kinds[:2]
        corners = placed(self.waves, boxes.unflatten(1, (2, 2))) + kinds[2:]
        own = torch.cat([self.iou_token_weight[0], self.mask_tokens_weight[0]]).expand(len(images), -1, -1)
        x = at = torch.cat([own, used * clicks + ~used * self.not_a_point_embed_weight[0], corners], 1)
        cells = F.conv2d(images, *self.two("patch_embed", 0), 4).movedim(1, 3) + self.pos_embed[0]
        cells = self.block(2, self.block(1, self.block(0, cells)))
        for i in range(2):
            cells = spatial(cells, self.neck_weight[2 * i])
            cells = self.even(cells, self.neck_weight[2 * i + 1], self.neck_bias[i], 1e-6)
        places = placed(self.waves, CELLS.to(points), GRID)
        cells = cells.flatten(1, 2) + self.no_mask_embed_weight[0]
        for i in range(2):
            y = x + i * at
            x = self.even(i * x + self.look("layers_self_attn", i, y, y, x), *self.two("layers_norm1", i))
            y = self.look("layers_cross_attn_token_to_image", i, x + at, cells + places, cells)
            x = self.even(x + y, *self.two("layers_norm2", i))
            y = self.dot("layers_mlp_layers_1", self.dot("layers_mlp_layers_0", x, i).relu(), i)
            x = self.even(x + y, *self.two("layers_norm3", i))
            y = x + at if self.fault == "sam_last_cell_update_has_places_in_its_values" and i == 1 else x
            y = self.look("layers_cross_attn_image_to_token", i, cells + places, x + at, y)
            cells = self.even(cells + y, *self.two("layers_norm4", i))
        x = x + self.look("final_attn_token_to_image", 0, x + at, cells + places, cells)
        x, fine = self.even(x, *self.two("norm_final_attn", 0)), cells.unflatten(1, GRID)
        for i in (0, 2):
            weight, bias = self.two("output_upscaling", i)
            fine = torch.einsum("nhwc,coij->nhiwjo", fine, weight).flatten(3, 4).flatten(1, 2) + bias
            lost = int(self.fault == "sam_upscaling_norm_is_unbiased")
            fine = F.gelu(fine if i else self.even(fine, *self.two("output_upscaling", 1), 1e-6, lost))
        cut, masks, quality = self.fault == "sam_overlap_head_is_detached", x[:, 1:4], x[:, 0]
        quality = quality.detach() if cut else quality
        for i in range(3):
            weight, bias = self.two(f"output_hypernetworks_mlps_layers_{i}", slice(None))
            masks = torch.einsum("nmc,moc->nmo", masks.relu() if i else masks, weight) + bias
            quality = self.dot("iou_prediction_head_layers", quality.relu() if i else quality, i)
        return {"masks": torch.einsum("nmc,nhwc->nmhw", masks, fine), "iou_predictions": quality}


right(task, "sam_tree_of_panes_and_exchanges", "other borders, fused products", MaskTree)
right(task, "sam_by_stacks_and_einsum", "flat code, stacked weights", MaskStacks)
blocks, mask, update = "image_encoder.blocks", "mask_decoder", "mask_decoder.transformer.layers.1"
update = (update, f"{update}.cross_attn_image_to_token")
for make, name, *truth in (
    (MaskTree, "sam_window_padded_before_first_norm", "pads too early", (f"{blocks}.0", f"{blocks}.0.attn")),
    (MaskTree, "sam_fast_evaluation_forgets_relative_positions", "eval path", f"{blocks}.1.attn", "eval"),
    (MaskTree, "sam_first_self_attention_added_to_its_tokens", "a residual", f"{mask}.transformer.layers.0"),
    (MaskTree, "sam_unused_clicks_keep_their_position", "a mask forgotten", "prompt_encoder"),
    (MaskStacks, "sam_scaled_queries_ask_for_relative_positions", "scaled early", f"{blocks}.2.attn"),
    (MaskStacks, "sam_last_cell_update_has_places_in_its_values", "another input", update),
    (MaskStacks, "sam_upscaling_norm_is_unbiased", "unbiased variance", f"{mask}.output_upscaling.1"),
    (MaskStacks, "sam_overlap_head_is_detached", "detach", (mask, f"{mask}.iou_prediction_head"), GRADIENTS),
):
    wrong(task, make, **{name: truth})
