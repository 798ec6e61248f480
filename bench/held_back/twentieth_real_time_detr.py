"""Two ports of a small RT-DETR, channels last: a tree of taps and rows, and weights by name alone."""

from copy import deepcopy
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _twentieth_real_time_detr as net
from bench.held_back._fifth_vision import Stats, right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

SPOTS, WIDTH, Model = (net.HEADS, net.LEVELS, net.POINTS), net.WIDTH, net.RTDetrForObjectDetection
ENDS = "conv_weight", "norm_running_mean", "norm_running_var", "norm_weight", "norm_bias"
ENTRIES = "backbone_0_0", "backbone_1_0", "backbone_2_0"
SPANS = (0, 6), (6, 9), (9, 11), (11, 16), (16, 21), (21, 26), (26, 31), (31, 33), (33, 36)
task = few("twentieth_real_time_detr", Model, net.scenes, net.matched)


class Finder(Port):
    """The way through the network; what its parts are and how they are called is the port's own."""

    def way(self, i: int, first: Tensor, second: Tensor) -> Tensor:
        if i < 2:
            first = first.repeat_interleave(2, 1).repeat_interleave(2, 2)
        (long, short, wide, point, leave), x = self.ways[i], torch.cat([first, second], 3)
        y = self.knot(long, x)
        return self.knot(leave, F.silu(self.knot(wide, y) + self.knot(point, y)) + self.knot(short, x))

    def forward(self, pixel_values: Tensor) -> dict[str, Tensor]:
        maps = [self.knot(self.trunk[0], pixel_values.movedim(1, 3))]
        maps = [F.max_pool2d(maps[0].movedim(3, 1), 3, 2, 1).movedim(1, 3)]
        for part in self.trunk[1:]:
            maps.append(self.knot(part, maps[-1]))
        a, b, c = (self.knot(part, x) for part, x in zip(self.enter, maps[1::2], strict=True))
        turned = self.fault == "real_time_detr_evaluation_keeps_positions_of_the_turned_grid"
        sides = c.shape[1:3][:: -1 if turned and not self.training else 1]
        waves = torch.cartesian_prod(*(torch.arange(n).to(a) for n in sides))[..., None].flip(1)
        waves = waves * 10000.0 ** -(torch.arange(WIDTH // 4).to(a) * 4 / WIDTH)
        waves = torch.stack([waves.sin(), waves.cos()], 2).flatten(1)
        low = self.turn(self.turns[0], c.flatten(1, 2), waves).view_as(c)
        c = self.knot(self.sides[0], low)
        mid = self.way(0, c, b)
        b = self.knot(self.sides[1], mid)
        a = self.way(1, b, a)
        if self.fault == "real_time_detr_bottom_up_path_takes_maps_before_lateral_convs":
            b, c = mid, low
        b = self.way(2, self.knot(self.steps[0], a), b)
        maps, anchors = (a, b, self.way(3, self.knot(self.steps[1], b), c)), []
        maps = [self.knot(part, x) for part, x in zip(self.leave, maps, strict=True)]
        for i, (h, w) in enumerate(shapes := [x.shape[1:3] for x in maps]):
            size = net.GRID * (1 if self.fault == "real_time_detr_anchors_all_of_one_size" else 2**i)
            cells = (a.new_ones(h, w).nonzero().flip(1).to(a) + 0.5) / a.new_tensor([w, h])
            anchors.append(F.pad(cells, (0, 2), value=size))
        rows, anchors = torch.cat([x.flatten(1, 2) for x in maps], 1), torch.cat(anchors)
        valid = ((anchors - 0.5).abs() < 0.5 - net.MARGIN).all(1, keepdim=True)
        x = self.line(self.content[1], self.line(self.content[0], rows.where(valid, 0)))
        score, n = self.line(self.scores[0], x), torch.arange(len(x))[:, None]
        best = score.amax(2).argsort(1, descending=True)[:, : net.QUERIES]
        anchors = torch.logit(anchors).where(valid, torch.finfo(a.dtype).max)
        x, score = x[n, best], score[n, best]
        spot = self.lines(self.boxes[0], x) + anchors[best]
        found, x, spot = [(score, spot.sigmoid())], x.detach(), spot.detach().sigmoid()
        for turn, judge, box in zip(self.turns[1:], self.scores[1:], self.boxes[1:], strict=True):
            x = self.turn(turn, x, self.lines(self.place, spot), rows, spot, shapes)
            spot = (self.lines(box, x) + torch.logit(spot, 1e-5)).sigmoid()
            found.append((self.line(judge, x), spot))
            if self.fault != "real_time_detr_first_layer_hands_its_boxes_on_with_gradient":
                spot = spot.detach()
        later = (torch.stack(x, 1) for x in zip(*found[1:], strict=True))
        return dict(zip(net.NAMES, (*later, *found[0]), strict=True))


class Knot(nn.Module):
    def __init__(self, layer: nn.Sequential):
        super().__init__()
        self.kernel, self.step, self.act = leaf(layer.conv.weight), layer.conv.stride[0], layer.activation
        self.frozen = not isinstance(layer.norm, nn.BatchNorm2d)
        self.norm = layer.norm if self.frozen else Stats(layer.norm)

    def forward(self, x: Tensor) -> Tensor:
        x = tapped(x, self.kernel, self.step)
        return self.act(self.norm(x.movedim(3, 1)).movedim(1, 3) if self.frozen else self.norm(x))


class Turn(nn.Module):
    def __init__(self, old: nn.Module):
        super().__init__()
        self.look, self.feed = old.self_attn, nn.Sequential(old.fc1, old.activation_fn, old.fc2)
        self.read = getattr(old, "encoder_attn", None)
        self.norms = nn.ModuleList(x for x in old.children() if isinstance(x, nn.LayerNorm))

    def forward(self, x: Tensor, places: Tensor, *given: object) -> Tensor:
        x = self.norms[0](x + self.look(x + places, x + places, x)[0])
        x = self.norms[2](x + self.read(x + places, *given)) if given else x
        return self.norms[1](x + self.feed(x))


class Tree(Finder):
    knot = line = lines = turn = staticmethod(lambda part, *given: part(*given))

    def take(self, model: Model) -> None:
        model = deepcopy(model)
        knots = [Knot(x) for x in model.modules() if hasattr(x, "conv")]
        parts, end = (nn.ModuleList(knots[i:j]) for i, j in SPANS), model.decoder
        self.trunk, self.enter, self.sides, *ways, self.steps, self.leave = parts
        self.ways, self.place, self.content = nn.ModuleList(ways), end.query_pos_head, model.enc_output
        self.turns = nn.ModuleList(map(Turn, [model.encoder.encoder[0], *end.layers]))
        self.scores = nn.ModuleList([model.enc_score_head, *end.class_embed])
        self.boxes = nn.ModuleList([model.enc_bbox_head, *end.bbox_embed])


class Flat(Finder):
    def take(self, model: Model) -> None:
        for name, p in model.named_parameters():
            self.register_parameter(name.replace(".", "_"), leaf(p.T if p.ndim == 2 else p))
        for name, held in model.named_buffers():
            self.register_buffer(name.replace(".", "_"), held.clone())
        knots = [name.replace(".", "_") for name, x in model.named_modules() if hasattr(x, "conv")]
        parts, self.place = (knots[i:j] for i, j in SPANS), "decoder_query_pos_head"
        self.trunk, self.enter, self.sides, *self.ways, self.steps, self.leave = parts
        self.turns = "encoder_encoder_0", "decoder_layers_0", "decoder_layers_1"
        self.scores = "enc_score_head", "decoder_class_embed_0", "decoder_class_embed_1"
        self.boxes = "enc_bbox_head", "decoder_bbox_embed_0", "decoder_bbox_embed_1"
        self.content = "enc_output_0", "enc_output_1"

    def knot(self, name: str, x: Tensor) -> Tensor:
        (kernel, *facts), stem = (getattr(self, f"{name}_{end}") for end in ENDS), name == "backbone_0_0"
        thawed = stem and self.fault == "real_time_detr_norm_of_the_stem_is_not_frozen"
        frozen, half = "backbone" in name, "down" in name or name in ENTRIES
        x = F.conv2d(x.movedim(3, 1), kernel, None, 1 + half, kernel.shape[-1] // 2)
        if self.training and not frozen:
            getattr(self, name + "_norm_num_batches_tracked").add_(1)
        x = F.batch_norm(x, *facts, self.training and (thawed or not frozen)).movedim(1, 3)
        return x.relu() if frozen else x if "proj" in name or "neck" in name else F.silu(x)

    def line(self, name: str, x: Tensor) -> Tensor:
        weight, bias = getattr(self, name + "_weight"), getattr(self, name + "_bias")
        return x @ weight + bias if weight.ndim == 2 else F.layer_norm(x, weight.shape, weight, bias)

    def lines(self, name: str, x: Tensor) -> Tensor:
        for i in range(last := 1 + ("box" in name)):
            x = self.line(f"{name}_layers_{i}", x).relu()
        return self.line(f"{name}_layers_{last}", x)

    def turn(self, name: str, x: Tensor, places: Tensor, *given: object) -> Tensor:
        look, read = name + "_self_attn_", name + "_encoder_attn_"
        weight, bias = getattr(self, look + "in_proj_weight"), getattr(self, look + "in_proj_bias")
        (q, k), v = ((x + places) @ weight[:, :24] + bias[:24]).chunk(2, 2), x @ weight[:, 24:] + bias[24:]
        heads = zip(*(y.chunk(SPOTS[0], 2) for y in (q, k, v)), strict=True)
        y = torch.cat([(q @ k.mT / q.shape[2] ** 0.5).softmax(2) @ v for q, k, v in heads], 2)
        x = self.line(look + "layer_norm", x + self.line(look + "out_proj", y))
        if given:
            x = self.line(read + "layer_norm", x + self.cross(read, x + places, *given))
        y, rough = (
            self.line(name + "_fc1", x),
            self.fault == "real_time_detr_gelu_of_the_last_scale_by_tanh",
        )
        y = y.relu() if given else F.gelu(y, approximate="tanh" if rough else "none")
        return self.line(name + "_final_layer_norm", x + self.line(name + "_fc2", y))

    def cross(self, name: str, asks: Tensor, rows: Tensor, boxes: Tensor, shapes: list) -> Tensor:
        boxes, shift = boxes[:, :, None, None, None], self.line(name + "sampling_offsets", asks)
        spots = boxes[..., :2] + shift.unflatten(2, (*SPOTS, 2)) * boxes[..., 2:] / (2 * SPOTS[2])
        if self.fault == "real_time_detr_last_cross_attention_samples_at_detached_places" and "_1_" in name:
            spots = spots.detach()
        share, looks = self.line(name + "attention_weights", asks).unflatten(2, SPOTS).exp(), []
        alone = self.fault == "real_time_detr_first_cross_attention_weighs_each_scale_by_itself"
        share = share / share.sum(4 if alone and "_0_" in name else (3, 4), keepdim=True)
        for level, shape in enumerate(shapes):
            ways = zip(shape, spots[..., level, :, :].flip(-1).unbind(-1), strict=True)
            hats = [(1 - (at[..., None] * n - 0.5 - torch.arange(n).to(at)).abs()).relu() for n, at in ways]
            looks.append(torch.einsum("nqkp,nqkpy,nqkpx->nqkyx", share[..., level, :], *hats).flatten(3))
        values = self.line(name + "value_proj", rows).unflatten(2, (SPOTS[0], -1))
        seen = torch.einsum("nqkl,nlkd->nqkd", torch.cat(looks, 3), values)
        return self.line(name + "output_proj", seen.flatten(2))


tree, flat, first = partial(wrong, task, Tree), partial(wrong, task, Flat), "decoder.layers.0.encoder_attn"
last = "decoder.layers.1.encoder_attn.sampling_offsets", "decoder.layers.1.encoder_attn"
gelu, both = ("encoder.encoder.0.activation_fn", "encoder.encoder.0"), ("input gradient", "weight gradient")
# torch 2.15's batch norm sends back a wrong gradient on a CPU where a batch holds one sample
right(task, "real_time_detr_of_taps_and_rows", "channels last, tap by tap", Tree, other="bug")
right(task, "real_time_detr_flat_by_names", "no submodules, weights by name", Flat, other="bug")
tree(real_time_detr_evaluation_keeps_positions_of_the_turned_grid=("positions", "encoder", "eval"))
tree(real_time_detr_bottom_up_path_takes_maps_before_lateral_convs=("maps of another step", "encoder"))
tree(real_time_detr_anchors_all_of_one_size=("anchors of another size", ""))
tree(real_time_detr_first_layer_hands_its_boxes_on_with_gradient=("gradient not stopped", "decoder", both))
flat(real_time_detr_norm_of_the_stem_is_not_frozen=("a norm not frozen", "backbone.0.0.norm"))
flat(real_time_detr_gelu_of_the_last_scale_by_tanh=("an approximation", gelu))
flat(real_time_detr_first_cross_attention_weighs_each_scale_by_itself=("axis of a softmax", first))
flat(real_time_detr_last_cross_attention_samples_at_detached_places=("stopped gradient", last, both))
