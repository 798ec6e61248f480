"""A ResNeXt with squeeze and excitation: bottlenecks of four groups."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_vision import Heavy, Stats, filled, picked, right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.tasks import _classes, _task


class Squeeze(nn.Module):
    """One gate for each channel, from the means of all channels."""

    def __init__(self, width: int):
        super().__init__()
        self.down, self.up = nn.Linear(width, width // 4), nn.Linear(width // 4, width)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.up(self.down(x.mean((2, 3))).relu()).sigmoid()[..., None, None]


class Bottleneck(nn.Module):
    def __init__(self, before: int, inside: int, after: int, stride: int = 1):
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(before, inside, 1, bias=False), nn.BatchNorm2d(inside)
        self.conv2 = nn.Conv2d(inside, inside, 3, stride, 1, groups=4, bias=False)
        self.norm2 = nn.BatchNorm2d(inside)
        self.conv3, self.norm3 = nn.Conv2d(inside, after, 1, bias=False), nn.BatchNorm2d(after)
        self.squeeze = Squeeze(after)
        self.shortcut = nn.Sequential()
        if before != after:
            self.shortcut.append(nn.Conv2d(before, after, 1, stride, bias=False))
            self.shortcut.append(nn.BatchNorm2d(after))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(self.conv1(x)).relu()
        y = self.norm2(self.conv2(y)).relu()
        return (self.squeeze(self.norm3(self.conv3(y))) + self.shortcut(x)).relu()


class Aggregated(nn.Module):
    """[N, 3, 10, 10] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU())
        blocks = Bottleneck(12, 16, 24), Bottleneck(24, 16, 32, 2), Bottleneck(32, 16, 32)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean((2, 3)))


aggregated = _task("fifth_aggregated", Aggregated, lambda: (torch.randn(12, 3, 10, 10), _classes(12, 5)))

AT = {
    "shortcut_reads_odd_pixels": 1,
    "spread_kept_by_the_count_of_images": 2,
}


class Cell(Port):
    """A bottleneck of [N, H, W, C] whose groups have an axis of their own."""

    def take(self, block: Bottleneck) -> None:
        self.stride = block.conv2.stride[0]
        self.enter, self.leave = (leaf(conv.weight.flatten(1).T) for conv in (block.conv1, block.conv3))
        self.paths = leaf(block.conv2.weight.unflatten(0, (4, -1)))
        self.gates = nn.ParameterList(leaf(p) for p in block.squeeze.parameters())
        skip = list(block.shortcut)
        self.skip = leaf(skip[0].weight.flatten(1).T) if skip else None
        counted = self.fault == "spread_kept_by_the_count_of_images"
        norms = [Stats(block.norm1), Stats(block.norm2, counted), Stats(block.norm3), *map(Stats, skip[1:])]
        self.norms = nn.ModuleList(norms)

    def grouped(self, x: Tensor) -> Tensor:
        patches = F.pad(x, (0, 0, 1, 1, 1, 1)).unfold(1, 3, self.stride).unfold(2, 3, self.stride)
        return torch.einsum("nhwgcij,gocij->nhwgo", patches.unflatten(3, (4, -1)), self.paths).flatten(3)

    def gate(self, x: Tensor) -> Tensor:
        down, down_bias, up, up_bias = self.gates
        inner = F.relu(torch.einsum("nhwc,dc->nd", x, down) / (x.shape[1] * x.shape[2]) + down_bias)
        return torch.addmm(up_bias, inner, up.T).sigmoid()[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        y = self.norms[0](x @ self.enter).relu()
        y = self.norms[2](self.norms[1](self.grouped(y)).relu() @ self.leave)
        if self.skip is not None:
            first = 1 if self.fault == "shortcut_reads_odd_pixels" else 0
            x = self.norms[3](x[:, first :: self.stride, first :: self.stride] @ self.skip)
        return torch.addcmul(x, y, self.gate(y)).relu()


class Plane(Port):
    """The whole network with pixels before channels."""

    def take(self, model: Aggregated) -> None:
        self.first, self.first_norm = leaf(model.stem[0].weight), Stats(model.stem[1])
        self.cells = nn.ModuleDict()
        for index, block in enumerate(model.blocks):
            self.cells[f"cell{index}"] = Cell(block, self.fault if AT.get(self.fault) == index else "")
        self.classes, self.offset = leaf(model.head.weight.T), leaf(model.head.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first_norm(tapped(x.movedim(1, -1), self.first)).relu()
        for cell in self.cells.values():
            x = cell(x)
        return (x @ self.classes).mean((1, 2)) + self.offset


right(aggregated, "groups_with_an_axis_of_their_own", "port to channels last", Plane)
right(
    aggregated,
    "groups_stacked_and_velocity_with_the_rate_inside",
    "port with another momentum optimizer",
    Plane,
    candidate_optimizer=lambda module: Heavy(module.parameters()),
)
wrong(
    aggregated,
    Plane,
    shortcut_reads_odd_pixels=("off by one", "blocks.1.shortcut.0"),
    spread_kept_by_the_count_of_images=("wrong count of samples", "blocks.2.norm2", "buffer"),
)


class Paths(nn.Module):
    """A bottleneck as four narrow ones, whose outputs are added before the last norm."""

    def __init__(self, block: Bottleneck):
        super().__init__()
        inside = block.conv1.out_channels // 4
        self.paths = nn.ModuleList()
        for g in range(4):
            own = slice(g * inside, (g + 1) * inside)
            index = range(own.start, own.stop)
            narrow = nn.Conv2d(block.conv1.in_channels, inside, 1, bias=False)
            middle = nn.Conv2d(inside, inside, 3, block.conv2.stride, 1, bias=False)
            wide = nn.Conv2d(inside, block.conv3.out_channels, 1, bias=False)
            path = [filled(narrow, block.conv1.weight[own]), picked(block.norm1, index), nn.ReLU()]
            path += [filled(middle, block.conv2.weight[own]), picked(block.norm2, index), nn.ReLU()]
            self.paths.append(nn.Sequential(*path, filled(wide, block.conv3.weight[:, own])))
        self.merged, self.excite, self.direct = block.norm3, block.squeeze, block.shortcut

    def forward(self, x: Tensor) -> Tensor:
        merged = torch.stack([path(x) for path in self.paths]).sum(0)
        return F.relu(self.direct(x) + self.excite(self.merged(merged)))


def split_paths(model: Aggregated) -> nn.Module:
    ends = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head)
    return nn.Sequential(model.stem, nn.Sequential(*map(Paths, model.blocks)), ends)


right(aggregated, "groups_as_separate_paths", "groups as modules that are summed", split_paths)


@method_of("blocks.0.squeeze", "bug", "another activation", aggregated)
def gate_of_straight_lines(self, x: Tensor) -> Tensor:
    return x * F.hardsigmoid(self.up(self.down(x.mean((2, 3))).relu()))[..., None, None]
