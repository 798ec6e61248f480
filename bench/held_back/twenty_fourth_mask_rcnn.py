"""Two ports of a small Mask R-CNN: a tree with the channels last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import bench.held_back._twenty_fourth_mask_rcnn as net
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("twenty_fourth_mask_rcnn", net.MaskRCNN, net.scenes, net.heads_loss)


class Window(nn.Module):
    """A convolution of [N, H, W, C] with its bias, or whose kernel takes the scale of the norm after it."""

    def __init__(self, layer: nn.Conv2d, norm: nn.Module | None = None):
        super().__init__()
        self.weight, self.stride = leaf(layer.weight), layer.stride[0]
        self.bias = None if norm else leaf(layer.bias)
        self.register_buffer("fixed", torch.stack([*norm.buffers()]) if norm else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.fixed is None:
            return spatial(x, self.weight, self.bias)
        gain, offset, middle, spread = self.fixed
        rate = gain / (spread + 1e-5).sqrt()
        return spatial(x, self.weight * rate[:, None, None, None], offset - middle * rate, self.stride)


class Unit(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.narrow, self.middle = Window(block.conv1, block.bn1), Window(block.conv2, block.bn2)
        self.widen = Window(block.conv3, block.bn3)
        self.around = Window(*block.downsample) if block.downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return (self.around(x) + self.widen(self.middle(self.narrow(x).relu()).relu())).relu()


def crop(floors: list[Tensor], boxes: Tensor, owners: Tensor, size: int) -> Tensor:
    """Boxes of the pyramid [R, size, size, C], sampled four times a bin by a grid over the whole map."""
    height = ((boxes[:, 2:] - boxes[:, :2]) / net.SCALE).log2().mean(1) + net.LEVEL - 2 + 1e-6
    ticks, found, order = (torch.arange(2 * size).to(boxes) + 0.5) / (2 * size), [], []
    for i, x in enumerate(floors):
        order.append((height.clamp(0, 2).int() == i).nonzero()[:, 0])
        low, high = (boxes[order[i], None] / 2 ** (i + 2)).split(2, 2)
        at = low + (high - low).clamp(min=1) * ticks[:, None]
        at = 2 * at / at.new_tensor((x.shape[2] - 1, x.shape[1] - 1)) - 1
        grid = torch.stack(torch.broadcast_tensors(at[:, None, :, 0], at[:, :, None, 1]), 3)
        maps = x.movedim(3, 1)[owners[order[i]]]
        found.append(F.grid_sample(maps, grid, padding_mode="border", align_corners=True))
    return F.avg_pool2d(torch.cat(found)[torch.cat(order).argsort()], 2).movedim(1, 3)


def final(names: Tensor, moves: Tensor, masks: Tensor, boxes: Tensor, limits: Tensor, more: int = 0) -> tuple:
    """Scores, boxes within their pictures and what each mask covers; a side is ``more`` than its ends say."""
    low, high = boxes[:, None].split(2, 2)
    size, (shift, growth) = high - low + more, moves.unflatten(1, (-1, 2, 2)).unbind(2)
    center, half = low + size * (0.5 + shift / 10), size / 2 * (growth / 5).exp().clamp(max=62.5)
    ends = torch.cat([center - half, center + half], 2).relu()
    return names.softmax(1), torch.minimum(ends, limits[:, None, [1, 0, 1, 0]].to(ends)), masks.sigmoid()


class MaskRCNNOfFloors(Port):
    def take(self, model: net.MaskRCNN) -> None:
        (body, fpn), heads = model.backbone, model.roi_heads
        self.stem, stages = Window(body["conv1"], body["bn1"]), (body[f"layer{i}"] for i in (1, 2, 3))
        self.stages = nn.ModuleList(nn.Sequential(*map(Unit, stage)) for stage in stages)
        self.sides, self.smooth = (nn.ModuleList(Window(x[0]) for x in part) for part in fpn.children())
        self.draw = nn.Sequential(*(part for x in heads.mask_head for part in (Window(x[0]), nn.ReLU())))
        fc6, *lines = *heads.box_head.children(), *heads.box_predictor.children()
        w = fc6.weight.unflatten(1, (net.WIDTH, net.BOX_POOL, net.BOX_POOL)).movedim(1, 3)
        w = fc6.weight.view_as(w) if self.fault == "mask_rcnn_crops_flattened_channels_last" else w
        weights = (w, fc6.bias, *(x for layer in lines for x in (layer.weight.T, layer.bias)))
        self.box, (up, _, last) = nn.ParameterList(map(leaf, weights)), heads.mask_predictor
        self.up, self.up_bias, self.last = leaf(up.weight.permute(2, 0, 1, 3)), leaf(up.bias), Window(last)

    def floors(self, x: Tensor) -> list[Tensor]:
        x, above, found = F.max_pool2d(self.stem(x).relu().movedim(3, 1), 3, 2, 1).movedim(1, 3), 0, []
        maps = [x := stage(x) for stage in self.stages]
        for x, side, smooth in zip(maps[::-1], self.sides[::-1], self.smooth[::-1], strict=True):
            y = side(x) + above
            found.append(smooth(y))
            down = found[-1] if self.fault == "mask_rcnn_pyramid_hands_down_smoothed_maps" else y
            above = down.repeat_interleave(2, 1).repeat_interleave(2, 2)
        return found[::-1]

    def forward(self, images: Tensor, shapes: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, ...]:
        x = (images.movedim(1, 3) - images.new_tensor(net.MEAN)) / images.new_tensor(net.STD)
        rows, columns = (torch.arange(n) < shapes[:, i, None] for i, n in enumerate(images.shape[2:]))
        if self.fault != "mask_rcnn_padding_normalised_with_the_picture":
            x = x * (rows[:, :, None] & columns[:, None])[..., None]
        floors, (w1, b1, w2, b2, w3, b3, w4, b4) = self.floors(x), self.box
        x = torch.tensordot(crop(floors, boxes, owners, net.BOX_POOL), w1, ([1, 2, 3], [1, 2, 3]))
        x = ((x + b1).relu() @ w2 + b2).relu()
        seen = [x.detach() for x in floors] if self.fault == "mask_rcnn_mask_branch_detached" else floors
        y = self.draw(crop(seen, boxes, owners, net.MASK_POOL))
        y = torch.einsum("rhwc,icoj->rhiwjo", y, self.up).flatten(3, 4).flatten(1, 2) + self.up_bias
        outputs = x @ w3 + b3, x @ w4 + b4, self.last(y.relu()).movedim(3, 1)
        return outputs if self.training else final(*outputs, boxes, shapes[owners])


def sheet(layer: nn.Module) -> Tensor:
    """A row for each channel that comes out: its kernel and its bias."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


