"""Ports of a small DETR: a tree of blocks with the batch first, and stacked weights in functional code."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._tenth_detr import DETR, HEADS, WIDTH, FrozenBatchNorm2d, detection, scenes

task = few("tenth_detr", DETR, scenes, detection)


class Dense(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.kernel, self.offset = leaf(weight.flatten(1).T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.kernel + self.offset


class ConvNorm(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.Module, fault: str):
        super().__init__()
        self.fault, self.live = fault, not isinstance(norm, FrozenBatchNorm2d)
        self.weight, self.how = leaf(conv.weight), (conv.stride, conv.padding)
        self.mean, self.spread = nn.Buffer(norm.running_mean.clone()), nn.Buffer(norm.running_var.clone())
        held = leaf if self.live else nn.Buffer
        self.gain, self.offset = held(norm.weight.clone()), held(norm.bias.clone())

    def forward(self, x: Tensor) -> Tensor:
        own = self.training and (self.live or self.fault == "last_frozen_norm_takes_batch_statistics")
        x = F.conv2d(x, self.weight, None, *self.how)
        return F.batch_norm(x, self.mean, self.spread, self.gain, self.offset, own, 0.1, 1e-5)


class Attention(nn.Module):
    def __init__(self, mha: nn.MultiheadAttention):
        super().__init__()
        self.query, self.key, self.value = map(Dense, mha.in_proj_weight.chunk(3), mha.in_proj_bias.chunk(3))
        self.merge = Dense(mha.out_proj.weight, mha.out_proj.bias)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, seen: Tensor | None) -> Tensor:
        parts = self.query(query), self.key(key), self.value(value)
        q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in parts)
        return self.merge(F.scaled_dot_product_attention(q, k, v, seen).transpose(1, 2).flatten(2))


class Layer(nn.Module):
    def __init__(self, layer: nn.Module, fault: str):
        super().__init__()
        self.fault, self.attention = fault, Attention(layer.self_attn)
        self.across = Attention(layer.multihead_attn) if hasattr(layer, "multihead_attn") else None
        norms = [x for x in layer.children() if isinstance(x, nn.LayerNorm)]
        self.norms = nn.ParameterList(pile([x.weight, x.bias]) for x in norms)
        self.up, self.down = (Dense(x.weight, x.bias) for x in (layer.linear1, layer.linear2))

    def forward(self, x: Tensor, places: Tensor, seen: Tensor | None, *memory: Tensor) -> Tensor:
        placed = x + places
        value = placed if not memory and self.fault == "second_encoder_values_carry_sine_positions" else x
        x = F.layer_norm(x + self.attention(placed, placed, value, seen), [WIDTH], *self.norms[0])
        if memory:
            key, value, seen = memory
            seen = None if self.fault == "last_cross_attention_sees_padded_cells" else seen
            x = F.layer_norm(x + self.across(x + places, key, value, seen), [WIDTH], *self.norms[1])
        return F.layer_norm(x + self.down(F.relu(self.up(x))), [WIDTH], *self.norms[-1])


def waves(padded: Tensor, like: Tensor, early: float = 0) -> Tensor:
    rates = 1e4 ** -(torch.arange(0, WIDTH // 2, 2, dtype=like.dtype, device=like.device) * 2 / WIDTH)
    real = (~padded).to(like.dtype)
    steps = [(real.cumsum(i) - early) / (real.sum(i, keepdim=True) + 1e-6) for i in (1, 2)]
    angles = 2 * torch.pi * torch.stack(steps, 3)[..., None] * rates
    return torch.stack([angles.sin(), angles.cos()], -1).flatten(3).flatten(1, 2)


class TreeOfBlocks(Port):
    def take(self, model: DETR) -> None:
        body, hub, fault = model.backbone.body, model.transformer, self.fault
        self.stem, self.blocks = ConvNorm(body.conv1, body.bn1, ""), nn.ModuleList()
        for i, b in enumerate([*body.layer1, *body.layer2]):
            skip = nn.Identity() if b.downsample is None else ConvNorm(*b.downsample, "")
            pair = ConvNorm(b.conv1, b.bn1, ""), ConvNorm(b.conv2, b.bn2, fault * (i == 1))
            self.blocks.append(nn.ModuleList([*pair, skip]))
        self.encoder = nn.ModuleList(Layer(x, fault * (i == 1)) for i, x in enumerate(hub.encoder))
        self.decoder = nn.ModuleList(Layer(x, fault * (i == 2)) for i, x in enumerate(hub.decoder.layers))
        self.marks, self.slots = map(leaf, model.query_embed.weight.chunk(2, 1))
        ends = model.input_proj, model.class_embed, hub.reference_points, *hub.decoder.bbox_embed.layers
        self.lift, self.kind, self.anchor, *boxes = (Dense(x.weight, x.bias) for x in ends)
        middle = nn.Identity() if fault == "box_head_without_its_middle_relu" else nn.ReLU()
        self.box = nn.Sequential(boxes[0], nn.ReLU(), boxes[1], middle, boxes[2])
        self.norm = pile([hub.decoder.norm.weight, hub.decoder.norm.bias])

    def forward(self, images: Tensor, mask: Tensor) -> dict[str, Tensor]:
        x = F.relu(self.stem(images))
        for first, second, skip in self.blocks:
            x = F.relu(second(F.relu(first(x))) + skip(x))
        padded = F.interpolate(mask[:, None].to(x.dtype), x.shape[2:])[:, 0] > 0.5
        places = waves(padded, x, 0.5 if self.fault == "sine_positions_half_a_cell_early" else 0)
        x, seen = self.lift(x.flatten(2).transpose(1, 2)), ~padded.flatten(1)[:, None, None]
        for layer in self.encoder:
            x = layer(x, places, seen)
        slots, reference = self.slots.expand(len(x), -1, -1), self.anchor(self.marks).sigmoid()
        found, boxes = [], []
        for layer in self.decoder:
            slots = layer(slots, self.marks, None, x + places, x, seen)
            found.append(F.layer_norm(slots, [WIDTH], *self.norm))
            boxes.append((reference.log() - (-reference).log1p() + self.box(found[-1])).sigmoid())
            reference = boxes[-1].detach()
        k, b = self.kind(torch.stack(found)), torch.stack(boxes)
        return {"pred_logits": k[-1], "pred_boxes": b[-1], "aux_logits": k[:-1], "aux_boxes": b[:-1]}


class StackedWeights(Port):
    def take(self, model: DETR) -> None:
        kinds = nn.Conv2d, FrozenBatchNorm2d, nn.BatchNorm2d, nn.MultiheadAttention, nn.LayerNorm
        convs, fixed, live, mixers, norms = ([x for x in model.modules() if type(x) is k] for k in kinds)
        hub, self.live = model.transformer, nn.ModuleList(map(Rows, live))
        if self.fault == "detector_norm_mixes_old_and_new_averages_up":
            self.live[3].rate = 1 - self.live[3].rate
        self.fixed = nn.Buffer(torch.stack([torch.stack([*x.buffers()]) for x in fixed]))
        self.kernels = nn.ParameterList(leaf(x.weight) for x in convs[:-1])
        self.norms = pile(torch.stack([x.weight, x.bias]) for x in norms)
        self.cut = pile(torch.vstack([x.in_proj_weight.T, x.in_proj_bias]) for x in mixers)
        layers, outs = [*hub.encoder, *hub.decoder.layers], [x.out_proj for x in mixers]
        stacks = outs, [x.linear1 for x in layers], [x.linear2 for x in layers]
        self.merge, self.up, self.down = (pile(torch.vstack([x.weight.T, x.bias]) for x in s) for s in stacks)
        ends = model.input_proj, model.class_embed, hub.reference_points, *hub.decoder.bbox_embed.layers
        self.ends = nn.ModuleList(Dense(x.weight, x.bias) for x in ends)
        self.queries = leaf(model.query_embed.weight.unflatten(1, (2, -1)).transpose(0, 1))

    def conv(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        if i >= len(self.fixed):
            return self.live[i - len(self.fixed)](spatial(x, self.kernels[i], None, stride))
        gain, offset, mean, spread = self.fixed[i]
        scale = gain * (spread + 1e-5).rsqrt()
        return spatial(x, self.kernels[i] * scale[:, None, None, None], offset - mean * scale, stride)

    def attend(self, i, j, x, places, keys, values, bar: Tensor | float = 0) -> Tensor:
        parts = zip((x + places, keys, values), self.cut[i].chunk(3, 1), strict=True)
        parts = [part @ w[:-1] + w[-1] for part, w in parts]
        odd = i == 2 and self.fault == "heads_of_the_first_query_attention_interleaved"
        q, k, v = (y.unflatten(2, (-1, HEADS)).mT if odd else y.unflatten(2, (HEADS, -1)) for y in parts)
        shares = (torch.einsum("nqhe,nkhe->nhqk", q, k) / (WIDTH / HEADS) ** 0.5 + bar).softmax(3)
        mixed = torch.einsum("nhqk,nkhe->" + ("nqeh" if odd else "nqhe"), shares, v).flatten(2)
        return F.layer_norm(x + mixed @ self.merge[i, :-1] + self.merge[i, -1], [WIDTH], *self.norms[j])

    def feed(self, i: int, j: int, x: Tensor) -> Tensor:
        inner = F.relu(x @ self.up[i, :-1] + self.up[i, -1])
        return F.layer_norm(x + inner @ self.down[i, :-1] + self.down[i, -1], [WIDTH], *self.norms[j])

    def forward(self, images: Tensor, mask: Tensor) -> dict[str, Tensor]:
        lift, kind, anchor, first, second, third = self.ends
        x, padded = F.relu(self.conv(0, images.movedim(1, 3), 2)), mask[:, ::4, ::4]
        for i in (1, 3):
            x = F.relu(x + self.conv(i + 1, F.relu(self.conv(i, x))))
        x = F.relu(self.conv(7, x, 2) + self.conv(6, F.relu(self.conv(5, x, 2))))
        x = lift(F.relu(x + self.conv(9, F.relu(self.conv(8, x)))).flatten(1, 2))
        bar = x.new_zeros(x.shape[:2]).masked_fill(padded.flatten(1), -torch.inf)[:, None, None]
        marks, slots = self.queries[:, None].expand(-1, len(x), -1, -1)
        places, states = waves(padded, x), []
        for i in range(2):
            x = self.feed(i, 2 * i + 1, self.attend(i, 2 * i, x, places, x + places, x, bar))
        for i in range(3):
            slots = self.attend(2 * i + 2, 3 * i + 4, slots, marks, slots + marks, slots)
            slots = self.attend(2 * i + 3, 3 * i + 5, slots, marks, x + places, x, bar)
            states.append(slots := self.feed(i + 2, 3 * i + 6, slots))
        states = F.layer_norm(torch.stack(states), [WIDTH], *self.norms[-1])
        k, steps = kind(states), third(F.relu(second(F.relu(first(states)))))
        start = anchor(marks)[None]
        before = start + steps[:-1].cumsum(0)
        if self.fault != "reference_boxes_stay_in_the_graph":
            before = before.detach()
        b = (steps + torch.cat([start, before])).sigmoid()
        return {"pred_logits": k[-1], "pred_boxes": b[-1], "aux_logits": k[:-1], "aux_boxes": b[:-1]}


hub, grads = "transformer.decoder.", ("input gradient", "weight gradient")
encoder, first, last, box = "transformer.encoder.1", hub + "layers.0", hub + "layers.2", hub + "bbox_embed"
right(task, "detr_as_a_tree_of_blocks", "batch first, q, k and v apart", TreeOfBlocks)
right(task, "detr_with_stacked_weights", "stacked weights, boxes by running sums", StackedWeights)
wrong(
    task,
    TreeOfBlocks,
    last_frozen_norm_takes_batch_statistics=("frozen norm in training mode", "backbone.body.layer1.1.bn2"),
    sine_positions_half_a_cell_early=("offset of positions", "backbone.position_embedding"),
    second_encoder_values_carry_sine_positions=("positions on values", (encoder, encoder + ".self_attn")),
    last_cross_attention_sees_padded_cells=("padding mask missing", (last, last + ".multihead_attn")),
    box_head_without_its_middle_relu=("activation missing", (box, box + ".layers.1")),
)
wrong(
    task,
    StackedWeights,
    detector_norm_mixes_old_and_new_averages_up=("wrong momentum", "backbone.body.layer2.1.bn1", "buffer"),
    heads_of_the_first_query_attention_interleaved=("heads split the wrong way", first + ".self_attn"),
    reference_boxes_stay_in_the_graph=("a detach missing", "transformer.decoder", grads),
)
