"""Two ports of a small PSMNet: a tree with the channels last, and one class of one packed weight."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import Stats, right, tapped
from bench.held_back._forty_fourth_psm_net import DISPARITIES, PSMNet, boxed, disparity_loss, ramp, scenes
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fourth_psm_net", PSMNet, scenes, disparity_loss)


class Unit(nn.Module):
    """A convolution of two or three axes, its batch norm and perhaps a ReLU, channels last."""

    def __init__(self, pair: nn.Sequential, act: bool = True):
        super().__init__()
        conv, norm = pair
        self.weight, self.up, self.act = leaf(conv.weight), isinstance(conv, nn.ConvTranspose3d), act
        self.stride, self.rate, self.norm = conv.stride[0], conv.dilation[0], Stats(norm)

    def forward(self, x: Tensor) -> Tensor:
        if self.up:
            y = F.conv_transpose3d(x.movedim(4, 1), self.weight, None, 2, 1, 1).movedim(1, 4)
        elif x.ndim == 5:
            y = boxed(x, self.weight, self.stride)
        else:
            y = tapped(x, self.weight, self.stride, self.rate)
        return self.norm(y).clamp(min=0) if self.act else self.norm(y)


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.body = nn.Sequential(Unit(block.conv1[0]), Unit(block.conv2, False))
        self.short = Unit(block.downsample, False) if block.downsample else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.short(x) + self.body(x)


class Eye(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        stem = Unit(model.firstconv[0]), Unit(model.firstconv[2])
        self.near = nn.Sequential(*stem, *map(Residual, (*model.layer1, *model.layer2)))
        self.far = nn.Sequential(*map(Residual, (*model.layer3, *model.layer4)))
        self.fine, self.coarse, self.corners = Unit(model.branch2[1]), Unit(model.branch1[1]), False
        self.join, self.out = Unit(model.lastconv[0]), leaf(model.lastconv[2].weight[:, :, 0, 0].T)

    def pooled(self, x: Tensor, unit: Unit, size: int, corners: bool = False) -> Tensor:
        y = unit(x.unflatten(2, (-1, size)).unflatten(1, (-1, size)).mean((2, 4)))
        rows, columns = (ramp(y.shape[i], x.shape[i], x, corners) for i in (1, 2))
        return torch.einsum("ah,bw,nhwc->nabc", rows, columns, y)

    def forward(self, x: Tensor) -> Tensor:
        near = self.near(x)
        far = self.far(near)
        pools = self.pooled(far, self.fine, 2, self.corners), self.pooled(far, self.coarse, 4)
        return self.join(torch.cat([near, far, *pools], -1)) @ self.out


class Glass(nn.Module):
    def __init__(self, model: nn.Module):
        super().__init__()
        self.enter = nn.Sequential(Unit(model.conv1[0]), Unit(model.conv2, False))
        self.deep = nn.Sequential(Unit(model.conv3[0]), Unit(model.conv4[0]), Unit(model.conv5, False))
        self.leave, self.own, self.silent = Unit(model.conv6, False), False, False

    def forward(self, x: Tensor, skip: Tensor | None = None, after: Tensor | int = 0) -> tuple:
        first = (self.enter(x) + after).clamp(min=0)
        skip = first if skip is None or self.own else skip
        last = (self.deep(first) + (skip.detach() if self.silent else skip)).clamp(min=0)
        return self.leave(last), first, last


class PSMNetOfUnits(Port):
    """Units of a convolution and a norm with the channels last; interpolation by matrices."""

    def take(self, model: PSMNet) -> None:
        self.eye, fault = Eye(model.feature_extraction), self.fault
        self.enter = nn.Sequential(Unit(model.dres0[0]), Unit(model.dres0[2]))
        self.more = nn.Sequential(Unit(model.dres1[0]), Unit(model.dres1[2], False))
        self.glasses = nn.ModuleList(Glass(x) for x in (model.dres2, model.dres3, model.dres4))
        heads = model.classif1, model.classif2, model.classif3
        self.heads = nn.ModuleList(Unit(x[0]) for x in heads)
        self.ends = nn.ParameterList(leaf(x[2].weight) for x in heads)
        if fault == "psm_net_last_dilated_convolution_loses_its_dilation":
            self.eye.far[-1].body[1].rate = 1
        self.eye.corners = fault == "psm_net_finer_branch_upsampled_with_aligned_corners"
        self.glasses[1].own = fault == "psm_net_second_hourglass_adds_its_own_skip"
        self.glasses[2].silent = fault == "psm_net_third_hourglass_takes_its_skip_without_gradient"

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, ...] | Tensor:
        a, b = self.eye(left.movedim(1, 3)), self.eye(right.movedim(1, 3))
        pairs = [torch.cat([a[:, :, i:], b[:, :, : b.shape[2] - i]], 3) for i in range(DISPARITIES // 4)]
        x = self.enter(torch.stack([F.pad(y, (0, 0, i, 0)) for i, y in enumerate(pairs)], 1))
        base = x + self.more(x)
        x, skip, after = self.glasses[0](base)
        outs = [x + base]
        for glass in self.glasses[1:]:
            x, _, after = glass(outs[-1], skip, after)
            outs.append(x + base)
        costs = [boxed(f(y), w)[..., 0] for f, y, w in zip(self.heads, outs, self.ends, strict=True)]
        ramps = (ramp(n, 4 * n, x) for n in costs[0].shape[1:])
        odds = torch.einsum("ad,bh,cw,kndhw->knabc", *ramps, torch.stack(costs).cumsum(0)).softmax(2)
        found = torch.einsum("d,kndhw->knhw", torch.arange(DISPARITIES).to(x), odds)
        return tuple(found) if self.training else found[-1]


class PackedPSMNet(Port):
    """All kernels, gains and offsets in one vector, read by the name of the layer."""

    def take(self, model: PSMNet) -> None:
        self.where, kept, stats, at, row = {}, [], [], 0, 0
        for name, m in model.named_modules():
            if isinstance(m, (nn.Conv2d, nn.Conv3d, nn.ConvTranspose3d)):
                self.where[name] = at, m.weight.shape, m.stride, m.padding, m.dilation
            elif isinstance(m, (nn.BatchNorm2d, nn.BatchNorm3d)):
                self.where[name] = at, row, len(m.weight)
                stats.append(torch.stack([m.running_mean, m.running_var]))
                row += len(m.weight)
            kept.extend(p.flatten() for p in m.parameters(recurse=False))
            at = sum(map(len, kept))
        self.w = leaf(torch.cat(kept))
        self.register_buffer("stats", torch.cat(stats, 1))

    def conv(self, name: str, x: Tensor) -> Tensor:
        at, shape, stride, pad, rate = self.where[name]
        w = self.w[at : at + shape.numel()].view(shape)
        if name.endswith(("conv5.0", "conv6.0")):
            return F.conv_transpose3d(x, w, None, stride, pad, 1)
        return (F.conv3d if x.ndim == 5 else F.conv2d)(x, w, None, stride, pad, rate)

    def unit(self, name: str, x: Tensor) -> Tensor:
        at, row, size = self.where[f"{name}.1"]
        gain, offset = self.w[at : at + 2 * size].view(2, size)
        mean, var = self.stats[:, row : row + size]
        wide = (self.fault, name) == ("psm_net_deep_norm_has_a_larger_epsilon", "dres2.conv4.0")
        eps, own = 1e-3 if wide else 1e-5, self.training
        if not own and (self.fault, name) == ("psm_net_norm_by_the_batch_in_evaluation", "dres1.2"):
            mean, var, own = None, None, True
        return F.batch_norm(self.conv(f"{name}.0", x), mean, var, gain, offset, own, 0.1, eps)

    def features(self, x: Tensor) -> Tensor:
        top = "feature_extraction."
        x, found = self.unit(f"{top}firstconv.2", self.unit(f"{top}firstconv.0", x).relu()).relu(), []
        for block in ("layer1.0", "layer1.1", "layer2.0", "layer2.1", "layer3.0", "layer4.0", "layer4.1"):
            y, short = self.unit(f"{top}{block}.conv1.0", x).relu(), f"{top}{block}.downsample"
            x = self.unit(short, x) if f"{short}.0" in self.where else x
            found.append(x := x + self.unit(f"{top}{block}.conv2", y))
        pools = [self.unit(f"{top}branch{i}.1", F.avg_pool2d(x, k)).relu() for i, k in ((2, 2), (1, 4))]
        pools = [F.interpolate(y, x.shape[2:], mode="bilinear") for y in pools]
        x = torch.cat([found[3], x, *pools], 1)
        return self.conv(f"{top}lastconv.2", self.unit(f"{top}lastconv.0", x).relu())

    def forward(self, left: Tensor, right: Tensor) -> tuple[Tensor, ...] | Tensor:
        a, b, unit, costs = self.features(left), self.features(right), self.unit, [0]
        wide, planes, skip, after = a.shape[3], [], None, 0
        for i in range(DISPARITIES // 4):
            seen = 0 if self.fault == "psm_net_left_features_kept_where_nothing_is_seen" else i
            planes.append(torch.cat([a * (torch.arange(wide) >= seen), F.pad(b, (i, 0))[..., :wide]], 1))
        x = unit("dres0.2", unit("dres0.0", torch.stack(planes, 2)).relu()).relu()
        base = out = x + unit("dres1.2", unit("dres1.0", x).relu())
        for i in (1, 2, 3):
            top = f"dres{i + 1}.conv"
            pre = (unit(f"{top}2", unit(f"{top}1.0", out).relu()) + after).relu()
            skip = pre if skip is None else skip
            deep = unit(f"{top}4.0", unit(f"{top}3.0", pre).relu()).relu()
            after = (unit(f"{top}5", deep) + skip).relu()
            out = unit(f"{top}6", after) + base
            last = 1 if i == 3 and self.fault == "psm_net_third_cost_added_to_the_first" else -1
            cost = self.conv(f"classif{i}.2", unit(f"classif{i}.0", out).relu())
            costs.append(cost + costs[last])
        odds = [F.interpolate(x, scale_factor=4, mode="trilinear")[:, 0].softmax(1) for x in costs[1:]]
        found = [x.movedim(1, 3) @ torch.arange(DISPARITIES).to(x) for x in odds]
        return tuple(found) if self.training else found[2]


SLOPES, TOP = ("input gradient", "weight gradient"), "feature_extraction"
right(task, "psm_net_of_units_with_channels_last", "a tree, windows and matrices", PSMNetOfUnits)
right(task, "psm_net_of_one_packed_weight", "one vector, flat code", PackedPSMNet)
wrong(
    task,
    PSMNetOfUnits,
    psm_net_last_dilated_convolution_loses_its_dilation=("no dilation", f"{TOP}.layer4.1.conv2.0"),
    psm_net_finer_branch_upsampled_with_aligned_corners=("aligned corners", TOP),
    psm_net_second_hourglass_adds_its_own_skip=("another skip", "dres3"),
    psm_net_third_hourglass_takes_its_skip_without_gradient=("detach", "dres4", SLOPES),
)
wrong(
    task,
    PackedPSMNet,
    psm_net_left_features_kept_where_nothing_is_seen=("a mask left out", ""),
    psm_net_norm_by_the_batch_in_evaluation=("batch statistics in eval", "dres1.2.1", "eval"),
    psm_net_deep_norm_has_a_larger_epsilon=("epsilon", "dres2.conv4.0.1"),
    psm_net_third_cost_added_to_the_first=("another sum", ""),
)
