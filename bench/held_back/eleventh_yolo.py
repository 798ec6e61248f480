"""Two ports of a one-stage detector: a tree of backbone, neck and heads; numbered units, channels last."""

from itertools import accumulate, pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back import _eleventh_yolo as yolo
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

detector = few("eleventh_yolo", yolo.DetectionModel, yolo.rectangles, yolo.focal)


class Unit(nn.Module):
    """A convolution with its norm and activation; ``rows`` are the channels that it makes of all."""

    def __init__(self, unit: yolo.Conv, rows: slice = slice(None), eps: float = 1e-3, rate: float = 0.03):
        super().__init__()
        norm, self.stride, self.eps, self.rate = unit.bn, unit.conv.stride, eps, rate
        self.kernel = leaf(unit.conv.weight[rows])
        self.gain, self.offset = leaf(norm.weight[rows]), leaf(norm.bias[rows])
        self.register_buffer("center", norm.running_mean[rows].clone())
        self.register_buffer("spread", norm.running_var[rows].clone())

    def forward(self, x: Tensor) -> Tensor:
        x, kept = F.conv2d(x, self.kernel, None, self.stride, self.kernel.shape[2] // 2), self.training
        x = F.batch_norm(x, self.center, self.spread, self.gain, self.offset, kept, self.rate, self.eps)
        return x * x.sigmoid()


class CrossStage(nn.Module):
    def __init__(self, block: yolo.C2f, rate: float = 0.03):
        super().__init__()
        self.kept, self.worked = (Unit(block.cv1, r) for r in (slice(block.c), slice(block.c, None)))
        self.steps = nn.ModuleList(nn.Sequential(Unit(m.cv1), Unit(m.cv2)) for m in block.m)
        self.merge, self.residual = Unit(block.cv2, rate=rate), block.m[0].add

    def forward(self, x: Tensor) -> Tensor:
        found = [self.kept(x), self.worked(x)]
        for step in self.steps:
            found.append(step(found[-1]) + (found[-1] if self.residual else 0))
        return self.merge(torch.cat(found, 1))


class Surroundings(Port):
    def take(self, pools: yolo.SPPF) -> None:
        self.squeeze, self.merge, self.size = Unit(pools.cv1), Unit(pools.cv2), pools.m.kernel_size

    def forward(self, x: Tensor) -> Tensor:
        found = [self.squeeze(x)]
        beyond = 0.0 if self.fault == "detector_pools_see_zeros_at_the_border" else -torch.inf
        for _ in range(3):
            found.append(F.max_pool2d(F.pad(found[-1], [self.size // 2] * 4, value=beyond), self.size, 1))
        return self.merge(torch.cat(found, 1))


class Neck(Port):
    def take(self, layers: nn.Sequential) -> None:
        self.up_middle, self.up_fine = CrossStage(layers[10]), CrossStage(layers[13])
        self.shrink_fine, self.down_middle = Unit(layers[14]), CrossStage(layers[16])
        self.shrink_middle, self.down_coarse = Unit(layers[17]), CrossStage(layers[19])

    def forward(self, fine: Tensor, middle: Tensor, coarse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        how = "bilinear" if self.fault == "detector_neck_enlarges_smoothly_at_first" else "nearest"
        middle = self.up_middle(torch.cat([F.interpolate(coarse, scale_factor=2, mode=how), middle], 1))
        fine = self.up_fine(torch.cat([F.interpolate(middle, scale_factor=2), fine], 1))
        middle = self.down_middle(torch.cat([self.shrink_fine(fine), middle], 1))
        return fine, middle, self.down_coarse(torch.cat([self.shrink_middle(middle), coarse], 1))


class Branch(nn.Module):
    def __init__(self, branch: nn.Sequential):
        super().__init__()
        self.units = nn.Sequential(Unit(branch[0]), Unit(branch[1]))
        self.weight, self.bias = leaf(branch[2].weight.flatten(1)), leaf(branch[2].bias[:, None])

    def forward(self, x: Tensor) -> Tensor:
        return self.weight @ self.units(x).flatten(2) + self.bias


class Tree(Port):
    def take(self, model: yolo.DetectionModel) -> None:
        layers, head = model.model, model.model[-1]
        eps = 1e-5 if self.fault == "detector_norm_at_stride_four_keeps_the_default_eps" else 1e-3
        rate = 0.1 if self.fault == "detector_averages_move_at_default_rate" else 0.03
        self.stem = nn.Sequential(Unit(layers[0]), Unit(layers[1], eps=eps), CrossStage(layers[2]))
        self.second = nn.Sequential(Unit(layers[3]), CrossStage(layers[4]))
        self.third = nn.Sequential(Unit(layers[5]), CrossStage(layers[6], rate))
        self.around, self.neck = Surroundings(layers[7], self.fault), Neck(layers, self.fault)
        self.boxes, self.kinds = (nn.ModuleList(map(Branch, b)) for b in (head.cv2, head.cv3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.stem(x)
        middle = self.second(fine)
        maps = self.neck(fine, middle, self.around(self.third(middle)))
        boxes = torch.cat([head(m) for head, m in zip(self.boxes, maps, strict=True)], 2)
        kinds = torch.cat([head(m) for head, m in zip(self.kinds, maps, strict=True)], 2)
        if self.training:
            return {"boxes": boxes, "scores": kinds}
        bins = boxes.unflatten(1, (4, -1))
        if self.fault == "detector_bins_and_sides_change_places":
            bins = boxes.unflatten(1, (-1, 4)).transpose(1, 2)
        steps = torch.arange(bins.shape[2], dtype=x.dtype, device=x.device)
        left, top, far, bottom = torch.einsum("nsba,b->sna", bins.softmax(2), steps)
        (x, y), strides = yolo.make_anchors([m.shape[2:] for m in maps], bins)
        sides = [x + (far - left) / 2, y + (bottom - top) / 2, left + far, top + bottom]
        return {"boxes": torch.stack(sides, 1) * strides, "scores": kinds.sigmoid()}


class Numbered(Port):
    """Maps [N, H, W, C]; units numbered as defined: a block's opening, closing, inside; branches together."""

    def take(self, model: yolo.DetectionModel) -> None:
        layers, heads = model.model, (model.model[-1].cv2, model.model[-1].cv3)
        units = [[m] for m in layers[:-1].modules() if isinstance(m, yolo.Conv)]
        units += [[box[j], kind[j]] for box, kind in zip(*heads, strict=True) for j in (0, 1)]
        norms = [u.bn for pair in units for u in pair]
        self.kernels = nn.ParameterList(pile(u.conv.weight.permute(2, 3, 1, 0) for u in us) for us in units)
        ends = accumulate((len(k) * k.shape[4] for k in self.kernels), initial=0)
        self.own = [slice(*bounds) for bounds in pairwise(ends)]
        gain, offset = (torch.cat([getattr(n, key) for n in norms]) for key in ("weight", "bias"))
        self.gain, self.offset = leaf(gain), leaf(offset)
        self.register_buffer("center", torch.cat([n.running_mean for n in norms]))
        self.register_buffer("spread", torch.cat([n.running_var for n in norms]))
        self.last = nn.ParameterList(pile(cv[2].weight.flatten(1).T for cv in b) for b in heads)
        self.shift = nn.ParameterList(pile(cv[2].bias for cv in b) for b in heads)

    def unit(self, n: int, x: Tensor, step: int = 1) -> Tensor:
        kernel, center, spread = self.kernels[n], self.center[self.own[n]], self.spread[self.own[n]]
        size, behind = kernel.shape[1], self.fault == "detector_last_shrinking_pads_only_behind" and n == 33
        edge = [0, 1, 0, 1] if behind else [size // 2] * 4
        windows = F.pad(x, (0, 0, *edge)).unfold(1, size, step).unfold(2, size, step)
        windows = windows.unflatten(3, (-1, kernel.shape[3]))
        x = torch.einsum("nhwgcij,gijco->nhwgo", windows, kernel).flatten(3)
        if self.training:
            with torch.no_grad():
                center.lerp_(x.mean((0, 1, 2)), 0.03)
                spread.lerp_(x.var((0, 1, 2)), 0.03)
            spread, center = torch.var_mean(x, (0, 1, 2), correction=0)
        scale = self.gain[self.own[n]] * (spread + 1e-3).rsqrt()
        return F.silu(x * scale + (self.offset[self.own[n]] - center * scale))

    def cross(self, n: int, *maps: Tensor, depth: int = 1, keep: bool = False) -> Tensor:
        found = [*self.unit(n, torch.cat(maps, 3)).chunk(2, 3)]
        last = found[0 if self.fault == "detector_bottlenecks_run_on_the_other_half" and n == 7 else 1]
        for i in range(n + 2, n + 2 + 2 * depth, 2):
            new = self.unit(i + 1, self.unit(i, last))
            last = last + new if keep else new
            found.append(last)
        return self.unit(n + 1, torch.cat(found, 3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.cross(2, self.unit(1, self.unit(0, x.movedim(1, 3), 2), 2), keep=True)
        middle = self.cross(7, self.unit(6, fine, 2), depth=2, keep=True)
        x = self.unit(18, self.cross(14, self.unit(13, middle, 2), keep=True)).movedim(3, 1)
        pools = torch.cat([x, *(F.max_pool2d(x, size, 1, size // 2) for size in (3, 5, 7))], 1)
        coarse = self.unit(19, pools.movedim(1, 3))
        middle = self.cross(20, coarse.repeat_interleave(2, 1).repeat_interleave(2, 2), middle)
        fine = self.cross(24, middle.repeat_interleave(2, 1).repeat_interleave(2, 2), fine)
        middle = self.cross(29, self.unit(28, fine, 2), middle)
        maps = fine, middle, self.cross(34, self.unit(33, middle, 2), coarse)
        boxes, kinds = [], []
        for i, x in enumerate(maps):
            box, kind = self.unit(39 + 2 * i, self.unit(38 + 2 * i, x)).flatten(1, 2).chunk(2, 2)
            other = self.fault == "detector_coarse_boxes_take_the_middle_bias" and i == 2
            boxes.append(box @ self.last[0][i] + self.shift[0][1 if other else i])
            kinds.append(kind @ self.last[1][i] + self.shift[1][i])
        boxes, kinds = torch.cat(boxes, 1).mT, torch.cat(kinds, 1).mT
        if self.training:
            return {"boxes": boxes, "scores": kinds}
        points, strides = yolo.make_anchors([m.shape[1:3] for m in maps], boxes)
        high = boxes.unflatten(1, (4, -1)).softmax(2)
        before, behind = sum(i * high[:, :, i] for i in range(high.shape[2])).mul(strides).chunk(2, 1)
        sides = torch.cat([points * strides + (behind - before) / 2, before + behind], 1)
        return {"boxes": sides, "scores": torch.sigmoid(kinds)}


right(detector, "detector_as_a_tree_of_parts", "blocks split and heads apart", Tree)
right(detector, "detector_of_numbered_units", "channels last, norms and branches stacked", Numbered)
wrong(
    detector,
    Tree,
    detector_norm_at_stride_four_keeps_the_default_eps=("wrong epsilon", ("model.1.bn", "model.1")),
    detector_averages_move_at_default_rate=("wrong momentum", ("model.6.cv2.bn", "model.6.cv2"), "buffer"),
    detector_pools_see_zeros_at_the_border=("padding value", ("model.7.m", "model.7")),
    detector_neck_enlarges_smoothly_at_first=("another interpolation", "model.8"),
    detector_bins_and_sides_change_places=("axes in the wrong order", "model.20.dfl", "eval"),
)
wrong(
    detector,
    Numbered,
    detector_last_shrinking_pads_only_behind=("padding on one side", ("model.17.conv", "model.17")),
    detector_bottlenecks_run_on_the_other_half=("wrong half of a split", "model.4"),
    detector_coarse_boxes_take_the_middle_bias=("bias of another level", "model.20.cv2.2.2"),
)
