"""Two ports of a U-Net for volumes: floors nested in each other, and windows with channels last."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eleventh_volumetric import Segmenter, supervised, volumes
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("eleventh_volumetric", Segmenter, volumes, supervised)


class Unit(nn.Module):
    """Convolve within explicit edges, normalise, bend; ``swap`` if the halves of the input changed places."""

    def __init__(self, unit: nn.Module, swap: bool = False):
        super().__init__()
        conv, norm, (d, h, w) = unit.conv, unit.norm, unit.conv.padding
        self.stride, self.edges, self.eps = conv.stride, (w, w, h, h, d, d), norm.eps
        self.slope = getattr(unit.nonlin, "negative_slope", 1.0)
        self.weight = leaf(conv.weight.roll(conv.in_channels // 2 if swap else 0, 1))
        self.gain, self.shift = leaf(norm.weight), leaf(norm.bias)
        self.register_buffer("center", None)
        self.register_buffer("spread", None)

    def keep(self) -> None:
        self.center, self.spread = torch.zeros_like(self.shift.data), torch.ones_like(self.gain.data)

    def forward(self, x: Tensor) -> Tensor:
        x = F.conv3d(F.pad(x, self.edges), self.weight, stride=self.stride)
        own = self.training or self.center is None
        x = F.instance_norm(x, self.center, self.spread, self.gain, self.shift, own, 0.1, self.eps)
        return F.leaky_relu(x, self.slope)


class Point(nn.Module):
    """A product over the channels of [N, C, ...]."""

    def __init__(self, conv: nn.Conv3d):
        super().__init__()
        self.weight, self.bias = leaf(conv.weight.flatten(1).T), leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = x.movedim(1, -1) @ self.weight
        return (y if self.bias is None else y + self.bias).movedim(-1, 1)


class Cellar(nn.Module):
    """The lowest resolution: a residual pair of units whose channels are gated."""

    def __init__(self, block: nn.Module, head: nn.Conv3d):
        super().__init__()
        gate, (pool, around) = block.squeeze_excitation, block.skip
        self.cell, self.slope = pool.stride, block.nonlin2.negative_slope
        self.body, self.around = nn.Sequential(Unit(block.conv1), Unit(block.conv2)), Unit(around)
        self.gate, self.head = nn.Sequential(Point(gate.fc1), nn.ReLU(), Point(gate.fc2)), Point(head)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        y, side = self.body(x), self.around(F.avg_pool3d(x, self.cell))
        gate = self.gate(y.mean((2, 3, 4))).sigmoid()
        y = F.leaky_relu(torch.addcmul(side, y, gate[:, :, None, None, None]), self.slope)
        return y, (self.head(y),)


class Floor(nn.Module):
    """One resolution, with all that is below it."""

    def __init__(self, down: nn.Module, below: nn.Module, rise: nn.Module, up: nn.Module, head: nn.Module):
        super().__init__()
        self.down, self.below = nn.Sequential(*(Unit(unit) for unit in down.convs)), below
        self.up, self.head = nn.Sequential(Unit(up.convs[0], True), Unit(up.convs[1])), Point(head)
        self.rise, self.shift, self.stride = leaf(rise.weight), leaf(rise.bias), rise.stride

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        here = self.down(x)
        deep, coarser = self.below(here)
        risen = F.conv_transpose3d(deep, self.rise, self.shift, self.stride)
        y = self.up(torch.cat([here, risen], 1))
        return y, (self.head(y), *coarser)


class NestedFloors(Port):
    """Floors within floors, each with its head."""

    def take(self, model: Segmenter) -> None:
        (top, middle, low), tail = model.encoder.stages, model.decoder
        (low_head, middle_head, top_head), (lift, last_lift) = tail.seg_layers, tail.transpconvs
        inner = Floor(middle, Cellar(low, low_head), lift, tail.stages[0], middle_head)
        self.house = Floor(top, inner, last_lift, tail.stages[1], top_head)
        if self.fault == "first_volume_norm_with_a_larger_epsilon":
            self.house.down[0].eps = 1e-3
        if self.fault == "strided_volume_edges_on_the_far_side_only":
            inner.down[0].edges = (0, 1, 0, 1, 1, 1)
        if self.fault == "volume_norm_keeps_averages_for_evaluation":
            inner.up[1].keep()
        if self.fault == "halves_of_the_last_volume_skip_swapped":
            self.house.up[0] = Unit(tail.stages[1].convs[0])
        if self.fault == "finest_volume_head_without_its_bias":
            self.house.head.bias = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.house(x)[1]


class VolumeWindows(Port):
    """Volumes [N, D, H, W, C]; a convolution is a product with its windows, a join is a sum of two."""

    def take(self, model: Segmenter) -> None:
        (top, middle, low), tail = model.encoder.stages, model.decoder
        up, last = tail.stages
        units = [*top.convs, *middle.convs, low.conv1, low.conv2, *up.convs, *last.convs, low.skip[1]]
        self.strides = [unit.conv.stride for unit in units]
        self.kernels = nn.ParameterList(leaf(unit.conv.weight.permute(2, 3, 4, 1, 0)) for unit in units)
        self.norms = nn.ParameterList(leaf(torch.stack([x.norm.weight, x.norm.bias])) for x in units)
        self.rises = nn.ParameterList(leaf(x.weight.permute(0, 2, 3, 4, 1)) for x in tail.transpconvs)
        self.rises_b = nn.ParameterList(leaf(x.bias) for x in tail.transpconvs)
        points = [*tail.seg_layers, low.squeeze_excitation.fc1, low.squeeze_excitation.fc2]
        self.points = nn.ParameterList(leaf(point.weight.flatten(1).T) for point in points)
        self.points_b = nn.ParameterList(leaf(point.bias) for point in points)

    def point(self, i: int, x: Tensor) -> Tensor:
        return x @ self.points[i] + self.points_b[i]

    def normed(self, i: int, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
        if self.fault == "volume_norm_statistics_without_gradient" and i == 3:
            spread, center = spread.detach(), center.detach()
        gain, shift = self.norms[i]
        factor = gain * (spread + 1e-5).rsqrt()
        return torch.addcmul(shift - center * factor, x, factor)

    def unit(self, i: int, *volumes: Tensor) -> Tensor:
        y, start = 0, 0
        for x in volumes:
            kernel = self.kernels[i][:, :, :, start : start + x.shape[4]]
            windows = F.pad(x, (0, 0, *(size // 2 for size in kernel.shape[2::-1] for _ in range(2))))
            for axis in range(3):
                windows = windows.unfold(axis + 1, kernel.shape[axis], self.strides[i][axis])
            y = y + torch.einsum("ndhwcijk,ijkco->ndhwo", windows, kernel)
            start += x.shape[4]
        y = self.normed(i, y)
        return torch.maximum(y, 0.01 * y)

    def bottom(self, x: Tensor) -> Tensor:
        y = self.unit(5, self.unit(4, x))
        logits = self.point(4, self.point(3, y.mean((1, 2, 3), keepdim=True)).relu())
        gate = F.hardsigmoid(logits) if self.fault == "volume_gate_by_a_hard_sigmoid" else logits.sigmoid()
        cells = x.unflatten(3, (-1, 2)).unflatten(2, (-1, 2)).unflatten(1, (-1, 2))
        y = y * gate + self.normed(10, cells.mean((2, 4, 6)) @ self.kernels[10][0, 0, 0])
        return torch.maximum(y, 0.01 * y)

    def risen(self, i: int, x: Tensor) -> Tensor:
        swapped = self.fault == "first_volume_rise_with_rows_and_columns_swapped" and i == 0
        taps = self.rises[i].transpose(2, 3) if swapped else self.rises[i]
        cells = torch.einsum("ndhwc,cijko->ndihjwko", x, taps)
        return cells.flatten(5, 6).flatten(3, 4).flatten(1, 2) + self.rises_b[i]

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        top = self.unit(1, self.unit(0, x.movedim(1, 4)))
        middle = self.unit(3, self.unit(2, top))
        low = self.bottom(middle)
        middle = self.unit(7, self.unit(6, self.risen(0, low), middle))
        top = self.unit(9, self.unit(8, self.risen(1, middle), top))
        return tuple(self.point(i, x).movedim(4, 1) for i, x in ((2, top), (1, middle), (0, low)))


right(task, "volume_network_of_nested_floors", "a recursive tree of resolutions", NestedFloors)
right(task, "volume_network_by_windows", "channels last, products of windows", VolumeWindows)
wrong(
    task,
    NestedFloors,
    first_volume_norm_with_a_larger_epsilon=("another epsilon", "encoder.stages.0.convs.0.norm"),
    strided_volume_edges_on_the_far_side_only=("padding on one side only", "encoder.stages.1.convs.0.conv"),
    volume_norm_keeps_averages_for_evaluation=(
        "running averages in place of own statistics",
        "decoder.stages.0.convs.1.norm",
        "eval",
    ),
    halves_of_the_last_volume_skip_swapped=(
        "halves of a weight swapped",
        ("decoder.stages.1.convs.0.conv", "decoder"),
    ),
    finest_volume_head_without_its_bias=("a bias missing", "decoder.seg_layers.2"),
)
wrong(
    task,
    VolumeWindows,
    volume_norm_statistics_without_gradient=(
        "a detach too many",
        "encoder.stages.1.convs.1.norm",
        ("input gradient", "weight gradient"),
    ),
    volume_gate_by_a_hard_sigmoid=(
        "another gate function",
        ("encoder.stages.2.squeeze_excitation.gate", "encoder.stages.2.squeeze_excitation"),
    ),
    first_volume_rise_with_rows_and_columns_swapped=("axes swapped", "decoder.transpconvs.0"),
)
