"""Two ports of a small U^2-Net: floors within floors with the channels last, and one class of sheets."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_eighth_u_two_net import U2NET, all_sides, blots

task = few("twenty_eighth_u_two_net", U2NET, blots, all_sides)


def shrink(x: Tensor, whole: bool = False) -> Tensor:
    """The largest of each two by two of [N, H, W, C]; of ``whole`` squares only, or of what is there."""
    high, wide = (length % 2 for length in x.shape[1:3])
    edges = (0, -wide, 0, -high) if whole else (0, wide, 0, high)
    return F.pad(x, (0, 0, *edges), value=-torch.inf).unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).amax((2, 4))


def tents(x: Tensor, axis: int, length: int) -> Tensor:
    """The matrix that draws an axis out to a length."""
    old = torch.arange(x.shape[axis]).to(x)
    at = (torch.arange(length).to(x) + 0.5) * (len(old) / length) - 0.5
    return (1 - (at.clamp(0, len(old) - 1)[:, None] - old).abs()).relu()


def grow(x: Tensor, like: Tensor) -> Tensor:
    down, across = (tents(x, axis, like.shape[axis]) for axis in (1, 2))
    return torch.einsum("ih,nhwc,jw->nijc", down, x, across)


class Unit(nn.Module):
    """A norm of a convolution, which has a kernel for each of what it joins."""

    def __init__(self, block: nn.Module, sizes: int | tuple[int, ...] = ()):
        super().__init__()
        conv = block.conv_s1
        self.kernels = nn.ParameterList(map(leaf, conv.weight.split(sizes or conv.in_channels, 1)))
        self.offset, self.norm, self.rate = leaf(conv.bias), Rows(block.bn_s1), conv.dilation[0]

    def forward(self, *xs: Tensor) -> Tensor:
        total = sum(tapped(x, w, rate=self.rate) for x, w in zip(xs, self.kernels, strict=True))
        return self.norm(total + self.offset).relu()


class Floor(nn.Module):
    """A way down, the floors below, and a way up that joins both."""

    def __init__(self, stage: nn.Module, i: int = 1):
        super().__init__()
        up, last = stage.get_submodule(f"rebnconv{i}d"), not hasattr(stage, f"rebnconv{i + 2}")
        self.pooled, self.whole = hasattr(stage, f"pool{i}"), False
        self.down, self.up = Unit(stage.get_submodule(f"rebnconv{i}")), Unit(up, up.conv_s1.in_channels // 2)
        self.below = Unit(stage.get_submodule(f"rebnconv{i + 1}")) if last else Floor(stage, i + 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(x)
        y = self.below(shrink(x, self.whole) if self.pooled else x)
        return self.up(grow(y, x) if self.pooled else y, x)


class House(nn.Module):
    def __init__(self, stage: nn.Module, sizes: tuple[int, ...] = ()):
        super().__init__()
        self.door, self.floors, self.cut = Unit(stage.rebnconvin, sizes), Floor(stage), False

    def forward(self, *xs: Tensor) -> Tensor:
        x = self.door(*xs)
        return (x.detach() if self.cut else x) + self.floors(x)


class U2NetOfFloors(Port):
    """Houses of floors within floors, joins without concatenation, matrices that draw out."""

    def take(self, model: U2NET) -> None:
        self.down = nn.ModuleList(House(model.get_submodule(f"stage{i}")) for i in (1, 2, 3, 4))
        ways = ((model.stage3d, (13, 14)), (model.stage2d, (11, 12)), (model.stage1d, (9, 8)))
        self.up = nn.ModuleList(House(*way) for way in ways)
        sides = [model.get_submodule(f"side{i}") for i in (1, 2, 3, 4)]
        self.views = nn.ParameterList(leaf(side.weight) for side in sides)
        self.levels = leaf(torch.cat([side.bias for side in sides]))
        self.votes, self.chair = leaf(model.outconv.weight.flatten()), leaf(model.outconv.bias)
        self.down[0].floors.below.whole = self.fault == "u_two_net_first_stage_second_pool_drops_the_edge"
        if self.fault == "u_two_net_third_stage_deepest_dilated_by_four":
            self.down[2].floors.below.below.below.rate = 4
        self.down[3].floors.down.norm.own = self.fault == "u_two_net_fourth_stage_norm_by_batch_in_evaluation"
        self.up[1].cut = self.fault == "u_two_net_second_decoder_residual_without_gradient"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x, kept = x.movedim(1, 3), []
        for house in self.down:
            x = house(shrink(x) if kept else x)
            kept.append(x)
        found = [kept.pop()]
        for house, skip in zip(self.up, kept[::-1], strict=True):
            found.insert(0, house(grow(found[0], skip), skip))
        sides = [tapped(y, w) + b for y, w, b in zip(found, self.views, self.levels, strict=True)]
        sides = torch.cat([sides[0], *(grow(side, found[0]) for side in sides[1:])], 3)
        fused = (sides * self.votes).sum(3, True) + self.chair
        return torch.cat([fused, sides], 3).sigmoid().movedim(3, 0)[:, :, None].unbind()


def sheet(block: nn.Module) -> Tensor:
    """A row for each channel: its kernel, its offset, and the gain and the shift of its norm."""
    conv, norm = block.conv_s1, block.bn_s1
    return torch.cat([conv.weight.flatten(1), torch.stack([conv.bias, norm.weight, norm.bias], 1)], 1)


fit = partial(F.interpolate, mode="bilinear")
HEIGHTS = {"1": 5, "2": 4, "3": 4, "4": 4, "3d": 4, "2d": 4, "1d": 5}


class SheetsOfU2Net(Port):
    """Stacks of sheets by stage, products of patches, one table of the statistics of all norms."""

    def take(self, model: U2NET) -> None:
        self.w, self.where, kept, fault = nn.ParameterList(), {}, [], self.fault
        self.thick = ("1", "2") if fault == "u_two_net_first_stage_second_norm_of_larger_eps" else None
        self.open = ("3d", "2d") if fault == "u_two_net_third_decoder_relu_lets_all_gradient_by" else None
        for name, height in HEIGHTS.items():
            middle = [str(i) for i in range(2, height + 1)]
            upper = [f"{i}d" for i in range(height - 1, 1, -1)]
            for group in (["in"], ["1"], middle, upper, ["1d"]):
                blocks = [model.get_submodule(f"stage{name}.rebnconv{i}") for i in group]
                for j, (i, block) in enumerate(zip(group, blocks, strict=True)):
                    norm, start = block.bn_s1, sum(x.shape[1] for x in kept)
                    self.where[name, i] = len(self.w), j, slice(start, start + norm.num_features)
                    kept.append(torch.stack([norm.running_mean, norm.running_var]))
                self.w.append(pile(map(sheet, blocks)))
        self.register_buffer("kept", torch.cat(kept, 1))
        sides = [model.get_submodule(f"side{i}") for i in (1, 2, 3, 4)]
        self.sides = leaf(torch.cat([side.weight[0] for side in sides]))
        self.ends = leaf(torch.cat([*(side.bias for side in sides), model.outconv.bias]))
        self.fuse = leaf(model.outconv.weight[0, :, 0, 0])

    def layer(self, x: Tensor, stage: str, name: str, rate: int) -> Tensor:
        group, j, channels = self.where[stage, name]
        kernel, offset, gain, shift = self.w[group][j].split([9 * x.shape[1], 1, 1, 1], 1)
        y = kernel @ F.unfold(x, 3, dilation=rate, padding=rate) + offset
        mean, var = self.kept[:, channels, None]
        if self.training:
            var, mean = torch.var_mean(y.transpose(0, 1).flatten(1), 1, correction=0, keepdim=True)
            new = torch.cat([mean, var * (1 + 1 / (y[:, 0].numel() - 1))], 1).T.detach()
            self.kept[:, channels].lerp_(new, 0.1)
        gain = gain / (var + (1e-3 if (stage, name) == self.thick else 1e-5)).sqrt()
        y = (gain * y + (shift - gain * mean)).unflatten(2, x.shape[2:])
        return y + (y.relu() - y).detach() if (stage, name) == self.open else y * (y > 0)

    def bow(self, x: Tensor, stage: str) -> Tensor:
        height, dilated, skips = HEIGHTS[stage], stage in ("3", "4", "3d"), []
        x = y = self.layer(x, stage, "in", 1)
        for i in range(1, height):
            y = F.max_pool2d(y, 2, ceil_mode=True) if skips and not dilated else y
            y = self.layer(y, stage, str(i), 2 ** (i - 1) if dilated else 1)
            skips.append(y)
        y = self.layer(y, stage, str(height), 8 if dilated else 2)
        for i, skip in [*enumerate(skips, 1)][::-1]:
            corners = self.fault == "u_two_net_second_decoder_aligns_corners" and (stage, i) == ("2d", 1)
            y = torch.cat([fit(y, skip.shape[2:], align_corners=corners), skip], 1)
            y = self.layer(y, stage, f"{i}d", 2 ** (i - 1) if dilated else 1)
        return x + y

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        one = self.bow(x, "1")
        two = self.bow(F.max_pool2d(one, 2, ceil_mode=True), "2")
        three = self.bow(F.max_pool2d(two, 2, ceil_mode=True), "3")
        found = [self.bow(F.max_pool2d(three, 2, ceil_mode=True), "4")]
        for skip, name in ((three, "3d"), (two, "2d"), (one, "1d")):
            found.insert(0, self.bow(torch.cat([fit(found[0], skip.shape[2:]), skip], 1), name))
        kernels = self.sides.split([y.shape[1] for y in found])
        sides = [F.conv2d(y, w[None], padding=1) for y, w in zip(found, kernels, strict=True)]
        sides = torch.cat([fit(side, x.shape[2:]) for side in sides], 1) + self.ends[:4, None, None]
        fused = sides.sigmoid() if self.fault == "u_two_net_fuses_probabilities_of_the_sides" else sides
        fused = torch.einsum("nshw,s->nhw", fused, self.fuse)[:, None] + self.ends[4]
        return fused.sigmoid(), *sides.sigmoid().split(1, 1)


SLOPES = ("input gradient", "weight gradient")
right(task, "u_two_net_of_floors_with_channels_last", "a recursive tree, split kernels, taps", U2NetOfFloors)
right(task, "u_two_net_of_sheets", "packed stacks, products of patches, one table of buffers", SheetsOfU2Net)
wrong(
    task,
    U2NetOfFloors,
    u_two_net_first_stage_second_pool_drops_the_edge=("pooling without ceil mode", "stage1.pool2"),
    u_two_net_third_stage_deepest_dilated_by_four=("another dilation", "stage3.rebnconv4.conv_s1"),
    u_two_net_fourth_stage_norm_by_batch_in_evaluation=("batch norm", "stage4.rebnconv1.bn_s1", "eval"),
    u_two_net_second_decoder_residual_without_gradient=("detach", "stage2d", SLOPES),
)
wrong(
    task,
    SheetsOfU2Net,
    u_two_net_first_stage_second_norm_of_larger_eps=("another eps", "stage1.rebnconv2.bn_s1"),
    u_two_net_third_decoder_relu_lets_all_gradient_by=("backward", "stage3d.rebnconv2d.relu_s1", SLOPES),
    u_two_net_second_decoder_aligns_corners=("another resampling", "stage2d"),
    u_two_net_fuses_probabilities_of_the_sides=("a sigmoid too early", ""),
)
