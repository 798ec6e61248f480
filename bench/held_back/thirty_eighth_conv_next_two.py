"""Two ports of a small ConvNeXt V2: a tree with the channels last, and one class of packed sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_eighth_conv_next_two import ConvNeXtV2, gratings, smoothed

task = few("thirty_eighth_conv_next_two", ConvNeXtV2, gratings, smoothed)


class Even(nn.Module):
    """A layer norm of the last axis."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.scale, self.shift, self.tiny = leaf(norm.weight), leaf(norm.bias), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(-1, keepdim=True)
        return x * (x.square().mean(-1, keepdim=True) + self.tiny).rsqrt() * self.scale + self.shift


class Tiles(nn.Module):
    """Tiles of [N, H, W, C] side by side, each to one pixel by a matrix."""

    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.side = conv.kernel_size[0]
        self.matrix, self.shift = leaf(conv.weight.permute(2, 3, 1, 0).flatten(0, 2)), leaf(conv.bias)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(2, (-1, self.side)).unflatten(1, (-1, self.side))
        return x.transpose(2, 3).flatten(3) @ self.matrix + self.shift


class Around(nn.Module):
    """A sum over the window about each pixel of [N, H, W, C], each channel for itself; then its norm."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.kernel, self.shift = leaf(block.dwconv.weight[:, 0].permute(1, 2, 0)), leaf(block.dwconv.bias)
        self.even = Even(block.norm)

    def forward(self, x: Tensor) -> Tensor:
        windows = F.pad(x, (0, 0, 3, 3, 3, 3)).unfold(1, 7, 1).unfold(2, 7, 1)
        return self.even(torch.einsum("nhwcij,ijc->nhwc", windows, self.kernel) + self.shift)


class Expand(nn.Module):
    """Two products, and between them each channel by its strength among all channels."""

    def __init__(self, block: nn.Module):
        super().__init__()
        one, two = block.pwconv1, block.pwconv2
        self.up, self.up_shift = leaf(one.weight.T), leaf(one.bias)
        self.down, self.down_shift = leaf(two.weight.T), leaf(two.bias)
        self.gain, self.shift = leaf(block.grn.gamma.flatten()), leaf(block.grn.beta.flatten())
        self.kind, self.absolute, self.fixed = "none", False, False

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(x.flatten(1, 2) @ self.up + self.up_shift, approximate=self.kind)
        strength = y.abs().sum(1) if self.absolute else y.square().sum(1).sqrt()
        usual = strength.mean(1, keepdim=True) + 1e-6
        share = strength / (usual.detach() if self.fixed else usual)
        y = y * (1 + self.gain * share)[:, None] + self.shift
        return (y @ self.down + self.down_shift).unflatten(1, x.shape[1:3])


class Level(nn.Module):
    """What makes the pixels larger, then blocks, each a look around and an expansion."""

    def __init__(self, entry: nn.Sequential, stage: nn.Sequential):
        super().__init__()
        self.entry = nn.Sequential(*(Tiles(x) if isinstance(x, nn.Conv2d) else Even(x) for x in entry))
        self.branches = nn.ModuleList(nn.Sequential(Around(x), Expand(x)) for x in stage)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        for branch in self.branches:
            x = x + branch(x)
        return x


class TreeOfLevels(Port):
    """Levels with the channels last."""

    def take(self, model: ConvNeXtV2) -> None:
        pairs = zip(model.downsample_layers, model.stages, strict=True)
        self.levels = nn.ModuleList(Level(*pair) for pair in pairs)
        self.even = Even(model.norm)
        self.classes, self.shift = leaf(model.head.weight.T), leaf(model.head.bias)
        one, two, three = self.levels
        one.branches[1][1].absolute = self.fault == "conv_next_two_response_by_absolute_values"
        two.branches[1][1].fixed = self.fault == "conv_next_two_mean_response_taken_for_a_constant"
        if self.fault == "conv_next_two_first_downsampling_norm_with_a_large_epsilon":
            two.entry[0].tiny = 1e-3
        if self.fault == "conv_next_two_fast_gelu_in_the_sixth_block":
            three.branches[0][1].kind = "tanh"

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, 3)
        for level in self.levels:
            x = level(x)
        return self.even(x.mean((1, 2))) @ self.classes + self.shift


def outer(block: nn.Module) -> Tensor:
    """A row for each channel: its kernel, and its numbers in the norm and at the end."""
    numbers = block.dwconv.bias, block.norm.weight, block.norm.bias, block.pwconv2.bias
    return torch.cat([block.dwconv.weight.flatten(1), torch.stack(numbers, 1)], 1)


def inner(block: nn.Module) -> Tensor:
    """A row for each hidden channel: its weights of the way in and of the way out, and its numbers."""
    numbers = block.pwconv1.bias, block.grn.gamma.flatten(), block.grn.beta.flatten()
    return torch.cat([block.pwconv1.weight, block.pwconv2.weight.T, torch.stack(numbers, 1)], 1)


class PackedSheets(Port):
    """Stacks of sheets by stage; the norms' scales and the responses are put into the products."""

    def take(self, model: ConvNeXtV2) -> None:
        self.outer = nn.ParameterList(pile(map(outer, stage)) for stage in model.stages)
        self.inner = nn.ParameterList(pile(map(inner, stage)) for stage in model.stages)
        ends = [sorted(x, key=lambda part: isinstance(part, nn.Conv2d)) for x in model.downsample_layers]
        self.norms = nn.ParameterList(pile((x.weight, x.bias)) for x, _ in [*ends, (model.norm, None)])
        layers = [*(conv for _, conv in ends), model.head]
        sheets = (torch.cat([x.weight.flatten(1), x.bias[:, None]], 1) for x in layers)
        self.maps = nn.ParameterList(map(leaf, sheets))

    def norm(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, 1, correction=0, keepdim=True)
        return (x - center) / (spread + 1e-6).sqrt()

    def tiles(self, i: int, x: Tensor) -> Tensor:
        side = 2 if i else 4
        rows = F.pixel_unshuffle(x, side)
        if self.fault == "conv_next_two_second_downsampling_kernel_transposed" and i == 2:
            rows = rows.unflatten(1, (-1, 2, 2)).transpose(2, 3).flatten(1, 3)
        return torch.einsum("oc,nchw->nohw", self.maps[i][:, :-1], rows) + self.maps[i][:, -1, None, None]

    def scaled(self, i: int, x: Tensor) -> Tensor:
        scale, shift = self.norms[i].reshape(2, -1, *[1] * (x.dim() - 2))
        return torch.addcmul(shift, self.norm(x), scale)

    def block(self, i: int, j: int, x: Tensor) -> Tensor:
        width = x.shape[1]
        kernel, *numbers = self.outer[i][j].split([49, 1, 1, 1, 1], 1)
        bias, scale, shift, last = (number.flatten() for number in numbers)
        up, down, numbers = self.inner[i][j].split([width, width, 3], 1)
        start, gamma, beta = numbers.unbind(1)
        wrapped = self.fault == "conv_next_two_fifth_block_wraps_around_the_edges" and (i, j) == (1, 2)
        y = F.pad(x, (3, 3, 3, 3), "circular" if wrapped else "constant")
        y = self.norm(F.conv2d(y, kernel.view(width, 1, 7, 7), bias, groups=width)).flatten(2)
        y = F.gelu((up * scale) @ y + (up @ shift + start)[:, None])
        size = torch.linalg.vector_norm(y, dim=2)
        rate = 1 + gamma * size / (size.mean(1, keepdim=True) + 1e-6)
        y = (down.T * rate[:, None]) @ y + (beta @ down + last)[:, None]
        if self.fault == "conv_next_two_last_path_scaled_in_evaluation" and (i, j) == (2, 1):
            y = y if self.training else 0.9 * y
        return x + y.view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        for i, stack in enumerate(self.outer):
            x = self.scaled(0, self.tiles(0, x)) if i == 0 else self.tiles(i, self.scaled(i, x))
            for j in range(len(stack)):
                x = self.block(i, j, x)
        early = self.fault == "conv_next_two_pixels_normed_before_the_average"
        x = self.scaled(3, x).mean((2, 3)) if early else self.scaled(3, x.mean((2, 3)))
        return F.linear(x, self.maps[3][:, :-1], self.maps[3][:, -1])


SLOPES, LAST = ("input gradient", "weight gradient"), ("stages.2.1.drop_path", "stages.2.1")
right(task, "conv_next_two_of_levels_with_channels_last", "tiles and windows, channels last", TreeOfLevels)
right(task, "conv_next_two_of_packed_sheets", "packed stacks, norms folded into products", PackedSheets)
wrong(
    task,
    TreeOfLevels,
    conv_next_two_response_by_absolute_values=("another norm", "stages.0.1.grn"),
    conv_next_two_first_downsampling_norm_with_a_large_epsilon=("another epsilon", "downsample_layers.1.0"),
    conv_next_two_mean_response_taken_for_a_constant=("detach", "stages.1.1.grn", SLOPES),
    conv_next_two_fast_gelu_in_the_sixth_block=("an approximation", "stages.2.0.act"),
)
wrong(
    task,
    PackedSheets,
    conv_next_two_fifth_block_wraps_around_the_edges=("another padding", "stages.1.2.dwconv"),
    conv_next_two_second_downsampling_kernel_transposed=("a transposed kernel", "downsample_layers.2.1"),
    conv_next_two_last_path_scaled_in_evaluation=("a scale", LAST, "eval"),
    conv_next_two_pixels_normed_before_the_average=("another order", ""),
)
