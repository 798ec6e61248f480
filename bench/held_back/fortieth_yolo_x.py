"""Two ports of a small YOLOX: a tree of units with the channels last, and one class of packed sheets."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fortieth_yolo_x import POOLS, STRIDES, YOLOX, boxes_on_noise, whole_loss
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("fortieth_yolo_x", YOLOX, boxes_on_noise, whole_loss)


def losses(y: Tensor, masks: Tensor, boxes: Tensor, classes: Tensor, fixed: bool = False) -> tuple:
    """Of boxes, objects and classes; ``fixed`` takes the union for a constant."""
    weight, objects, kinds = masks.to(y) / masks.sum().clamp(min=1), y[..., 4], y[..., 5:]
    (a, b), (c, d) = y[..., :4].split(2, -1), boxes.split(2, -1)
    common = (torch.min(a + b / 2, c + d / 2) - torch.max(a - b / 2, c - d / 2)).clamp(min=0).prod(-1)
    union = b.prod(-1) + d.prod(-1) - common
    ratio = common / (union.detach() if fixed else union)
    there = (F.softplus(objects) - objects * masks).sum() / masks.sum().clamp(min=1)
    kind = (F.softplus(kinds) - kinds * classes).sum(-1)
    return 5 * (weight * (1 - ratio.square())).sum(), there, (weight * kind).sum()


def joined(*layers: nn.Module) -> nn.Parameter:
    return leaf(torch.cat([torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in layers]))


class Unit(nn.Module):
    """A convolution of [N, H, W, C], a norm of the last axis and silu."""

    def __init__(self, base: nn.Module):
        super().__init__()
        self.kernel, self.norm, self.step = leaf(base.conv.weight), Rows(base.bn), base.conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(spatial(x, self.kernel, stride=self.step))
        return y * torch.sigmoid(y)


class Cross(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.long, self.short, self.join = map(Unit, (layer.conv1, layer.conv2, layer.conv3))
        self.inner = nn.ModuleList(nn.Sequential(Unit(x.conv1), Unit(x.conv2)) for x in layer.m)
        self.keep = [float(x.use_add) for x in layer.m]

    def forward(self, *x: Tensor) -> Tensor:
        x = torch.cat(x, -1)
        y = self.long(x)
        for keep, inner in zip(self.keep, self.inner, strict=True):
            y = keep * y + inner(y)
        return self.join(torch.cat([y, self.short(x)], -1))


class Branch(nn.Module):
    """What one scale says: [N, H, W, C] -> [N, H W, 5 + classes] in pixels and logits."""

    def __init__(self, head: nn.Module, k: int):
        super().__init__()
        self.stride, self.enter = STRIDES[k], Unit(head.stems[k])
        self.kind, self.place = (nn.Sequential(*map(Unit, x[k])) for x in (head.cls_convs, head.reg_convs))
        self.where, self.what = joined(head.reg_preds[k], head.obj_preds[k]), joined(head.cls_preds[k])

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        place = self.place(x) @ self.where[:, :-1].T + self.where[:, -1]
        kinds = self.kind(x) @ self.what[:, :-1].T + self.what[:, -1]
        left = place[..., 0] + torch.arange(x.shape[2]).to(x)
        top = place[..., 1] + torch.arange(x.shape[1]).to(x)[:, None]
        size = (place[..., 2:4] + math.log(self.stride)).exp()
        corner = self.stride * torch.stack([left, top], -1)
        return torch.cat([corner, size, place[..., 4:], kinds], -1).flatten(1, 2)


class YoloxOfUnits(Port):
    """A trunk, a way up, a way down and branches, channels last."""

    def take(self, model: YOLOX) -> None:
        neck, body = model.backbone, model.backbone.backbone
        (a, b), (c, d), (e, f, g) = body.dark2, body.dark3, body.dark4
        self.near = nn.Sequential(Unit(body.stem.conv), Unit(a), Cross(b), Unit(c), Cross(d))
        self.far, self.last = nn.Sequential(Unit(e), Unit(f.conv1)), nn.Sequential(Unit(f.conv2), Cross(g))
        if self.fault == "yolo_x_second_bottleneck_without_shortcut":
            self.near[4].keep[1] = 0.0
        self.side, self.up = Unit(neck.lateral_conv0), Cross(neck.C3_p4)
        self.shrink, self.down = Unit(neck.bu_conv1), Cross(neck.C3_n4)
        self.branches = nn.ModuleList(Branch(model.head, k) for k in range(len(STRIDES)))

    def forward(self, x: Tensor, fg_masks: Tensor, reg_targets: Tensor, cls_targets: Tensor) -> tuple:
        x = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2))
        across = self.fault == "yolo_x_focus_takes_its_corners_row_by_row"
        x = x.permute(0, 2, 4, 3, 5, 1) if across else x.permute(0, 2, 4, 5, 3, 1)
        near = self.near(x.flatten(3))
        far = self.far(near).movedim(3, 1)
        far = torch.cat([far, *(F.max_pool2d(far, size, 1, size // 2) for size in POOLS)], 1)
        side = self.side(self.last(far.movedim(1, 3)))
        large = side.detach() if self.fault == "yolo_x_upsampling_lets_no_gradient_through" else side
        fine = self.up(large.repeat_interleave(2, 1).repeat_interleave(2, 2), near)
        scales = fine, self.down(self.shrink(fine), side)
        y = torch.cat([branch(scale) for branch, scale in zip(self.branches, scales, strict=True)], 1)
        found = losses(y, fg_masks, reg_targets, cls_targets)
        if not self.training:
            soft = self.fault == "yolo_x_classes_by_softmax_in_evaluation"
            kinds = y[..., 5:].softmax(-1) if soft else y[..., 5:].sigmoid()
            y = torch.cat([y[..., :4], y[..., 4:5].sigmoid(), kinds], -1)
        return y, *found


class PackedYolox(Port):
    """A sheet of rows by convolution: kernel, gain, offset; the statistics of all in one buffer."""

    def take(self, model: YOLOX) -> None:
        self.spot, self.sheets, kept, begin = {}, nn.ParameterList(), [], 0
        for name, x in model.named_modules():
            if hasattr(x, "bn"):
                self.spot[name] = len(kept), begin, x.conv.kernel_size[0], x.conv.stride[0]
                rows = x.conv.weight.flatten(1), x.bn.weight[:, None], x.bn.bias[:, None]
                self.sheets.append(leaf(torch.cat(rows, 1)))
                kept.append(torch.stack([x.bn.running_mean, x.bn.running_var]))
                begin += len(x.bn.bias)
        self.register_buffer("stats", torch.cat(kept, 1))
        preds = zip(model.head.reg_preds, model.head.obj_preds, model.head.cls_preds, strict=True)
        self.says = leaf(torch.stack([joined(*three) for three in preds]))

    def conv(self, name: str, x: Tensor) -> Tensor:
        i, begin, size, stride = self.spot[name]
        kernel, gain, offset = self.sheets[i].tensor_split((-2, -1), 1)
        y = kernel @ F.unfold(x, size, padding=size // 2, stride=stride)
        mean, var = stats = self.stats[:, begin : begin + len(kernel)]
        if self.training:
            var, mean = torch.var_mean(y, (0, 2), correction=0)
            with torch.no_grad():
                stats.lerp_(torch.stack([mean, y.movedim(1, 0).flatten(1).var(1)]), 0.03)
        usual = self.fault == "yolo_x_bottom_up_norm_with_the_usual_eps" and name == "backbone.bu_conv1"
        scale = gain * (var + (1e-5 if usual else 1e-3)).rsqrt()[:, None]
        return F.silu((y - mean[:, None]) * scale + offset).unflatten(2, (-1, x.shape[3] // stride))

    def cross(self, name: str, x: Tensor, count: int = 1, add: bool = False) -> Tensor:
        y = self.conv(f"{name}.conv1", x)
        for i in range(count):
            more = self.conv(f"{name}.m.{i}.conv2", self.conv(f"{name}.m.{i}.conv1", y))
            y = y + more if add else more
        return self.conv(f"{name}.conv3", torch.cat([y, self.conv(f"{name}.conv2", x)], 1))

    def say(self, k: int, x: Tensor) -> Tensor:
        x = self.conv(f"head.stems.{k}", x)
        ways = [f"head.{way}.{k}." for way in ("reg_convs", "cls_convs")]
        reg, kind = (self.conv(way + "1", self.conv(way + "0", x)) for way in ways)
        rows, each = self.says[k], torch.arange(x[0, 0].numel())
        y = torch.cat([rows[:5, :-1] @ reg.flatten(2), rows[5:, :-1] @ kind.flatten(2)], 1) + rows[:, -1:]
        grid = torch.stack([each % x.shape[3], each // x.shape[3]]).to(x)
        if self.fault == "yolo_x_grid_of_centres_in_place_of_corners":
            grid = grid + 0.5
        return torch.cat([(y[:, :2] + grid) * STRIDES[k], y[:, 2:4].exp() * STRIDES[k], y[:, 4:]], 1).mT

    def forward(self, x: Tensor, fg_masks: Tensor, reg_targets: Tensor, cls_targets: Tensor) -> tuple:
        neck, body = "backbone.", "backbone.backbone."
        x = torch.cat([x[:, :, i::2, j::2] for j in (0, 1) for i in (0, 1)], 1)
        x = self.conv(body + "dark2.0", self.conv(body + "stem.conv", x))
        x = self.conv(body + "dark3.0", self.cross(body + "dark2.1", x, 1, True))
        x = self.cross(body + "dark3.1", x, 2, True)
        y = self.conv(body + "dark4.1.conv1", self.conv(body + "dark4.0", x))
        most = [F.max_pool2d(y, size, 1, size // 2) for size in POOLS]
        if self.fault == "yolo_x_smallest_pool_padded_with_zeros":
            most[0] = F.max_pool2d(F.pad(y, (1, 1, 1, 1)), 3, 1)
        y = self.cross(body + "dark4.2", self.conv(body + "dark4.1.conv2", torch.cat([y, *most], 1)))
        y = self.conv(neck + "lateral_conv0", y)
        x = self.cross(neck + "C3_p4", torch.cat([torch.kron(y, y.new_ones(2, 2)), x], 1))
        y = self.cross(neck + "C3_n4", torch.cat([self.conv(neck + "bu_conv1", x), y], 1))
        y = torch.cat([self.say(0, x), self.say(1, y)], 1)
        fixed = self.fault == "yolo_x_union_without_gradient"
        found = losses(y, fg_masks, reg_targets, cls_targets, fixed)
        return y if self.training else torch.cat([y[..., :4], y[..., 4:].sigmoid()], -1), *found


SLOPES, BODY = ("input gradient", "weight gradient"), "backbone.backbone."
right(task, "yolo_x_of_units_with_channels_last", "a tree, channels last, joined predictions", YoloxOfUnits)
right(task, "yolo_x_of_packed_sheets", "packed sheets, products of patches, one buffer", PackedYolox)
wrong(
    task,
    YoloxOfUnits,
    yolo_x_focus_takes_its_corners_row_by_row=("another channel order", BODY + "stem"),
    yolo_x_second_bottleneck_without_shortcut=("a sum left out", BODY + "dark3.1.m.1"),
    yolo_x_upsampling_lets_no_gradient_through=("detach", ("backbone", "backbone.upsample"), SLOPES),
    yolo_x_classes_by_softmax_in_evaluation=("another function in eval", "head", "eval"),
)
wrong(
    task,
    PackedYolox,
    yolo_x_smallest_pool_padded_with_zeros=("another padding", BODY + "dark4.1.m.0"),
    yolo_x_bottom_up_norm_with_the_usual_eps=("another eps", "backbone.bu_conv1.bn"),
    yolo_x_grid_of_centres_in_place_of_corners=("a shift by half", "head"),
    yolo_x_union_without_gradient=("detach", "head.iou_loss", SLOPES),
)
