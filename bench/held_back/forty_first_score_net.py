"""Two ports of a small EDM score network: a tree with the channels last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_first_score_net import CLASSES, NOISE, EDMPrecond, denoising, noisy
from bench.held_back._fourth_ports import Port, leaf, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_first_score_net", EDMPrecond, noisy, denoising)
SIGMA_DATA = 0.5


def resize(x: Tensor, way: int, axes: tuple[int, int] = (1, 2)) -> Tensor:
    """Pictures twice as large, half as large or as they are."""
    for axis in axes if way else ():
        size = x.shape[axis] << (way > 0)
        down = F.pad(torch.eye(size).to(x), (1, 1)).unfold(1, 4, 2) @ x.new_tensor([1, 3, 3, 1]) / 8
        x = (x.movedim(axis, -1) @ (2 * down.T if way > 0 else down)).movedim(-1, axis)
    return x


class Patch(nn.Module):
    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = leaf(weight), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return spatial(x, self.weight, self.bias)


class Fours(nn.Module):
    """A group norm by four channels, channels last."""

    def __init__(self, norm: nn.GroupNorm, turn: int = 0):
        super().__init__()
        self.gain, self.shift = leaf(norm.weight.roll(-turn)), leaf(norm.bias.roll(-turn))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(3, (-1, 4))
        x = x - x.mean((1, 2, 4), True)
        x = x / (x.square().mean((1, 2, 4), True) + 1e-6).sqrt()
        return x.flatten(3) * self.gain + self.shift


class Cell(nn.Module):
    """A residual block; what it is given from the way down stands before what comes from below."""

    def __init__(self, block: nn.Module, below: int = 0, one: float = 1.0):
        super().__init__()
        self.tell, skip = block.affine, block.skip
        self.way, self.one, self.share = block.conv0.up - block.conv0.down, one, math.sqrt(0.5)
        self.enter, self.inner = Fours(block.norm0, below), Fours(block.norm1)
        self.first = Patch(block.conv0.weight.roll(-below, 1), block.conv0.bias)
        self.second = Patch(block.conv1.weight, block.conv1.bias)
        across = block.in_channels != block.out_channels
        self.across = Patch(skip.weight.roll(-below, 1), skip.bias) if across else nn.Identity()

    def forward(self, x: Tensor, code: Tensor) -> Tensor:
        y = self.inner(self.first(resize(F.silu(self.enter(x)), self.way)))
        gain, shift = self.tell(code)[:, None, None].chunk(2, 3)
        y = F.silu(y * (self.one + gain) + shift)
        return (self.across(resize(x, self.way)) + self.second(y)) * self.share


class ScoreTree(Port):
    """Cells on the way down and up, channels last."""

    def take(self, model: EDMPrecond) -> None:
        net, fault = model.model, self.fault
        self.kinds, self.bias = leaf(net.map_label.weight.T), leaf(net.map_label.bias)
        self.changes, self.one, self.two = leaf(net.map_augment.weight.T), net.map_layer0, net.map_layer1
        (entry, *down), (*up, norm, leave) = net.enc.values(), net.dec.values()
        one = 0.0 if fault == "score_net_second_level_scales_without_the_one" else 1.0
        self.down = nn.ModuleList([Cell(down[0]), Cell(down[1]), Cell(down[2], one=one)])
        self.below = {2: 20, 3: 20, 5: 20, 6: 12}
        self.up = nn.ModuleList(Cell(block, self.below.get(i, 0)) for i, block in enumerate(up))
        if fault == "score_net_second_middle_block_adds_without_the_half_root":
            self.up[1].share = 1.0
        self.entry, self.leave = (Patch(x.weight, x.bias) for x in (entry, leave))
        self.norm = Fours(norm)

    def score(self, x: Tensor, code: Tensor) -> Tensor:
        kept = [self.entry(x)]
        for cell in self.down:
            kept.append(cell(kept[-1], code))
        x = kept[-1]
        for i, cell in enumerate(self.up):
            if i in self.below:
                saved = kept.pop()
                if i == 6 and self.fault == "score_net_last_saved_map_is_joined_without_gradient":
                    saved = saved.detach()
                x = torch.cat([saved, x], 3)
            x = cell(x, code)
        return self.leave(F.silu(self.norm(x)))

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor, augment_labels: Tensor) -> Tensor:
        ends = 0 if self.fault == "score_net_noise_frequencies_stop_before_the_end" else 1
        steps = torch.arange(NOISE // 2).to(sigma) / (NOISE // 2 - ends)
        angle = sigma.log()[:, None] / 4 * torch.exp(-math.log(10000) * steps)
        code = torch.cat([angle.sin(), angle.cos()], 1) + augment_labels @ self.changes
        code = code + CLASSES**0.5 * (class_labels @ self.kinds) + self.bias
        code, size = F.silu(self.two(F.silu(self.one(code)))), sigma[:, None, None, None]
        whole = (size.square() + SIGMA_DATA**2).rsqrt()
        y = self.score((x * whole).movedim(1, 3), code).movedim(3, 1)
        return (SIGMA_DATA * whole) * (SIGMA_DATA * whole * x + size * y)


def sheet(layer: nn.Module) -> Tensor:
    """A row for each channel: its kernel and its bias."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