class PackedMaskRCNN(Port):
    def take(self, model: net.MaskRCNN) -> None:
        (body, fpn), heads = model.backbone, model.roi_heads
        layers = [x for x in body.modules() if isinstance(x, nn.Conv2d)]
        norms = [torch.stack([*x.buffers()]) for x in body.modules() if isinstance(x, net.FrozenBatchNorm2d)]
        self.register_buffer("fixed", torch.cat(norms, 1)[[2, 3, 0, 1]])
        self.body = leaf(torch.cat([layer.weight.flatten() for layer in layers]))
        odd = 11 if self.fault == "mask_rcnn_second_shortcut_with_another_epsilon" else None
        self.plan = [(x.weight.shape, x.stride, 1e-3 if i == odd else 1e-5) for i, x in enumerate(layers)]
        self.sides = leaf(torch.cat([sheet(x[0]) for x in fpn.inner_blocks], 1))
        self.smooth, (up, _, last) = pile(sheet(x[0]) for x in fpn.layer_blocks), heads.mask_predictor
        self.up, self.lift = leaf(up.weight.permute(2, 3, 0, 1)), leaf(up.bias[:, None, None])
        layers = *heads.box_head.children(), *(x[0] for x in heads.mask_head), last
        ends = torch.cat([*map(sheet, heads.box_predictor.children())])
        self.sheets = nn.ParameterList(map(leaf, (ends, *map(sheet, layers))))

    def layer(self, x: Tensor, rows: zip) -> Tensor:
        (shape, stride, eps), weight, fixed = next(rows)
        y = F.conv2d(x, weight.view(shape), None, stride, shape[-1] // 2)
        return F.batch_norm(y, *fixed, eps=eps)

    def stages(self, x: Tensor) -> list[Tensor]:
        weights = self.body.split([shape.numel() for shape, _, _ in self.plan])
        rows = zip(self.plan, weights, self.fixed.split([x[0][0] for x in self.plan], 1), strict=True)
        x, found = F.max_pool2d(self.layer(x, rows).relu(), 3, 2, 1), []
        for i in range(6):
            y = self.layer(self.layer(self.layer(x, rows).relu(), rows).relu(), rows)
            found.append(x := (y + (x if i % 2 else self.layer(x, rows))).relu())
        return found[1::2]

    def patches(self, x: Tensor, rows: Tensor) -> Tensor:
        size = math.isqrt(rows.shape[1] // x.shape[1])
        return (rows[:, :-1] @ F.unfold(x, size, padding=size // 2) + rows[:, -1:]).unflatten(2, x.shape[2:])

    def crops(self, maps: list[Tensor], boxes: Tensor, owners: Tensor, size: int) -> Tensor:
        area, total = (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1]), 0
        level = sum((area >= (net.SCALE * 2 ** (k - net.LEVEL - 1e-6)) ** 2).long() for k in (3, 4))
        aligned = self.fault == "mask_rcnn_mask_crops_aligned_by_half_a_pixel" and size == net.MASK_POOL
        ticks = (torch.arange(2 * size).to(boxes) + 0.5) / (2 * size)
        for i, x in enumerate(maps):
            low, high = (boxes[..., None] / 2 ** (i + 2) - 0.5 * aligned).split(2, 1)
            last = boxes.new_tensor([[x.shape[3] - 1], [x.shape[2] - 1]])
            at = torch.minimum((low + (high - low).clamp(min=1) * ticks).clamp(min=0), last)
            hats = F.avg_pool2d((1 - (at[..., None] - torch.arange(x.shape[3])).abs()).relu(), (2, 1))
            rows = hats[:, 1, :, : x.shape[2]] * (level == i)[:, None, None]
            total = total + torch.einsum("rph,rchw,rqw->rcpq", rows, x[owners], hats[:, 0])
        return total

    def forward(self, images: Tensor, shapes: Tensor, boxes: Tensor, owners: Tensor) -> tuple[Tensor, ...]:
        mean, std = (images.new_tensor(values)[:, None, None] for values in (net.MEAN, net.STD))
        down, across = torch.arange(net.HIGH)[:, None], torch.arange(net.WIDE)
        inside = (down < shapes[:, :1, None]) & (across < shapes[:, 1:, None])
        stages = self.stages(torch.where(inside[:, None], images / std - mean / std, 0))
        maps, low, sides = [], 0, self.sides.split([x.shape[1] + 1 for x in stages], 1)
        for x, side, smooth in zip(stages[::-1], sides[::-1], self.smooth.flip(0), strict=True):
            y = self.patches(x, side) + low
            low, maps = torch.kron(y, y.new_ones(2, 2)), [self.patches(y, smooth), *maps]
        ends, six, seven, one, two, three, last = self.sheets
        x = self.crops(maps, boxes, owners, net.BOX_POOL).flatten(1)[..., None, None]
        x = self.patches(self.patches(self.patches(x, six).relu(), seven).relu(), ends).flatten(1)
        y = self.patches(self.crops(maps, boxes, owners, net.MASK_POOL), one).relu()
        y = self.patches(self.patches(y, two).relu(), three).relu()
        taps = "jico" if self.fault == "mask_rcnn_deconvolution_with_transposed_taps" else "ijco"
        y = torch.einsum(f"{taps},rchw->rohiwj", self.up, y).flatten(4).flatten(2, 3) + self.lift
        outputs = x[:, : net.CLASSES], x[:, net.CLASSES :], self.patches(y.relu(), last)
        more = int(self.fault == "mask_rcnn_decoded_boxes_one_pixel_longer")
        return outputs if self.training else final(*outputs, boxes, shapes[owners], more)


SLOPES = ("input gradient", "weight gradient")
right(task, "mask_rcnn_of_floors_with_channels_last", "a tree, folded norms, sampled grids", MaskRCNNOfFloors)
right(task, "mask_rcnn_of_packed_weights", "packed sheets, products of patches and of hats", PackedMaskRCNN)
wrong(
    task,
    MaskRCNNOfFloors,
    mask_rcnn_padding_normalised_with_the_picture=("padding before a shift", "transform"),
    mask_rcnn_pyramid_hands_down_smoothed_maps=("another connection", "backbone.fpn"),
    mask_rcnn_crops_flattened_channels_last=("axis order", ("roi_heads.box_head", "roi_heads.box_head.fc6")),
    mask_rcnn_mask_branch_detached=("detach", ("roi_heads", "roi_heads.mask_roi_pool"), SLOPES),
)
wrong(
    task,
    PackedMaskRCNN,
    mask_rcnn_second_shortcut_with_another_epsilon=("epsilon", "backbone.body.layer2.0.downsample.1"),
    mask_rcnn_mask_crops_aligned_by_half_a_pixel=("an offset", "roi_heads.mask_roi_pool"),
    mask_rcnn_deconvolution_with_transposed_taps=("kernel axes", "roi_heads.mask_predictor.conv5_mask"),
    mask_rcnn_decoded_boxes_one_pixel_longer=("one too many", "roi_heads", "eval"),
)
