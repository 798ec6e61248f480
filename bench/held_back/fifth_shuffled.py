"""A ShuffleNet of the second version: half of the channels pass, then all are shuffled."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import method_of
from bench.held_back._fifth_vision import Stats, filled, picked, right, tapped
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.tasks import _classes, _task


def pointwise(before: int, after: int) -> list[nn.Module]:
    return [nn.Conv2d(before, after, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]


def deep(width: int, stride: int) -> list[nn.Module]:
    conv = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
    return [conv, nn.BatchNorm2d(width)]


class Unit(nn.Module):
    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        half, self.stride = after // 2, stride
        left = [*deep(before, 2), *pointwise(before, half)] if stride == 2 else []
        self.left = nn.Sequential(*left)
        start = pointwise(before if stride == 2 else half, half)
        self.right = nn.Sequential(*start, *deep(half, stride), *pointwise(half, half))

    def forward(self, x: Tensor) -> Tensor:
        left, right = (x, x) if self.stride == 2 else x.chunk(2, 1)
        x = torch.cat([self.left(left), self.right(right)], 1)
        return x.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)


class Shuffled(nn.Module):
    """[N, 3, 12, 12] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        units = Unit(8, 16, 2), Unit(16, 16, 1), Unit(16, 24, 2), Unit(24, 24, 1), Unit(24, 24, 1)
        self.units = nn.Sequential(*units)
        self.last = nn.Sequential(*pointwise(24, 32))
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.last(self.units(self.stem(x))).mean((2, 3)))


shuffled = _task("fifth_shuffled", Shuffled, lambda: (torch.randn(12, 3, 12, 12), _classes(12, 5)))

AT = {
    "window_as_in_another_library": 2,
    "rate_of_the_kept_statistics_turned": 1,
    "depthwise_gain_not_trained": 3,
}


class Chain(Port):
    """Convolutions and norms in a row, of [N, H, W, C]; a ReLU after those that mix channels."""

    def take(self, layers: nn.Sequential) -> None:
        convs = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
        self.norms = nn.ModuleList(Stats(m) for m in layers if isinstance(m, nn.BatchNorm2d))
        self.kernels, self.strides = nn.ParameterList(), [conv.stride[0] for conv in convs]
        for conv in convs:
            each = conv.groups > 1
            self.kernels.append(leaf(conv.weight[:, 0].movedim(0, -1) if each else conv.weight[..., 0, 0].T))
        if self.fault == "rate_of_the_kept_statistics_turned":
            self.norms[1].rate = 1 - self.norms[1].rate
        if self.fault == "depthwise_gain_not_trained":
            self.norms[1].gain.requires_grad_(False)

    def each(self, x: Tensor, kernel: Tensor, stride: int) -> Tensor:
        """A kernel [3, 3, C] for each channel."""
        before = 0 if self.fault == "window_as_in_another_library" else 1
        x = F.pad(x, (0, 0, before, 2 - before, before, 2 - before))
        return torch.einsum("nhwcij,ijc->nhwc", x.unfold(1, 3, stride).unfold(2, 3, stride), kernel)

    def forward(self, x: Tensor) -> Tensor:
        for kernel, stride, norm in zip(self.kernels, self.strides, self.norms, strict=True):
            x = norm(self.each(x, kernel, stride)) if kernel.ndim == 3 else norm(x @ kernel).relu()
        return x


class Interleaved(Port):
    """A unit whose shuffle is a stack along a new last axis."""

    def take(self, unit: Unit) -> None:
        window = self.fault == "window_as_in_another_library"
        self.a = Chain(unit.left, self.fault if window else "") if len(unit.left) else None
        self.b = Chain(unit.right, "" if window else self.fault)

    def forward(self, x: Tensor) -> Tensor:
        left, right = x.chunk(2, -1) if self.a is None else (self.a(x), x)
        return torch.stack([left, self.b(right)], -1).flatten(-2)


class Planes(Port):
    """The whole network with pixels before channels."""

    def take(self, model: Shuffled) -> None:
        self.entry, self.entry_norm = leaf(model.stem[0].weight), Stats(model.stem[1])
        places = enumerate(model.units)
        units = [Interleaved(unit, self.fault if AT.get(self.fault) == i else "") for i, unit in places]
        self.body = nn.Sequential(*units, Chain(model.last))
        self.classes = leaf(torch.cat([model.head.weight, model.head.bias[:, None]], 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry_norm(tapped(x.permute(0, 2, 3, 1), self.entry)).relu()
        return F.pad(self.body(x).mean((1, 2)), (0, 1), value=1.0) @ self.classes.T


right(shuffled, "shuffle_as_a_stack", "port to channels last", Planes)
wrong(
    shuffled,
    Planes,
    window_as_in_another_library=("padding side", "units.2.left.0"),
    rate_of_the_kept_statistics_turned=("momentum convention", "units.1.right.4", "buffer"),
    depthwise_gain_not_trained=("a frozen weight", "units.3.right.4", ("weight gradient", "update")),
)


class Unmoved(nn.Module):
    """A unit that moves no channel: ``order`` tells which of the reference's channels stands where."""

    def __init__(self, unit: Unit, order: list[int]):
        super().__init__()
        half = unit.right[-3].out_channels
        conv, *rest = unit.right
        if unit.stride == 2:
            self.stay, self.go = range(len(order)), range(len(order))
            deep, norm, mix, *after = unit.left
            self.left = nn.Sequential(
                filled(deep, deep.weight[order]),
                picked(norm, order),
                filled(mix, mix.weight[:, order]),
                *after,
            )
            columns, kept = order, list(range(half))
        else:
            self.stay = [place for place, channel in enumerate(order) if channel < half]
            self.go = [place for place, channel in enumerate(order) if channel >= half]
            self.left = nn.Identity()
            columns, kept = [order[place] - half for place in self.go], [order[p] for p in self.stay]
        self.branch = nn.Sequential(filled(conv, conv.weight[:, columns]), *rest)
        self.order = [2 * channel for channel in kept] + [2 * channel + 1 for channel in range(half)]

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x[:, self.stay]), self.branch(x[:, self.go])], 1)


def unmoved(model: Shuffled) -> nn.Module:
    order, units = list(range(8)), []
    for unit in model.units:
        units.append(Unmoved(unit, order))
        order = units[-1].order
    conv, *rest = model.last
    mix = filled(conv, conv.weight[:, order])
    ends = mix, *rest, nn.AdaptiveAvgPool2d(1), nn.Flatten(), model.head
    return nn.Sequential(*model.stem, *units, *ends)


right(shuffled, "shuffles_folded_in_the_weights", "channels in another order", unmoved)


@method_of("last.1", "bug", "statistics of the batch in eval mode", shuffled, passes="eval")
def last_norm_by_the_batch(self, x: Tensor) -> Tensor:
    if self.training:
        return nn.BatchNorm2d.forward(self, x)
    return F.batch_norm(x, None, None, self.weight, self.bias, True, 0.0, self.eps)
