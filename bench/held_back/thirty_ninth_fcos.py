"""Two ports of a small FCOS: a tree with the channels last, and one class of few weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_ninth_fcos import CLASSES, FCOS, GROUPS, RADIUS, STRIDES, rectangles, summed

task = few("thirty_ninth_fcos", FCOS, rectangles, summed)


class Filter(nn.Module):
    """A convolution of [N, H, W, C], then an offset, or a frozen norm; with a group norm if one is given."""

    def __init__(self, conv: nn.Module, norm: nn.GroupNorm | None = None):
        super().__init__()
        self.kernel, self.stride, self.eps = leaf(conv.weight), conv.stride[0], 1e-5
        self.offset = None if conv.bias is None else leaf(conv.bias)
        self.affine = None if norm is None else pile((norm.weight, norm.bias))
        self.register_buffer("norm", None if self.offset is not None else torch.stack([*conv.norm.buffers()]))

    def forward(self, x: Tensor) -> Tensor:
        x = tapped(x, self.kernel, self.stride)
        if self.offset is None:
            gain, offset, middle, spread = self.norm
            return (x - middle) / (spread + self.eps).sqrt() * gain + offset
        if self.affine is None:
            return x + self.offset
        return F.group_norm((x + self.offset).movedim(3, 1), GROUPS, *self.affine).movedim(1, 3).relu()


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.one, self.two = Filter(block.conv1), Filter(block.conv2)
        self.side = nn.Identity() if block.shortcut is None else Filter(block.shortcut)

    def forward(self, x: Tensor) -> Tensor:
        return (self.side(x) + self.two(self.one(x).relu())).relu()


def finish(logits, reach, ctr, points, steps, boxes, labels) -> tuple[dict[str, Tensor], Tensor]:
    """The losses as sums over all points, most of weight zero; distances in strides; and squared scores."""
    with torch.no_grad():
        far = (boxes[:, None] - points.repeat(1, 2)[:, None]) * boxes.new_tensor([-1, -1, 1, 1])
        offset = (far[..., :2] - far[..., 2:]).abs() / 2
        ok = (far > 0).all(-1) & (offset < RADIUS * steps[:, None, None]).all(-1) & (labels[:, None] >= 0)
        low, high = (steps / 2).where(steps > 8, -1), steps.where(steps < 128, torch.inf)
        ok = ok & (far.amax(-1) >= low[:, None]) & (far.amax(-1) <= high[:, None])
        best = torch.where(ok, (far[..., :2] + far[..., 2:]).prod(-1), torch.inf).argmin(-1, keepdim=True)
        pos, far = ok.any(-1), torch.take_along_dim(far, best[..., None], 2)[:, :, 0]
    kind = torch.take_along_dim(labels[:, None], best, 2)
    hit = (kind == torch.arange(CLASSES, device=kind.device)) & pos[..., None]
    yes, no = F.logsigmoid(logits), F.logsigmoid(-logits)
    focal = torch.where(hit, -0.25 * no.exp() ** 2 * yes, -0.75 * yes.exp() ** 2 * no)
    far, reach = torch.where(pos[..., None], far, 1.0), reach * steps[:, None]
    pairs = far.unflatten(-1, (2, 2)).sort(-2)[0]
    weight = (pairs[..., 0, :] / pairs[..., 1, :]).prod(-1).sqrt() * pos
    each = reach, far, torch.minimum(reach, far), torch.maximum(reach, far)
    one, two, meet, hull = ((x[..., :2] + x[..., 2:]).prod(-1) for x in each)
    union = one + two - meet
    loc = ((2 - meet / union - union / hull) * weight).sum() / weight.sum().clamp(min=1e-6)
    count, centre = pos.sum().clamp(min=1), ((F.softplus(ctr) - ctr * weight) * pos).sum()
    out = {"loss_fcos_cls": focal.sum() / count, "loss_fcos_loc": loc, "loss_fcos_ctr": centre / count}
    return out, yes.exp() * torch.sigmoid(ctr)[..., None]


class FcosTree(Port):
    def take(self, model: FCOS) -> None:
        pyramid, head, body = model.backbone, model.fcos_head, model.backbone.bottom_up
        self.start, stages = Filter(body.stem), (body.res3, body.res4, body.res5)
        self.stages = nn.ModuleList(nn.Sequential(*map(Residual, x)) for x in stages)
        for name in ("lateral", "output"):
            layers = (Filter(getattr(pyramid, f"fpn_{name}{i}")) for i in (3, 4, 5))
            self.add_module(name, nn.ModuleList(layers))
        self.more = nn.ModuleList([Filter(pyramid.top_block.p6), Filter(pyramid.top_block.p7)])
        self.powers, towers = pile(head.scales), (head.cls_tower, head.bbox_tower)
        self.what, self.where = (nn.Sequential(Filter(x[0], x[1]), Filter(x[3], x[4])) for x in towers)
        self.ends = nn.ModuleList(map(Filter, (head.cls_logits, head.bbox_pred, head.ctrness)))
        if self.fault == "fcos_last_norm_of_res4_takes_another_epsilon":
            self.stages[1][1].two.eps = 1e-3

    def pyramid(self, x: Tensor) -> list[Tensor]:
        x, sides = F.max_pool2d(self.start(x).relu().movedim(3, 1), 3, 2, 1).movedim(1, 3), []
        for stage, lateral in zip(self.stages, self.lateral, strict=True):
            x = stage(x)
            sides.append(lateral(x))
        for i in (1, 0):
            up = sides[i + 1].repeat_interleave(2, 1).repeat_interleave(2, 2)
            if i == 0 and self.fault == "fcos_p4_goes_down_to_p3_by_bilinear_interpolation":
                up = F.interpolate(sides[1].movedim(3, 1), scale_factor=2, mode="bilinear").movedim(1, 3)
            sides[i] = sides[i] + up
        levels = [layer(x) for layer, x in zip(self.output, sides, strict=True)]
        return [*levels, p6 := self.more[0](levels[-1]), self.more[1](p6.relu())]

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        found, places = [], []
        for i, (x, step) in enumerate(zip(self.pyramid(images.movedim(1, 3)), STRIDES, strict=True)):
            down, across = (torch.arange(n).to(x) for n in x.shape[1:3])
            grid = torch.cartesian_prod(down, across).flip(1)
            places.append(torch.cat([(grid + 0.5) * step, grid.new_full((len(grid), 1), step)], 1))
            where = self.where(x)
            reach = (self.ends[1](where) * self.powers[i]).exp()
            read = where.detach() if self.fault == "fcos_centerness_reads_a_detached_tower" else where
            found.append(torch.cat([self.ends[0](self.what(x)), reach, self.ends[2](read)], 3).flatten(1, 2))
        (logits, reach, ctr), place = torch.cat(found, 1).split([CLASSES, 4, 1], 2), torch.cat(places)
        out, scores = finish(logits, reach, ctr[..., 0], place[:, :2], place[:, 2], boxes, labels)
        power = 1 if self.fault == "fcos_scores_are_products_without_a_root" else 0.5
        return out if self.training else out | {"scores": scores**power, "bbox_reg": reach}


class FlatFcos(Port):
    def take(self, model: FCOS) -> None:
        head, body = model.fcos_head, model.backbone
        self.w = nn.ParameterDict({n.replace(".", "/"): leaf(p) for n, p in body.named_parameters()})
        for name, x in body.named_modules():
            if name.endswith("norm"):
                self.register_buffer(name.replace(".", "/"), torch.stack([*x.buffers()]))
        towers, names = (head.cls_tower, head.bbox_tower), ((0, "bias"), (1, "weight"), (1, "bias"))
        self.kernels = pile(torch.cat([x[i].weight for x in towers]) for i in (0, 3))
        each = [[torch.cat([getattr(x[i + j], n) for x in towers]) for i in (0, 3)] for j, n in names]
        self.rows = leaf(torch.stack([torch.stack(x) for x in each], 1))
        ends = (head.bbox_pred, head.ctrness, head.cls_logits)
        self.last, self.lift = (leaf(torch.cat([getattr(x, n) for x in ends])) for _, n in names[1:])
        self.powers = leaf(torch.cat([*head.scales]))

    def conv(self, x: Tensor, name: str, stride: int = 1) -> Tensor:
        kernel, edge = self.w[name + "/weight"], self.w[name + "/weight"].shape[-1] // 2
        if name + "/bias" in self.w:
            return F.conv2d(x, kernel, self.w[name + "/bias"], stride, edge)
        weight, bias, middle, spread = self.get_buffer(name + "/norm")
        gain = weight * (spread + 1e-5).rsqrt()
        return F.conv2d(x, kernel * gain[:, None, None, None], bias - middle * gain, stride, edge)

    def pyramid(self, x: Tensor) -> list[Tensor]:
        x, sides, outs = F.max_pool2d(self.conv(x, "bottom_up/stem", 2).relu(), 3, 2, 1), [], []
        for i in (3, 4, 5):
            for j in (0, 1):
                name, kept = f"bottom_up/res{i}/{j}", x
                if j == 0:
                    k = int(self.fault == "fcos_shortcut_of_res3_takes_the_odd_pixels" and i == 3)
                    kept = self.conv(x[:, :, k::2, k::2], name + "/shortcut")
                x = self.conv(x, name + "/conv1", 2 - j).relu()
                x = (self.conv(x, name + "/conv2") + kept).relu()
            sides.append(self.conv(x, f"fpn_lateral{i}"))
        top = 0
        for i in (5, 4, 3):
            top = sides[i - 3] + top
            outs.insert(0, self.conv(top, f"fpn_output{i}"))
            top = torch.kron(top, top.new_ones(2, 2))
        p6 = self.conv(outs[-1], "top_block/p6", 2)
        return [*outs, p6, self.conv(p6.clamp(min=0), "top_block/p7", 2)]

    def head(self, x: Tensor) -> Tensor:
        for i, (kernel, (bias, gain, offset)) in enumerate(zip(self.kernels, self.rows, strict=True)):
            x = F.conv2d(x, kernel, bias, padding=1, groups=1 + i)
            what, where = x.chunk(2, 1)
            count = 2 if i and self.fault == "fcos_last_norm_of_the_class_tower_has_two_groups" else GROUPS
            x = torch.cat([F.group_norm(what, count), F.group_norm(where, GROUPS)], 1)
            x = (x * gain[:, None, None] + offset[:, None, None]).relu()
        what, where = x.chunk(2, 1)
        where = F.conv2d(where, self.last[:5], self.lift[:5], padding=1)
        return torch.cat([where, F.conv2d(what, self.last[5:], self.lift[5:], padding=1)], 1).flatten(2)

    def forward(self, images: Tensor, boxes: Tensor, labels: Tensor) -> dict[str, Tensor]:
        levels = self.pyramid(images)
        half = 0 if self.fault == "fcos_points_at_the_corners_of_their_cells" else 0.5
        level = torch.cat([torch.full_like(x[0, 0], i).flatten() for i, x in enumerate(levels)]).long()
        steps = torch.tensor(STRIDES).to(images)[level]
        points = (torch.cat([torch.ones_like(x[0, 0]).nonzero().flip(1) for x in levels]) + half) * steps[
            :, None
        ]
        found = torch.cat([self.head(x) for x in levels], 2)
        order = [0, 1, 2, 2 if self.fault == "fcos_p6_takes_the_scale_of_p5" else 3, 4]
        reach = (found[:, :4] * self.powers[order][level]).exp().mT
        out, squares = finish(found[:, 5:].mT, reach, found[:, 4], points, steps, boxes, labels)
        return out if self.training else out | {"scores": squares.sqrt(), "bbox_reg": reach}


right(task, "fcos_tree_with_channels_last", "a tree, taps, sums over all points", FcosTree)
right(task, "fcos_flat_with_grouped_towers", "folded norms, grouped towers, stacked weights", FlatFcos)
wrong(
    task,
    FcosTree,
    fcos_last_norm_of_res4_takes_another_epsilon=("another epsilon", "backbone.bottom_up.res4.1.conv2.norm"),
    fcos_p4_goes_down_to_p3_by_bilinear_interpolation=("another interpolation", "backbone"),
    fcos_centerness_reads_a_detached_tower=("detach", "fcos_head", ("input gradient", "weight gradient")),
    fcos_scores_are_products_without_a_root=("a root left out", "fcos_outputs", "eval"),
)
wrong(
    task,
    FlatFcos,
    fcos_shortcut_of_res3_takes_the_odd_pixels=("an offset", "backbone.bottom_up.res3.0.shortcut"),
    fcos_last_norm_of_the_class_tower_has_two_groups=("another group count", "fcos_head.cls_tower.4"),
    fcos_p6_takes_the_scale_of_p5=("another level's weight", "fcos_head"),
    fcos_points_at_the_corners_of_their_cells=("half a cell left out", ""),
)
