"""Two ports of EfficientDet: fused units that keep levels in step, and flat lists used up in order."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirteenth_efficient_detector import EfficientDet, detection_loss, images

task = few("thirteenth_efficient_detector", EfficientDet, images, detection_loss)


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, last: bool) -> Tensor:
        y = x * x.sigmoid()
        ctx.save_for_backward(y if last else x)
        return y

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad * (s * (1 + x * (1 - s))), None


class Unit(nn.Module):
    def __init__(self, conv: nn.Conv2d, *norms: nn.Module, first: nn.Module | None = None, swish=False):
        super().__init__()
        (k, _), (self.stride, _), self.groups, self.last = conv.kernel_size, conv.stride, conv.groups, False
        self.edges = ((k - self.stride) // 2, (k - 1) // 2) * 2
        self.weight, self.bias = leaf(conv.weight), None if conv.bias is None else leaf(conv.bias)
        self.first, self.norms, self.swish = first or nn.Identity(), nn.ModuleList(norms), swish

    def forward(self, x: Tensor, i: int = 0) -> Tensor:
        x, taps = F.pad(self.first(x), self.edges), (self.weight, self.bias, self.stride)
        x = F.conv2d(x, *taps, groups=self.groups)
        x = self.norms[i](x) if self.norms else x
        return Swish.apply(x, self.last) if self.swish else x


class Bottleneck(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        widen = Unit(block.conv_pw, block.bn1, swish=True)
        self.depth = Unit(block.conv_dw, block.bn2, first=widen, swish=True)
        self.gate = Unit(block.se.conv_expand, first=Unit(block.se.conv_reduce, swish=True))
        self.shrink, self.around = Unit(block.conv_pwl, block.bn3), block.has_residual

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(x)
        return self.shrink(y * self.gate(F.adaptive_avg_pool2d(y, 1)).sigmoid()) + (x if self.around else 0)


class Cell(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        joins, convs = zip(*((node.combine, node.after_combine.conv) for node in layer.fnode), strict=True)
        self.shares = leaf(torch.cat([join.edge_weights for join in joins]))
        self.mix = nn.ModuleList(Unit(c.conv_pw, c.bn, first=Unit(c.conv_dw)) for c in convs)
        self.pool, self.rest = nn.MaxPool2d(3, 2, ceil_mode=True), nn.MaxPool2d(3, 2, (1, 0), ceil_mode=True)
        given = [join.resample[key] for join, key in zip(joins, "101", strict=False)]
        self.enter = nn.ModuleList(Unit(*x.conv) if len(x) else nn.Identity() for x in given)

    def fuse(self, i: int, *nodes: Tensor) -> Tensor:
        shares = self.shares.split([2, 2, 3, 2])[i].relu()
        total = sum(share * y[:, :, : nodes[0].shape[2]] for share, y in zip(shares, nodes, strict=True))
        return self.mix[i](F.silu(total / (shares.sum() + 1e-4)))

    def forward(self, levels: list[Tensor]) -> list[Tensor]:
        fine, middle, top = levels
        down = self.fuse(0, self.enter[0](middle), F.interpolate(top, scale_factor=2))
        fine = self.fuse(1, self.enter[1](fine), F.interpolate(down, scale_factor=2))
        middle = self.fuse(2, self.enter[2](middle), down, self.pool(fine))
        return [fine, middle, self.fuse(3, top, self.rest(middle))]


class LevelsInStep(Port):
    def take(self, model: EfficientDet) -> None:
        trunk, self.towers = model.backbone, nn.ModuleList()
        blocks = [Bottleneck(block) for stage in trunk.blocks for block in stage]
        self.fine = nn.Sequential(Unit(trunk.conv_stem, trunk.bn1, swish=True), *blocks[:2])
        self.deep, self.cells = blocks[2], nn.Sequential(*(Cell(layer) for layer in model.fpn.cell))
        self.top = nn.Sequential(Unit(*model.fpn.resample["2"].conv), self.cells[0].rest)
        for head in (model.class_net, model.box_net):
            layers = zip([*head.conv_rep, head.predict], [*head.bn_rep, ()], strict=True)
            units = (Unit(c.conv_pw, *n, swish=bool(n), first=Unit(c.conv_dw)) for c, n in layers)
            self.towers.append(nn.ModuleList(units))
        alike = self.fault == "last_effdet_depthwise_padded_alike_on_both_sides"
        self.deep.depth.edges = (2 if alike else 1, 2) * 2
        self.fine[2].depth.first.last = self.fault == "effdet_swish_goes_back_from_what_it_gave"
        enter, norms = self.cells[0].enter, self.towers[1][1].norms
        enter[2] = enter[0 if self.fault == "middle_effdet_fusions_share_one_projection" else 2]
        norms[2] = norms[1 if self.fault == "coarsest_effdet_boxes_by_the_middle_norm" else 2]

    def forward(self, x: Tensor) -> tuple[list[Tensor], ...]:
        fine = self.fine(x)
        deep = self.deep(fine)
        classes = boxes = self.cells([fine, deep, self.top(deep)])
        for one, other in zip(*self.towers, strict=True):
            classes = [one(y, i) for i, y in enumerate(classes)]
            boxes = [other(y, i) for i, y in enumerate(boxes)]
        return classes, boxes


def flat(conv: nn.Conv2d) -> Tensor:
    matrix = [conv.weight.flatten(1).T, *([] if conv.bias is None else [conv.bias[None]])]
    return conv.weight.squeeze(1) if conv.weight.shape[2] > 1 else torch.cat(matrix)


class UsedUpInOrder(Port):
    def take(self, model: EfficientDet) -> None:
        convs, norms = ([m for m in model.modules() if isinstance(m, k)] for k in (nn.Conv2d, nn.BatchNorm2d))
        self.w, self.sizes = nn.ParameterList(leaf(flat(c)) for c in convs), [n.num_features for n in norms]
        self.gains = leaf(torch.cat([n.weight for n in norms]))
        self.shifts = leaf(torch.cat([n.bias for n in norms]))
        self.register_buffer("means", torch.cat([n.running_mean for n in norms]))
        self.register_buffer("spreads", torch.cat([n.running_var for n in norms]))
        self.edges = pile(torch.cat([n.combine.edge_weights for n in c.fnode]) for c in model.fpn.cell)

    def normed(self, i: int, x: Tensor) -> Tensor:
        kept = (t.split(self.sizes)[i] for t in (self.means, self.spreads, self.gains, self.shifts))
        rate = 0.99 if self.fault == "fine_effdet_fusion_norm_with_momentum_turned" and i == 14 else 0.01
        return F.batch_norm(x.flatten(0, 2), *kept, self.training, rate, 1e-3).view(x.shape)

    def spatial(self, x: Tensor, w: Tensor, stride: int = 1) -> Tensor:
        k, rule = w.shape[-1], "nhwcij,cij->nhwc" if w.ndim == 3 else "nhwcij,ocij->nhwo"
        x = F.pad(x, (0, 0, *((k - stride) // 2, (k - 1) // 2) * 2))
        return torch.einsum(rule, x.unfold(1, k, stride).unfold(2, k, stride), w)

    def product(self, x: Tensor, w: Tensor) -> Tensor:
        return x @ w[: x.shape[-1]] + w[x.shape[-1] :].sum(0)

    def block(self, x: Tensor, w, i, stride: int = 2) -> Tensor:
        y = F.silu(self.normed(next(i), self.product(x, next(w))))
        y = F.silu(self.normed(next(i), self.spatial(y, next(w), stride)))
        gate = F.silu(self.product(y.mean((1, 2), keepdim=True), next(w)))
        y = y * self.product(gate, next(w)).sigmoid()
        return self.normed(next(i), self.product(y, next(w))) + (x if stride == 1 else 0)

    def node(self, n: int, w, i, first: Tensor, *rest: Tensor) -> Tensor:
        first = first if first.shape[-1] == 16 else self.normed(next(i), self.product(first, next(w)))
        raw = self.edges[n // 4].split([2, 2, 3, 2])[n % 4]
        total = raw if self.fault == "effdet_fusion_total_counts_a_negative_edge" and n == 6 else raw.relu()
        y = torch.einsum("s,snhwc->nhwc", raw.relu() / (total.sum() + 1e-4), torch.stack([first, *rest]))
        return self.normed(next(i), self.product(self.spatial(F.silu(y), next(w)), next(w)))

    def pooled(self, x: Tensor, edge: float = -torch.inf) -> Tensor:
        x = F.pad(x, (0, 0, x.shape[2] % 2, 1, x.shape[1] % 2, 1), value=edge)
        return x.unfold(1, 3, 2).unfold(2, 3, 2).amax((-2, -1))

    def grown(self, x: Tensor, like: Tensor, middle: bool = False) -> Tensor:
        for axis, size in ((1, like.shape[1]), (2, like.shape[2])):
            x = x.index_select(axis, (2 * torch.arange(size) + middle) * x.shape[axis] // (2 * size))
        return x

    def head(self, levels: list[Tensor], w, i) -> list[Tensor]:
        for layer in range(3):
            taps, matrix = next(w), next(w)
            levels = [self.product(self.spatial(x, taps), matrix) for x in levels]
            levels = [F.silu(self.normed(next(i), x)) if layer < 2 else x.movedim(-1, 1) for x in levels]
        return levels

    def forward(self, x: Tensor) -> tuple[list[Tensor], ...]:
        w, i = iter(self.w), iter(range(len(self.sizes)))
        x = F.silu(self.normed(next(i), self.spatial(x.movedim(1, -1), next(w), 2)))
        fine = self.block(self.block(x, w, i), w, i, 1)
        deep = again = self.block(fine, w, i)
        top = self.pooled(self.normed(next(i), self.product(deep, next(w))))
        for n in (0, 4):
            middle = self.fault == "effdet_upsampling_from_the_middles_of_pixels" and n == 0
            edge = 0.0 if self.fault == "last_effdet_pool_has_edges_of_zero" and n else -torch.inf
            down = self.node(n, w, i, deep, self.grown(top, deep, middle))
            fine = self.node(n + 1, w, i, fine, self.grown(down, fine))
            deep = again = self.node(n + 2, w, i, again, down, self.pooled(fine))
            top = self.node(n + 3, w, i, top, self.pooled(deep, edge))
        return self.head([fine, deep, top], w, i), self.head([fine, deep, top], w, i)


right(task, "effdet_with_levels_in_step", "a tree of fused units", LevelsInStep)
right(task, "effdet_of_flat_lists_used_up_in_order", "channels last, windows and products", UsedUpInOrder)
OWN = tuple("fpn.cell.0.fnode.2.combine.resample.1" + end for end in ("", ".conv", ".conv.conv"))
GROWN = tuple("fpn.cell.0.fnode.0.combine.resample.2" + end for end in (".upsample", ""))
POOLED = tuple("fpn.cell.1.fnode.3.combine.resample.5" + end for end in (".downsample", ""))
NORM, BACK = "fpn.cell.0.fnode.1.after_combine.conv.bn", ("input gradient", "weight gradient")
wrong(
    task,
    LevelsInStep,
    last_effdet_depthwise_padded_alike_on_both_sides=("even padding", "backbone.blocks.1.0.conv_dw"),
    effdet_swish_goes_back_from_what_it_gave=("wrong derivative", "backbone.blocks.0.1.act1", BACK),
    middle_effdet_fusions_share_one_projection=("one projection for two", OWN),
    coarsest_effdet_boxes_by_the_middle_norm=("norm of another level", ("box_net.bn_rep.1.2", "box_net")),
)
wrong(
    task,
    UsedUpInOrder,
    fine_effdet_fusion_norm_with_momentum_turned=("momentum as one minus itself", NORM, "buffer"),
    effdet_fusion_total_counts_a_negative_edge=("sum before the relu", "fpn.cell.1.fnode.2.combine"),
    effdet_upsampling_from_the_middles_of_pixels=("another nearest pixel", GROWN),
    last_effdet_pool_has_edges_of_zero=("another padding value", POOLED),
)
