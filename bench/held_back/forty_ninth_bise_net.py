"""Two ports of a small BiSeNetV2: a tree with the channels last, and flat code over one vector of kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_ninth_bise_net import BiSeNetV2, boosted_cross_entropy, scenes
from bench.held_back._fourth_ports import Port, Rows, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_ninth_bise_net", BiSeNetV2, scenes, boosted_cross_entropy)


def windows(x: Tensor, stride: int) -> Tensor:
    """[N, H, W, C] -> [N, H', W', C, 3, 3], with zeros around."""
    return F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, stride).unfold(2, 3, stride)


class Unit(nn.Module):
    """A convolution of [N, H, W, C], by channel or dense, its norm if there is one, and maybe a ReLU."""

    def __init__(self, conv: nn.Conv2d, norm: nn.Module | None = None, rectify: bool = False):
        super().__init__()
        self.stride, self.alone, self.times = conv.stride[0], conv.groups > 1, len(conv.weight) // conv.groups
        self.rectify, self.tiled, self.kernel = rectify, False, leaf(conv.weight)
        self.norm = nn.Identity() if norm is None else Rows(norm)

    def forward(self, x: Tensor) -> Tensor:
        if self.alone:
            near, m = windows(x, self.stride), self.times
            near = near.repeat(1, 1, 1, m, 1, 1) if self.tiled else near.repeat_interleave(m, 3)
            y = self.norm((near * self.kernel[:, 0]).sum((4, 5)))
        else:
            y = self.norm(spatial(x, self.kernel, stride=self.stride))
        return y.clamp(min=0) if self.rectify else y


def plain(block: nn.Module) -> Unit:
    return Unit(block.conv, block.bn, True)


class Gather(nn.Module):
    """A gather-and-expansion layer of either stride."""

    def __init__(self, layer: nn.Module):
        super().__init__()
        wide = hasattr(layer, "shortcut")
        inner = [Unit(*layer.dwconv1)] if wide else []
        inner.append(Unit(*(layer.dwconv2 if wide else layer.dwconv)[:2], True))
        self.main = nn.Sequential(plain(layer.conv1), *inner, Unit(*layer.conv2))
        self.beside = nn.Sequential(*(Unit(*layer.shortcut[i : i + 2]) for i in ((0, 2) if wide else ())))

    def forward(self, x: Tensor) -> Tensor:
        return (self.beside(x) + self.main(x)).clamp(min=0)


class BiSeNetOfUnits(Port):
    """Units with the channels last, in ways that the network joins itself."""

    def take(self, model: BiSeNetV2) -> None:
        near, far, bga, heads = model.detail, model.segment, model.bga, (model.head, model.aux2, model.aux3)
        stem, end = far.S1S2, far.S5_5
        self.near = nn.Sequential(*map(plain, (*near.S1, *near.S2, *near.S3)))
        self.begin, self.fuse = plain(stem.conv), plain(stem.fuse)
        self.way = nn.Sequential(*map(plain, stem.left))
        self.third = nn.Sequential(*map(Gather, far.S3))
        self.fifth = nn.Sequential(*map(Gather, (*far.S4, *far.S5_4)))
        self.level, self.mix, self.end = Rows(end.bn), plain(end.conv_gap), plain(end.conv_last)
        ways = [nn.Sequential(Unit(*x[:2]), Unit(x[2])) for x in (bga.left1, bga.right2)]
        (self.fine, self.coarse_gate), self.coarse = ways, Unit(*bga.left2[:2])
        self.fine_gate, self.meet = Unit(*bga.right1), Unit(*bga.conv[:2], True)
        self.inner = nn.ModuleList(plain(head.conv) for head in heads)
        self.tables = nn.ParameterList(leaf(head.conv_out[0].weight[:, :, 0, 0].T) for head in heads)
        self.offset = leaf(torch.stack([head.conv_out[0].bias for head in heads]))
        self.third[1].main[1].tiled = self.fault == "bise_net_third_stage_expands_tile_by_tile"
        self.level.own = self.fault == "bise_net_context_norm_by_the_batch_in_evaluation"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.movedim(1, 3)
        detail, half = self.near(x), self.begin(x)
        both = [self.way(half), windows(half, 2).amax((4, 5))]
        if self.fault == "bise_net_stem_puts_the_pooled_way_first":
            both.reverse()
        second = self.fuse(torch.cat(both, 3))
        far = self.fifth(third := self.third(second))
        far = self.end(far + self.mix(self.level(far.mean(1, True))))
        gate = self.coarse_gate(far).sigmoid()
        if self.fault == "bise_net_coarse_gate_without_gradient":
            gate = gate.detach()
        low, high = gate * windows(self.coarse(detail), 2).mean((4, 5)), self.fine_gate(far).sigmoid()
        low, high = (y.repeat_interleave(4, 1).repeat_interleave(4, 2) for y in (low, high))
        seen = [self.meet(low + self.fine(detail) * high), second, third][: 3 if self.training else 1]
        found = []
        for y, inner, table, offset in zip(seen, self.inner, self.tables, self.offset, strict=False):
            y = F.interpolate((inner(y) @ table).movedim(3, 1), x.shape[1:3], mode="bilinear")
            found.append(y + offset[:, None, None])
        return tuple(found)


class FlatBiSeNet(Port):
    """All kernels in one vector, all norms in one table; the layers are counted as they are passed."""

    def take(self, model: BiSeNetV2) -> None:
        kernels, norms, self.plan = [], [], []
        for module in model.modules():
            if isinstance(module, nn.Conv2d):
                self.plan.append([module.weight.shape, module.groups, module.stride[0], None])
                kernels.append(module.weight.flatten())
            elif isinstance(module, nn.BatchNorm2d):
                if not self.plan or self.plan[-1][3] is not None:
                    self.plan.append([None, 1, 1, None])
                begin = sum(len(norm.weight) for norm in norms)
                self.plan[-1][3] = slice(begin, begin + module.num_features)
                norms.append(module)
        self.kernels = leaf(torch.cat(kernels))
        kinds = "weight", "bias", "running_mean", "running_var"
        table = torch.stack([torch.cat([getattr(norm, kind) for norm in norms]) for kind in kinds])
        self.norms = leaf(table[:2])
        self.register_buffer("kept", table[2:].detach().clone())
        self.ends = leaf(torch.stack([x.conv_out[0].bias for x in (model.head, model.aux2, model.aux3)]))

    def normal(self, x: Tensor, place: slice, eps: float) -> Tensor:
        mean, var = self.kept[:, place]
        if self.training:
            mean, count = x.mean((0, 2, 3)), x[:, 0].numel()
            var = (x - mean[:, None, None]).square().mean((0, 2, 3))
            self.kept[:, place].lerp_(torch.stack([mean, var * count / (count - 1)]).detach(), 0.1)
        gain, offset = self.norms[:, place]
        gain = gain / (var + eps).sqrt()
        return x * gain[:, None, None] + (offset - mean * gain)[:, None, None]

    def layer(self, x: Tensor, rectify: bool = True) -> Tensor:
        shape, groups, stride, place = self.plan[self.at]
        odd = self.fault == "bise_net_fourth_detail_norm_of_a_larger_epsilon" and self.at == 3
        self.at += 1
        if shape is not None:
            kernel = self.kernels[self.past : self.past + shape.numel()].view(groups, -1, shape[1:].numel())
            self.past += shape.numel()
            size, high = shape[-1], (x.shape[2] - 1) // stride + 1
            columns = F.unfold(x, size, padding=size // 2, stride=stride).unflatten(1, (groups, -1))
            x = (kernel @ columns).flatten(1, 2).unflatten(2, (high, -1))
        if place is not None:
            x = self.normal(x, place, 1e-3 if odd else 1e-5)
        return x.relu() if rectify else x

    def gather(self, x: Tensor, stage: int) -> Tensor:
        for wide in (True, False):
            y = self.layer(x)
            y = self.layer(self.layer(self.layer(y, False)) if wide else self.layer(y), False)
            early = self.fault == "bise_net_last_gather_relu_before_the_sum" and (stage, wide) == (5, False)
            beside = self.layer(self.layer(x, False), False) if wide else x
            x = y.relu() + beside if early else (y + beside).relu()
        return x

    def meet(self, near: Tensor, far: Tensor) -> Tensor:
        fine, low = self.layer(self.layer(near, False), False), self.layer(near, False)
        bare = self.fault == "bise_net_average_pool_leaves_the_border_out"
        low = F.avg_pool2d(low, 3, 2, 1, count_include_pad=not bare)
        gate = F.interpolate(self.layer(far, False), scale_factor=4)
        low = low / (1 + (-self.layer(self.layer(far, False), False)).exp())
        return self.layer(fine / (1 + (-gate).exp()) + F.interpolate(low, scale_factor=4))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.at = self.past = 0
        near, size, found = x, x.shape[2:], []
        for _ in range(6):
            near = self.layer(near)
        pooled = F.unfold(y := self.layer(x), 3, padding=1, stride=2).unflatten(1, (-1, 9)).amax(2)
        y = self.layer(self.layer(y))
        second = self.layer(torch.cat([y, pooled.unflatten(2, y.shape[2:])], 1))
        third = self.gather(second, 3)
        far = self.gather(self.gather(third, 4), 5)
        far = self.layer(far + self.layer(self.layer(far.mean(2, True), False)))
        for i, y in enumerate((self.meet(near, far), second, third)[: 3 if self.training else 1]):
            y = self.layer(self.layer(y), False) + self.ends[i][:, None, None]
            corners = self.fault == "bise_net_second_booster_aligns_its_corners" and i == 2
            found.append(F.interpolate(y, size, mode="bilinear", align_corners=corners))
        return tuple(found)


right(task, "bise_net_of_units_with_channels_last", "a tree, windows, channels last", BiSeNetOfUnits)
right(task, "bise_net_of_one_vector_of_kernels", "flat code, packed weights, patches", FlatBiSeNet)
wrong(
    task,
    BiSeNetOfUnits,
    bise_net_stem_puts_the_pooled_way_first=("a swapped order", "segment.S1S2"),
    bise_net_third_stage_expands_tile_by_tile=("another channel order", "segment.S3.1.dwconv.0"),
    bise_net_context_norm_by_the_batch_in_evaluation=("own statistics in eval", "segment.S5_5.bn", "eval"),
    bise_net_coarse_gate_without_gradient=("detach", "bga", ("input gradient", "weight gradient")),
)
wrong(
    task,
    FlatBiSeNet,
    bise_net_fourth_detail_norm_of_a_larger_epsilon=("another epsilon", "detail.S2.1.bn"),
    bise_net_last_gather_relu_before_the_sum=("ReLU before the sum", "segment.S5_4.1"),
    bise_net_average_pool_leaves_the_border_out=("a count without padding", "bga.left2.2"),
    bise_net_second_booster_aligns_its_corners=("aligned corners", "aux3.conv_out.1"),
)
