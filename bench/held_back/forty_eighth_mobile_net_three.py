"""Two ports of a small MobileNetV3: a tree with the channels last, and one class of packed weights."""

from itertools import accumulate

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_eighth_mobile_net_three import MobileNetV3, gratings, half_entropy
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_eighth_mobile_net_three", MobileNetV3, gratings, half_entropy)


def ramp(x: Tensor) -> Tensor:
    """A ramp from zero, by a gate that opens from -3 to 3."""
    return x * F.relu6(x + 3) / 6


class Mix(nn.Module):
    """A product of the channels, and a norm."""

    def __init__(self, layer: nn.Sequential):
        super().__init__()
        self.weight, self.norm = leaf(layer[0].weight.flatten(1).T), Rows(layer[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x @ self.weight)


class Brush(nn.Module):
    """A kernel for each channel, one tap after the other, and a norm."""

    def __init__(self, layer: nn.Sequential):
        super().__init__()
        conv, self.norm = layer[0], Rows(layer[1])
        self.taps = leaf(conv.weight.squeeze(1).permute(1, 2, 0))
        self.hop, self.rate = conv.stride[0], conv.dilation[0]

    def forward(self, x: Tensor) -> Tensor:
        reach, (_, high, wide, _) = len(self.taps) // 2 * self.rate, x.shape
        x, total = F.pad(x, (0, 0, reach, reach, reach, reach)), 0
        for i, row in enumerate(self.taps):
            for j, tap in enumerate(row):
                down, across = i * self.rate, j * self.rate
                total = total + tap * x[:, down : down + high : self.hop, across : across + wide : self.hop]
        return self.norm(total)


class Gate(nn.Module):
    """How much of each channel passes, by the means of all."""

    def __init__(self, squeeze: nn.Module):
        super().__init__()
        self.down, self.up = (leaf(x.weight.flatten(1).T) for x in (squeeze.fc1, squeeze.fc2))
        self.low, self.high = leaf(squeeze.fc1.bias), leaf(squeeze.fc2.bias)
        self.slope, self.silent = 1 / 6, False

    def forward(self, x: Tensor) -> Tensor:
        code = (x.mean((1, 2), keepdim=True) @ self.down + self.low).relu()
        part = (self.slope * (code @ self.up + self.high) + 0.5).clamp(0, 1)
        return part.detach() if self.silent else part


class Bottle(nn.Module):
    """What widens, filters, gates and narrows, beside a shortcut where the shapes allow one."""

    def __init__(self, block: nn.Module):
        super().__init__()
        layers = list(block.block)
        self.bend = ramp if isinstance(layers[0][2], nn.Hardswish) else F.relu
        self.widen = Mix(layers.pop(0)) if layers[0][0].groups == 1 else None
        self.brush, self.narrow = Brush(layers[0]), Mix(layers[-1])
        self.gate = Gate(layers[1]) if len(layers) == 3 else None
        self.short = block.use_res_connect

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.widen is None else self.bend(self.widen(x))
        y = self.bend(self.brush(y))
        y = self.narrow(y if self.gate is None else y * self.gate(y))
        return x + y if self.short else y


class MobileTree(Port):
    """Windows, bottles and a head, channels last."""

    def take(self, model: MobileNetV3) -> None:
        (conv, norm, _), *blocks, last = model.features
        self.lens, self.norm = leaf(conv.weight.permute(2, 3, 1, 0)), Rows(norm)
        self.bottles, self.last = nn.Sequential(*map(Bottle, blocks)), Mix(last)
        one, _, _, two = model.classifier
        self.u, self.v = leaf(one.weight.T), leaf(two.weight.T)
        self.b, self.c = leaf(one.bias), leaf(two.bias)
        if self.fault == "mobile_net_three_first_gate_of_slope_a_fifth":
            self.bottles[0].gate.slope = 1 / 5
        if self.fault == "mobile_net_three_second_depthwise_norm_moves_by_a_tenth":
            self.bottles[1].brush.norm.rate = 0.1
        self.bottles[4].gate.silent = self.fault == "mobile_net_three_last_gate_taken_for_a_constant"

    def forward(self, x: Tensor) -> Tensor:
        edges = (0, 1) if self.fault == "mobile_net_three_stem_padded_at_the_end_alone" else (1, 1)
        windows = F.pad(x, (*edges, *edges)).unfold(2, 3, 2).unfold(3, 3, 2)
        x = ramp(self.norm(torch.einsum("nchwij,ijco->nhwo", windows, self.lens)))
        x = ramp(self.last(self.bottles(x))).mean((1, 2))
        return ramp(x @ self.u + self.b) @ self.v + self.c


# by block: whether it widens, is gated and smooth, its stride, its dilation, whether it has a shortcut
PLAN = (0, 1, 0, 2, 1, 0), (1, 0, 0, 1, 1, 0), (1, 1, 1, 1, 1, 1), (1, 1, 1, 1, 2, 0), (1, 1, 1, 1, 2, 1)
EPS, RATE = 1e-3, 0.01


class PackedMobile(Port):
    """Kernels in one row, norms in a pair of rows, and a table for each gate, which scales a kernel."""

    def take(self, model: MobileNetV3) -> None:
        layers = list(model.modules())
        norms = [x for x in layers if isinstance(x, nn.BatchNorm2d)]
        kernels = [x.weight for x in layers if isinstance(x, nn.Conv2d) and x.bias is None]
        gates = [x for x in layers if hasattr(x, "fc1")]
        self.shapes, self.sizes = [x.shape for x in kernels], [x.numel() for x in kernels]
        self.starts = [0, *accumulate(map(len, kernels[:-1]))]
        self.kernels = leaf(torch.cat([x.flatten() for x in kernels]))
        rows = [torch.stack([x.weight, x.bias, x.running_mean, x.running_var]) for x in norms]
        self.norms = leaf(torch.cat(rows, 1)[:2])
        self.register_buffer("kept", torch.cat(rows, 1)[2:].detach().clone())
        tables = [(x.fc1.weight.flatten(1).T, x.fc2.weight.flatten(1), x.fc2.bias[:, None]) for x in gates]
        self.tables = nn.ParameterList(leaf(torch.cat(x, 1)) for x in tables)
        self.inner = leaf(torch.cat([x.fc1.bias for x in gates]))
        ends = model.classifier[0], model.classifier[3]
        self.head, self.tail = (leaf(torch.cat([x.weight, x.bias[:, None]], 1)) for x in ends)

    def norm(self, x: Tensor, at: int, eps: float = EPS) -> Tensor:
        span = slice(at, at + x.shape[1])
        mean, var = self.kept[:, span].clone()
        if self.training:
            count, mean = x[:, 0].numel(), x.mean((0, 2, 3))
            var = x.square().mean((0, 2, 3)) - mean.square()
            seen = torch.stack([mean, var * count / (count - 1)]).detach()
            self.kept[:, span] += RATE * (seen - self.kept[:, span])
        gain = self.norms[0, span] / (var + eps).sqrt()
        return x * gain[:, None, None] + (self.norms[1, span] - mean * gain)[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        tables, inner, fault = iter(self.tables), self.inner, self.fault
        kernels = map(Tensor.view, self.kernels.split(self.sizes), self.shapes)
        pieces = zip(kernels, self.starts, strict=True)
        kernel, at = next(pieces)
        x = ramp(self.norm(F.conv2d(x, kernel, None, 2, 1), at))
        for i, (widens, gated, smooth, stride, rate, short) in enumerate(PLAN):
            y, bend = x, ramp if smooth else F.relu
            if widens:
                kernel, at = next(pieces)
                y = self.norm(torch.einsum("oc,nchw->nohw", kernel[:, :, 0, 0], y), at)
                plain = fault == "mobile_net_three_third_block_widens_under_a_relu" and i == 2
                y = F.relu(y) if plain else bend(y)
            kernel, at = next(pieces)
            stride = 2 if fault == "mobile_net_three_dilated_block_keeps_its_stride" and i == 3 else stride
            edge = rate * (kernel.shape[-1] // 2)
            y = bend(self.norm(F.conv2d(y, kernel, None, stride, edge, rate, len(kernel)), at))
            kernel, at = next(pieces)
            kernel = kernel[None, :, :, 0, 0].expand(len(y), -1, -1)
            if gated:
                table = next(tables)
                size = table.shape[1] // 2
                code = F.relu(y.mean((2, 3)) @ table[:, :size] + inner[:size])
                gate = F.relu6(code @ table[:, size:-1].T + table[:, -1] + 3) / 6
                inner, kernel = inner[size:], kernel * gate[:, None]
            y = self.norm((kernel @ y.flatten(2)).unflatten(2, y.shape[2:]), at)
            x = x + y if short else y
        kernel, at = next(pieces)
        eps = 1e-5 if fault == "mobile_net_three_last_norm_of_another_epsilon" else EPS
        x = ramp(self.norm(F.conv2d(x, kernel), at, eps)).mean((2, 3))
        x = F.linear(x, self.head[:, :-1], self.head[:, -1])
        part = F.relu6(x + 3) / 6
        part = part.detach() if fault == "mobile_net_three_classifier_swish_gate_without_slope" else part
        return F.linear(x * part, self.tail[:, :-1], self.tail[:, -1])


SLOPES = ("input gradient", "weight gradient")
right(task, "mobile_net_three_tree_with_channels_last", "a tree, products of channels, taps", MobileTree)
right(task, "mobile_net_three_of_packed_weights", "packed rows, gates inside the kernels", PackedMobile)
wrong(
    task,
    MobileTree,
    mobile_net_three_stem_padded_at_the_end_alone=("another padding", "features.0.0"),
    mobile_net_three_first_gate_of_slope_a_fifth=("a slope", "features.1.block.1.scale_activation"),
    mobile_net_three_second_depthwise_norm_moves_by_a_tenth=("momentum", "features.2.block.1.1", "buffer"),
    mobile_net_three_last_gate_taken_for_a_constant=("detach", "features.5.block.2", SLOPES),
)
wrong(
    task,
    PackedMobile,
    mobile_net_three_third_block_widens_under_a_relu=("another activation", "features.3.block.0.2"),
    mobile_net_three_dilated_block_keeps_its_stride=("a stride too many", "features.4.block.1.0"),
    mobile_net_three_last_norm_of_another_epsilon=("epsilon", "features.6.1"),
    mobile_net_three_classifier_swish_gate_without_slope=("detached gate", "classifier.1", SLOPES),
)