class PackedScore(Port):
    """Sheets read in turn, all norms in one weight, all that the code tells in one product."""

    def take(self, model: EDMPrecond) -> None:
        net, inner = model.model, [model.model.enc["8x12_conv"]]
        blocks = [x for part in (net.enc, net.dec) for x in part.items() if hasattr(x[1], "conv0")]
        self.plan = [(n, b.conv0.up - b.conv0.down, 2 * b.out_channels) for n, b in blocks]
        for _, b in blocks:
            inner += [b.conv0, b.conv1, *([b.skip] if b.in_channels != b.out_channels else [])]
        self.sheets = nn.ParameterList(leaf(sheet(x)) for x in (*inner, net.dec["8x12_aux_conv"]))
        norms = [x for x in net.modules() if isinstance(x, nn.GroupNorm)]
        self.norms = leaf(torch.cat([torch.stack([x.weight, x.bias]) for x in norms], 1))
        self.told = leaf(torch.cat([sheet(b.affine) for _, b in blocks]))
        self.front = leaf(torch.cat([sheet(net.map_label), net.map_augment.weight], 1))
        self.mids = nn.ParameterList(leaf(sheet(x)) for x in (net.map_layer0, net.map_layer1))

    def conv(self, x: Tensor) -> Tensor:
        rows = next(self.rows)
        size = math.isqrt(rows.shape[1] // x.shape[1])
        y = rows[:, :-1] @ F.unfold(x, size, padding=size // 2) + rows[:, -1:]
        return y.unflatten(2, x.shape[2:])

    def norm(self, x: Tensor) -> Tensor:
        gain, shift = self.norms[:, self.at : self.at + x.shape[1]]
        self.at = self.at + x.shape[1]
        return F.group_norm(x, x.shape[1] // 4, gain, shift, 1e-6)

    def block(self, x: Tensor, told: Tensor, name: str, way: int) -> Tensor:
        start, fault = x, self.fault
        x = F.silu(self.norm(x))
        if way > 0 and fault == "score_net_up_block_carries_on_what_is_activated":
            start = x
        x = self.conv(resize(x, way, (2, 3)))
        scale, shift = told[:, :, None, None].tensor_split(2, 1)
        if name == "8x12_block1" and fault == "score_net_last_block_takes_shift_before_scale":
            scale, shift = shift, scale
        x = self.conv(F.silu(torch.lerp(shift, shift + self.norm(x), 1 + scale)))
        box = way < 0 and fault == "score_net_down_shortcut_averages_two_by_two"
        start = F.avg_pool2d(start, 2) if box else resize(start, way, (2, 3))
        return (x + (start if start.shape[1] == x.shape[1] else self.conv(start))) * 0.5**0.5

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor, augment_labels: Tensor) -> Tensor:
        self.at, self.rows = 0, iter(self.sheets)
        angle = torch.atan2(sigma, torch.full_like(sigma, SIGMA_DATA))
        turns = sigma.log()[:, None] / 4 * 1e-4 ** torch.linspace(0, 1, NOISE // 2, dtype=x.dtype)
        if self.fault == "score_net_augment_labels_dropped_in_evaluation" and not self.training:
            augment_labels = 0 * augment_labels
        given = [class_labels * CLASSES**0.5, torch.ones_like(sigma)[:, None], augment_labels]
        code = torch.cat([turns.sin(), turns.cos()], 1) + torch.cat(given, 1) @ self.front.T
        for rows in self.mids:
            code = F.silu(F.linear(code, rows[:, :-1], rows[:, -1]))
        told, seen = F.linear(code, self.told[:, :-1], self.told[:, -1]), x
        cos, sin = (f(angle)[:, None, None, None] for f in (torch.cos, torch.sin))
        kept = [x := self.conv(x * cos / SIGMA_DATA)]
        spans = told.split([span for *_, span in self.plan], 1)
        for i, (name, way, _) in enumerate(self.plan):
            if i in (5, 6, 8, 9):
                x = torch.cat([x, kept.pop()], 1)
            x = self.block(x, spans[i], name, way)
            if i < 3:
                kept.append(x)
        return cos**2 * seen + SIGMA_DATA * sin * self.conv(F.silu(self.norm(x)))


SLOPES, DROPPED = ("input gradient", "weight gradient"), "an input dropped in eval"
right(task, "score_net_of_cells_with_channels_last", "a tree, split weights, another order", ScoreTree)
right(task, "score_net_of_packed_weights", "packed weights read in turn, windows, angles", PackedScore)
wrong(
    task,
    ScoreTree,
    score_net_noise_frequencies_stop_before_the_end=("a count off by one", "model.map_noise"),
    score_net_second_level_scales_without_the_one=("a term left out", "model.enc.4x6_block0"),
    score_net_second_middle_block_adds_without_the_half_root=("a factor left out", "model.dec.4x6_in1"),
    score_net_last_saved_map_is_joined_without_gradient=("detach", "model", SLOPES),
)
wrong(
    task,
    PackedScore,
    score_net_down_shortcut_averages_two_by_two=("another filter", "model.enc.4x6_down.skip"),
    score_net_augment_labels_dropped_in_evaluation=(DROPPED, ("model", "model.map_augment"), "eval"),
    score_net_up_block_carries_on_what_is_activated=("another shortcut", "model.dec.8x12_up"),
    score_net_last_block_takes_shift_before_scale=("swapped halves", "model.dec.8x12_block1"),
)
