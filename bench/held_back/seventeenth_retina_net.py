"""Two ports of RetinaNet: floors, a neck and twin towers; and windows, with all levels on one canvas."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _seventeenth_retina_net as net
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("seventeenth_retina_net", net.RetinaNet, net.scenes, net.detection)


def matrix(conv: nn.Conv2d) -> Tensor:
    return torch.cat([conv.weight.flatten(1).T, *([] if conv.bias is None else [conv.bias[None]])])


def fixed(norm: nn.Module) -> Tensor:
    return torch.stack([norm.weight, norm.bias, norm.running_mean, norm.running_var])


class Detector(Port):
    names = ("0", "1", "2", "p6", "p7")
    cells, clip = net.AnchorGenerator().cell_anchors, net.BoxCoder().bbox_xform_clip

    def answer(self, size: list[int], maps: list[Tensor], logits: Tensor, deltas: Tensor) -> dict:
        middles, halves = [], []
        for level, (x, cell) in enumerate(zip(maps, self.cells, strict=True)):
            down, across = (i // n for i, n in zip(size, x.shape[2:], strict=True))
            if self.fault == "retinanet_anchors_on_grids_of_the_nominal_strides":
                down = across = 4 << level
            y, x_ = torch.arange(x.shape[2]) * down, torch.arange(x.shape[3]) * across
            middles.append(torch.cartesian_prod(y, x_).flip(1).to(x).repeat_interleave(len(cell), 0))
            halves.append(cell[:, 2:].to(x).repeat(x[0, 0].numel(), 1))
        deltas, halves = deltas.unflatten(1, (-1, 4)), torch.cat(halves)
        middles = torch.cat(middles) + 2 * deltas[..., :2] * halves
        halves = halves * deltas[..., 2:].clamp(max=self.clip).exp()
        boxes = torch.cat([middles - halves, middles + halves], 2)
        if self.fault == "retinanet_boxes_cut_at_the_image_in_evaluation" and not self.training:
            boxes = boxes.clamp(min=0).minimum(boxes.new_tensor([*size[::-1]] * 2))
        answers = {"cls_logits": logits.unflatten(1, (-1, net.CLASSES)), "bbox_regression": deltas}
        return {**answers, "boxes": boxes, "features": dict(zip(self.names, maps, strict=True))}


class Unit(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.Module, bend: bool = True):
        super().__init__()
        self.kernel, self.bend, self.held = leaf(conv.weight.permute(2, 3, 1, 0)), bend, False
        self.step, self.edge, self.eps = conv.stride[0], conv.padding[0], norm.eps
        self.register_buffer("norm", fixed(norm))

    def forward(self, x: Tensor) -> Tensor:
        kernel = (self.kernel.detach() if self.held else self.kernel).permute(3, 2, 0, 1)
        gain, shift, mean, spread = self.norm[:, :, None, None]
        y = F.conv2d(x, kernel, None, self.step, self.edge) - mean
        y = torch.addcmul(shift, y / (spread + self.eps).sqrt(), gain)
        return F.relu(y) if self.bend else y


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        first, last = Unit(block.conv1, block.bn1), Unit(block.conv3, block.bn3, False)
        self.main = nn.Sequential(first, Unit(block.conv2, block.bn2), last)
        self.side = Unit(*block.downsample, False) if block.downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.main(x) + self.side(x))


class Neck(nn.Module):
    def __init__(self, fpn: nn.Module):
        super().__init__()
        sides, ends = fpn.inner_blocks, [*(x[0] for x in fpn.layer_blocks), *fpn.extra_blocks.children()]
        self.across, self.smoothed = nn.ParameterList(leaf(x[0].weight.flatten(1)) for x in sides), False
        self.offsets = pile(x[0].bias[:, None, None] for x in sides)
        self.kernels, self.shifts = pile(x.weight for x in ends), pile(x.bias for x in ends)

    def end(self, i: int, x: Tensor) -> Tensor:
        return F.conv2d(x, self.kernels[i], self.shifts[i], 1 if i < 3 else 2, 1)

    def forward(self, maps: list[Tensor]) -> list[Tensor]:
        outs, grown = [], 0
        for i in (2, 1, 0):
            x = torch.einsum("oc,nchw->nohw", self.across[i], maps[i]) + self.offsets[i] + grown
            outs.insert(0, self.end(i, x))
            above, (high, wide) = outs[0] if self.smoothed and i == 1 else x, maps[i - 1].shape[2:]
            grown = above.repeat_interleave(2, 2).repeat_interleave(2, 3)[:, :, :high, :wide]
        outs.append(self.end(3, outs[2]))
        return [*outs, self.end(4, outs[3].relu())]


class NeckAndTwins(Detector):
    def take(self, model: nn.Module) -> None:
        body, heads = model.backbone.body, [*model.head.children()]
        one, two, three = ([Residual(block) for block in body[f"layer{i}"]] for i in (1, 2, 3))
        one = [Unit(body.conv1, body.bn1), nn.MaxPool2d(3, 2, 1), *one]
        floors, self.neck = (one, two, three), Neck(model.backbone.fpn)
        self.floors = nn.ModuleList(nn.Sequential(*floor) for floor in floors)
        self.towers = pile(torch.cat([head.conv[i][0].weight for head in heads]) for i in (0, 1))
        self.shifts = pile(torch.cat([head.conv[i][0].bias for head in heads]) for i in (0, 1))
        self.ends = nn.ParameterList(leaf(x) for head in heads for x in [*head.parameters()][-2:])
        one[0].held = self.fault == "retinanet_stem_kernel_frozen_as_if_pretrained"
        self.neck.smoothed = self.fault == "retinanet_finest_map_grows_from_the_smoothed_middle_one"
        if self.fault == "retinanet_second_stage_strides_in_its_first_pointwise_conv":
            two[0].main[0].step, two[0].main[1].step = 2, 1

    def rows(self, x: Tensor) -> list[Tensor]:
        for i in range(2):
            x = F.conv2d(x, self.towers[i], self.shifts[i], padding=1, groups=i + 1).relu()
        ends = zip(x.chunk(2, 1), self.ends[::2], self.ends[1::2], strict=True)
        return [F.conv2d(half, *end, padding=1).movedim(1, 3).flatten(1) for half, *end in ends]

    def forward(self, images: Tensor) -> dict:
        fine = self.floors[0](images)
        middle = self.floors[1](fine)
        maps = self.neck([fine, middle, self.floors[2](middle)])
        rows = zip(*map(self.rows, maps), strict=True)
        return self.answer(images.shape[2:], maps, *(torch.cat(x, 1) for x in rows))


class LevelsOnOneCanvas(Detector):
    """Everything [..., H, W, C]; the heads see all levels side by side, an empty line after each."""

    def take(self, model: nn.Module) -> None:
        parts = (model.backbone.body, model.backbone.fpn, model.head)
        first, fpn, head = ([m for m in x.modules() if isinstance(m, nn.Conv2d)] for x in parts)
        norms = [m for m in model.modules() if hasattr(m, "running_var")]
        self.w, self.sizes = nn.ParameterList(leaf(matrix(x)) for x in first), [len(x.bias) for x in norms]
        self.register_buffer("norms", torch.cat([fixed(norm) for norm in norms], 1))
        self.sides, self.ends = (nn.ParameterList(leaf(matrix(x)) for x in y) for y in (fpn[:3], fpn[3:]))
        self.towers = pile(torch.stack([matrix(x) for x in head[i::3]])[:, None, None] for i in (0, 1))
        self.lasts = nn.ParameterList(leaf(matrix(x)) for x in head[2::3])

    def product(self, x: Tensor, w: Tensor, step: int = 1) -> Tensor:
        count = w.shape[-2] // x.shape[-1]
        size, count = int(count**0.5), count * x.shape[-1]
        windows = F.pad(x, (0, 0, *[size // 2] * 4)).unfold(-3, size, step).unfold(-3, size, step)
        return windows.flatten(-3) @ w[..., :count, :] + w[..., count:, :].sum(-2, keepdim=True)

    def unit(self, i: int, x: Tensor, step: int = 1) -> Tensor:
        x, kept = self.product(x, self.w[i], step), self.norms.split(self.sizes, 1)[i]
        gain, shift, mean, spread = kept
        if self.fault == "retinanet_last_shortcut_norm_missed_by_the_freeze" and i == 15 and self.training:
            mean, spread = x.mean((0, 1, 2)), x.var((0, 1, 2), correction=0)
            kept[2:].lerp_(torch.stack([mean, x.var((0, 1, 2))]).detach(), 0.1)
        return (x - mean) * (gain * (spread + 1e-5).rsqrt()) + shift

    def block(self, i: int, x: Tensor, step: int = 1, around: bool = True) -> Tensor:
        y = self.unit(i + 1, self.unit(i, x).relu(), step).relu()
        return (self.unit(i + 2, y) + (self.unit(i + 3, x, step) if around else x)).relu()

    def grown(self, x: Tensor, high: int, wide: int) -> Tensor:
        rows, columns = torch.arange(high) * x.shape[1] // high, torch.arange(wide) * x.shape[2] // wide
        return x[:, rows[:, None], columns]

    def forward(self, images: Tensor) -> dict:
        x = F.pad(self.unit(0, images.movedim(1, 3), 2).relu(), (0, 0, 1, 1, 1, 1))
        fine = self.block(1, x.unfold(1, 3, 2).unfold(2, 3, 2).amax((4, 5)))
        middle = self.block(9, self.block(5, fine, 2), 1, False)
        fine, middle, top = map(self.product, (fine, middle, self.block(12, middle, 2)), self.sides)
        middle = middle + self.grown(top, *middle.shape[1:3])
        fine = fine + self.grown(middle, *fine.shape[1:3])
        maps = [self.product(x, w) for x, w in zip((fine, middle, top), self.ends[:3], strict=True)]
        maps.append(self.product(maps[2], self.ends[3], 2))
        maps.append(self.product(maps[3].relu(), self.ends[4], 2))
        x, full = (
            torch.cat([F.pad(y, (0, 0, 0, 1, 0, fine.shape[1] - y.shape[1])) for y in rows], 2)
            for rows in (maps, map(torch.ones_like, maps))
        )
        for i, w in enumerate(self.towers):
            one, other = self.product(x, w).relu()
            leaks = self.fault == "retinanet_second_box_layer_sees_neighbouring_levels" and i == 0
            x = torch.stack([one * full, other if leaks else other * full])
        rows = []
        for y, w, k in zip(x, self.lasts, (net.CLASSES, 4), strict=True):
            y = self.product(y, w)
            if self.fault == "retinanet_class_logits_taken_apart_with_the_classes_first" and k == net.CLASSES:
                y = y.unflatten(-1, (k, -1)).transpose(-1, -2).flatten(-2)
            cells = zip(y.split([m.shape[2] + 1 for m in maps], 2), maps, strict=True)
            rows.append(torch.cat([c[:, : m.shape[1], : m.shape[2]].flatten(1) for c, m in cells], 1))
        return self.answer(images.shape[2:], [y.movedim(3, 1) for y in maps], *rows)


right(task, "retinanet_of_floors_a_neck_and_twin_towers", "a tree of fused parts", NeckAndTwins)
right(task, "retinanet_with_its_levels_on_one_canvas", "channels last, packed levels", LevelsOnOneCanvas)
BODY = "backbone.body."
STAGE = (BODY + "layer2.0", BODY + "layer2.0.conv1", BODY + "layer2.0.conv2")
wrong(
    task,
    NeckAndTwins,
    retinanet_second_stage_strides_in_its_first_pointwise_conv=("stride in another layer", STAGE),
    retinanet_finest_map_grows_from_the_smoothed_middle_one=("a later value taken", "backbone.fpn"),
    retinanet_stem_kernel_frozen_as_if_pretrained=("a frozen weight", BODY + "conv1", "weight gradient"),
    retinanet_anchors_on_grids_of_the_nominal_strides=("other grid steps", "anchor_generator"),
)
wrong(
    task,
    LevelsOnOneCanvas,
    retinanet_last_shortcut_norm_missed_by_the_freeze=("own statistics", BODY + "layer3.0.downsample.1"),
    retinanet_second_box_layer_sees_neighbouring_levels=("edges not 0", "head.regression_head.conv.1.0"),
    retinanet_class_logits_taken_apart_with_the_classes_first=("axes swapped", "head.classification_head"),
    retinanet_boxes_cut_at_the_image_in_evaluation=("a step in eval alone", ("box_coder", ""), "eval"),
)
