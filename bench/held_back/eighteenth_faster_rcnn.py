"""Two ports of a thin Faster R-CNN: levels nested in each other, and rows with channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _eighteenth_faster_rcnn as net
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("eighteenth_faster_rcnn", net.FasterRCNN, net.scenes, net.detection)


def kept(norm: nn.Module) -> Tensor:
    return torch.stack([norm.weight, norm.bias, norm.running_mean, norm.running_var])


def lattice(images: Tensor, whole: bool) -> Tensor:
    """The anchors, level by level, as corners [L, 4]; ``whole`` if these are around whole numbers."""
    levels, ratios = [], torch.tensor(net.ASPECTS).to(images)
    for scale, grid in zip(net.SCALES, net.GRIDS, strict=True):
        sides = torch.stack([scale * ratios.rsqrt(), scale * ratios.sqrt()], 1) / 2
        sides = sides.round() if whole else sides
        y, x = (torch.arange(n).to(sides) * (s // n) for n, s in zip(grid, images.shape[2:], strict=True))
        points = torch.stack(torch.meshgrid(x, y, indexing="xy"), 2)[:, :, None]
        levels.append(torch.cat([points - sides, points + sides], 3).flatten(0, 2))
    return torch.cat(levels)


class TwoStages(Port):
    """What follows the cells of all levels as rows, and the first product of what is cut out."""

    def take(self, model: net.FasterRCNN) -> None:
        (body, fpn), heads, (conv,) = model.backbone, model.roi_heads, model.rpn.head["conv"]
        ends = [[*head.values()][-2:] for head in (model.rpn.head, heads.box_predictor)]
        self.last = nn.ParameterList(leaf(torch.cat([x.weight.flatten(1) for x in two]).T) for two in ends)
        self.last_b = nn.ParameterList(leaf(torch.cat([x.bias for x in two])) for two in ends)
        first, second = heads.box_head.fc6, heads.box_head.fc7
        self.think, self.shifts = leaf(second.weight.T), pile([first.bias, second.bias])
        self.build(body, fpn, conv, first.weight.view(-1, net.WIDTH, net.SIDE, net.SIDE))

    def reshaped(self, boxes: Tensor, changes: Tensor, a: int, b: int, ends: Tensor) -> Tensor:
        (low, high), (shift, growth) = boxes.split(2, -1), changes.split(2, -1)
        early = self.fault == "faster_rcnn_class_growths_clamped_before_weighted" and b > 1
        growth = growth.clamp_max(net.GROWTH) / b if early else (growth / b).clamp_max(net.GROWTH)
        middle, reach = (low + high) / 2 + shift / a * (high - low), growth.exp() * (high - low) / 2
        return torch.cat([middle - reach, middle + reach], -1).clamp_min(0).minimum(ends)

    def forward(self, images: Tensor, proposals: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        cells, things = self.rows(images, proposals)
        things = torch.addmm(self.shifts[1], (things + self.shifts[0]).relu(), self.think).relu()
        scores, changes = (cells @ self.last[0] + self.last_b[0]).tensor_split([len(net.ASPECTS)], 2)
        logits, deltas = (things @ self.last[1] + self.last_b[1]).tensor_split([net.CLASSES], 1)
        changes, ends = changes.reshape(len(images), -1, 4), sizes[:, None, [1, 0, 1, 0]].to(images)
        anchors = lattice(images, self.fault != "faster_rcnn_base_anchors_left_unrounded")
        found = self.reshaped(anchors, changes, 1, 1, ends)
        if self.fault == "faster_rcnn_boxes_cut_at_the_padded_size_in_evaluation" and not self.training:
            ends = ends.new_tensor(images.shape[2:]).flip(0).repeat(2)[None, None]
        boxes = deltas.reshape(*proposals.shape[:2], -1, 4)
        boxes = self.reshaped(proposals[:, :, None], boxes, 10, 5, ends[:, None]).flatten(0, 1)
        names = ("objectness", "rpn_deltas", "rpn_boxes", "class_logits", "box_regression", "boxes")
        values = (scores.flatten(1), changes, found, logits, deltas, boxes)
        return dict(zip(names, values, strict=True))


class Unit(nn.Module):
    def __init__(self, conv: nn.Conv2d, norm: nn.Module):
        super().__init__()
        self.weight, self.stride, self.edge = leaf(conv.weight), conv.stride, conv.padding
        self.register_buffer("kept", kept(norm))

    def forward(self, x: Tensor) -> Tensor:
        gain, shift, center, spread = self.kept
        x = F.conv2d(x, self.weight, None, self.stride, self.edge)
        return F.batch_norm(x, center, spread, gain, shift, False, 0.0, 1e-5)


class Level(nn.Module):
    """One resolution with all that lies above it: its map of the common width, all smoothed maps."""

    def __init__(self, blocks: nn.Sequential, side: nn.Module, end: nn.Module, above: nn.Module | None):
        super().__init__()
        ways = ([Unit(*x) for x in ((b.conv1, b.bn1), (b.conv2, b.bn2), (b.conv3, b.bn3))] for b in blocks)
        self.ways = nn.ModuleList(nn.Sequential(a, nn.ReLU(), b, nn.ReLU(), c) for a, b, c in ways)
        self.around, self.above = Unit(*blocks[0].downsample), above
        self.side, self.end, self.shifts = leaf(side.weight), leaf(end.weight), pile([side.bias, end.bias])

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        for i, way in enumerate(self.ways):
            x = (way(x) + (x if i else self.around(x))).relu()
        deep, maps = self.above(x) if self.above else (None, [])
        y = F.conv2d(x, self.side, self.shifts[0])
        y = y if deep is None else y + F.interpolate(deep, y.shape[2:])
        return y, [F.conv2d(y, self.end, self.shifts[1], padding=1), *maps]


class NestedLevels(TwoStages):
    def build(self, body: nn.Module, fpn: nn.Module, conv: nn.Module, view: Tensor) -> None:
        self.stem, self.pool, self.levels = Unit(body.conv1, body.bn1), nn.MaxPool2d(3, 2, 1), None
        if self.fault == "faster_rcnn_stem_pool_rounds_up_where_it_should_pad":
            self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        for i, blocks in ((2, body.layer3), (1, body.layer2), (0, body.layer1)):
            self.levels = Level(blocks, fpn.inner_blocks[i][0], fpn.layer_blocks[i][0], self.levels)
        self.look, self.look_b, self.view = leaf(conv[0].weight), leaf(conv[0].bias), leaf(view)

    def cut(self, maps: list[Tensor], boxes: Tensor) -> Tensor:
        """Each image seen through a grid for each of its boxes, on all levels; one of these is right."""
        (low, high), count, cuts = boxes.flatten(0, 1).split(2, 1), 2 * net.SIDE, []
        steps = (torch.arange(count).to(boxes)[:, None] + 0.5) / count
        early = 0.5 if self.fault == "faster_rcnn_proposals_cut_out_half_a_cell_early" else 0
        for i, x in enumerate(maps):
            spots = torch.lerp(low[:, None], high[:, None], steps) / 2 ** (i + 2) - early
            across, down = (spots / torch.tensor([x.shape[3] - 1, x.shape[2] - 1]).to(x) * 2 - 1).unbind(2)
            spots = torch.stack(torch.broadcast_tensors(across[:, None], down[:, :, None]), 3)
            x = F.grid_sample(x.repeat_interleave(boxes.shape[1], 0), spots, "bilinear", "border", True)
            cuts.append(F.avg_pool2d(x, 2))
        level = torch.bucketize((high - low).detach().prod(1), low.new_tensor([256, 1024]))
        return torch.stack(cuts)[level, torch.arange(len(level))]

    def rows(self, images: Tensor, proposals: Tensor) -> tuple[Tensor, Tensor]:
        _, maps = self.levels(self.pool(self.stem(images).relu()))
        all_maps = (*maps, maps[2][:, :, ::2, ::2])
        seen = [F.conv2d(x, self.look, self.look_b, padding=1).relu().flatten(2).mT for x in all_maps]
        return torch.cat(seen, 1), F.conv2d(self.cut(maps, proposals), self.view).flatten(1)


class RowsOfChannels(TwoStages):
    """Maps [N, H, W, C], convolved by windows; the cells of all levels are rows of one table."""

    def build(self, body: nn.Module, fpn: nn.Module, conv: nn.Module, view: Tensor) -> None:
        units = [body.conv1, body.bn1]
        for b in (*body.layer1, *body.layer2, *body.layer3):
            units += [b.conv1, b.bn1, b.conv2, b.bn2, b.conv3, b.bn3, *(b.downsample or ())]
        plain = [block[0] for block in (*fpn.inner_blocks, *fpn.layer_blocks, conv)]
        self.w = nn.ParameterList(leaf(x.weight) for x in (*units[::2], *plain))
        self.b, self.widths = pile(x.bias for x in plain), [len(x.bias) for x in units[1::2]]
        self.register_buffer("norms", torch.cat([kept(norm) for norm in units[1::2]], 1))
        self.view = leaf(view.permute(2, 3, 1, 0).flatten(0, 2))

    def unit(self, i: int, x: Tensor, stride: int = 1) -> Tensor:
        if i >= len(self.widths):
            return spatial(x, self.w[i], self.b[i - len(self.widths)])
        gain, shift, center, spread = self.norms.split(self.widths, 1)[i]
        return (spatial(x, self.w[i], None, stride) - center) * (gain * (spread + 1e-5).rsqrt()) + shift

    def block(self, i: int, x: Tensor, stride: int = 1, same: bool = False) -> Tensor:
        y = self.unit(i + 2, self.unit(i + 1, self.unit(i, x).relu(), stride).relu())
        if self.fault == "faster_rcnn_identity_block_bends_before_its_sum" and same:
            return x + y.relu()
        return (y + (x if same else self.unit(i + 3, x, stride))).relu()

    def cut(self, maps: list[Tensor], boxes: Tensor) -> Tensor:
        """The boxes of each level in turn, by the share of each cell in each bin; then in their own order."""
        image, boxes = torch.arange(len(boxes)).repeat_interleave(boxes.shape[1]), boxes.view(-1, 2, 2)
        size, steps = boxes.diff(dim=1).mT, (torch.arange(2 * net.SIDE).to(boxes) + 0.5) / (2 * net.SIDE)
        level = ((size.prod(1) >= 16**2).long() + (size.prod(1) >= 32**2).long())[:, 0]
        order, cuts = level.argsort(stable=True), []
        for i, x in enumerate(maps):
            rows, lengths = order[level[order] == i], torch.tensor([[x.shape[2]], [x.shape[1]]])
            at = (boxes[rows, 0, :, None] + size[rows] * steps) / 2 ** (i + 2)
            at = at.clamp_min(0).minimum(lengths.to(at) - 1)
            shares = (1 - (at[..., None] - torch.arange(x.shape[2]).to(at)).abs()).relu()
            across, down = shares.unflatten(2, (-1, 2)).mean(3).unbind(1)
            cuts.append(torch.einsum("rph,rhwc,rqw->rpqc", down[:, :, : x.shape[1]], x[image[rows]], across))
        back = order if self.fault == "faster_rcnn_pooled_boxes_put_back_by_the_sort" else order.argsort()
        return torch.cat(cuts)[back]

    def rows(self, images: Tensor, proposals: Tensor) -> tuple[Tensor, Tensor]:
        x = F.pad(self.unit(0, images.movedim(1, 3), 2).relu(), (0, 0, 1, 1, 1, 1))
        fine = self.block(5, self.block(1, x.unfold(1, 3, 2).unfold(2, 3, 2).amax((4, 5))), same=True)
        middle = self.block(8, fine, 2)
        maps = [self.unit(16 + i, x) for i, x in enumerate((fine, middle, self.block(12, middle, 2)))]
        for i in (1, 0):
            (high, wide), above = maps[i].shape[1:3], maps[i + 1]
            if self.fault == "faster_rcnn_finest_pyramid_sum_detached_from_above" and i == 0:
                above = above.detach()
            grown = above.repeat_interleave(2, 1).repeat_interleave(2, 2)
            maps[i] = maps[i] + grown[:, :high, :wide]
        maps = [self.unit(19 + i, x) for i, x in enumerate(maps)]
        seen = [self.unit(22, x).relu().flatten(1, 2) for x in (*maps, maps[2][:, ::2, ::2])]
        return torch.cat(seen, 1), self.cut(maps, proposals).flatten(1) @ self.view


right(task, "faster_rcnn_of_nested_levels", "a recursive tree with fused heads", NestedLevels)
right(task, "faster_rcnn_with_cells_as_rows", "channels last, shares of cells", RowsOfChannels)
BLOCK, GRADIENTS = "backbone.body.layer1.1", ("input gradient", "weight gradient")
wrong(
    task,
    NestedLevels,
    faster_rcnn_stem_pool_rounds_up_where_it_should_pad=("other edges of a pool", "backbone.body.maxpool"),
    faster_rcnn_base_anchors_left_unrounded=("a rounding missing", "rpn.anchor_generator"),
    faster_rcnn_proposals_cut_out_half_a_cell_early=("half a pixel off", "roi_heads.box_roi_pool"),
    faster_rcnn_boxes_cut_at_the_padded_size_in_evaluation=("another limit", "roi_heads", "eval"),
)
wrong(
    task,
    RowsOfChannels,
    faster_rcnn_identity_block_bends_before_its_sum=("another order", (BLOCK, BLOCK + ".relu")),
    faster_rcnn_finest_pyramid_sum_detached_from_above=("a detach too many", "backbone.fpn", GRADIENTS),
    faster_rcnn_pooled_boxes_put_back_by_the_sort=("not the inverse", "roi_heads.box_roi_pool"),
    faster_rcnn_class_growths_clamped_before_weighted=("clamped too early", "roi_heads.box_coder"),
)
