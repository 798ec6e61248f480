"""Two ports of a small RegNetY: a tree of units with the channels last, and one class of sheets."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_fifth_regnet import GROUP_WIDTH, RegNet, gratings

task = few("twenty_fifth_regnet", RegNet, gratings, F.cross_entropy)


def windows(x: Tensor, stride: int, edges: tuple[int, ...] = (1, 1, 1, 1)) -> Tensor:
    """[N, H, W, C] -> [N, H', W', C, 3, 3]."""
    return F.pad(x, (0, 0, *edges)).unfold(1, 3, stride).unfold(2, 3, stride)


class Front(nn.Module):
    """The first convolution; ``late`` puts all of its padding below and to the right."""

    def __init__(self, stem: nn.Sequential):
        super().__init__()
        self.weight, self.level, self.late = leaf(stem[0].weight.permute(1, 2, 3, 0)), Rows(stem[1]), False

    def forward(self, x: Tensor) -> Tensor:
        seen = windows(x, 2, (0, 1, 0, 1) if self.late else (1, 1, 1, 1))
        return self.level(torch.tensordot(seen, self.weight, 3)).relu()


class Fan(nn.Module):
    """Both products of a block's input, its own and its shortcut's, by one matrix."""

    def __init__(self, block: nn.Module):
        super().__init__()
        first, side = block.f.a, block.proj
        rows = [first[0].weight] if side is None else [first[0].weight, side[0].weight]
        self.weight, self.level = leaf(torch.cat(rows).flatten(1).T), Rows(first[1])
        self.side, self.stride = None if side is None else Rows(side[1]), block.f.b[0].stride[0]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x @ self.weight
        if self.side is None:
            return self.level(y).relu(), x
        own, kept = y.chunk(2, -1)
        return self.level(own).relu(), self.side(kept[:, :: self.stride, :: self.stride])


class Middle(nn.Module):
    """The convolution in groups, and the gates of its channels; ``blind`` pools without a gradient."""

    def __init__(self, f: nn.Sequential):
        super().__init__()
        conv, se = f.b[0], f.se
        self.weight, self.stride = leaf(conv.weight.unflatten(0, (conv.groups, -1))), conv.stride[0]
        self.level, self.blind = Rows(f.b[1]), False
        self.down, self.up = leaf(se.fc1.weight.flatten(1).T), leaf(se.fc2.weight.flatten(1).T)
        self.low, self.high = leaf(se.fc1.bias), leaf(se.fc2.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = windows(x, self.stride).unflatten(3, (len(self.weight), -1))
        y = self.level(torch.einsum("nhwgqij,goqij->nhwgo", seen, self.weight).flatten(3)).relu()
        pooled = y.detach().mean((1, 2)) if self.blind else y.mean((1, 2))
        gate = (pooled @ self.down + self.low).relu() @ self.up + self.high
        return y, (0.5 + 0.5 * torch.tanh(gate / 2))[:, None, None]


class Close(nn.Module):
    """The last product, and the sum; ``tardy`` gates what comes out of it and not what goes in."""

    def __init__(self, last: nn.Sequential):
        super().__init__()
        self.weight, self.level, self.tardy = leaf(last[0].weight.flatten(1).T), Rows(last[1]), False

    def forward(self, y: Tensor, gate: Tensor, kept: Tensor) -> Tensor:
        y = self.level(y @ self.weight) * gate if self.tardy else self.level((y * gate) @ self.weight)
        return (y + kept).relu()


class RegNetOfUnits(Port):
    """Units of a fan, a middle and a close, channels last; the gates are applied by the close."""

    def take(self, model: RegNet) -> None:
        blocks = [block for stage in model.trunk_output for block in stage]
        self.units = nn.ModuleList(
            nn.ModuleDict({"fan": Fan(x), "middle": Middle(x.f), "close": Close(x.f.c)}) for x in blocks
        )
        self.front, self.answer, self.prior = Front(model.stem), leaf(model.fc.weight.T), leaf(model.fc.bias)
        self.front.late = self.fault == "regnet_stem_padded_below_and_right_only"
        self.units[1]["close"].tardy = self.fault == "regnet_second_block_squeezes_after_its_last_convolution"
        self.units[4]["middle"].blind = self.fault == "regnet_fifth_squeeze_pools_without_gradient"
        if self.fault == "regnet_last_grouped_norm_takes_its_momentum_the_other_way":
            self.units[5]["middle"].level.rate = 1 - model.stem[1].momentum

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x.movedim(1, 3))
        for unit in self.units:
            own, kept = unit["fan"](x)
            x = unit["close"](*unit["middle"](own), kept)
        return x.mean((1, 2)) @ self.answer + self.prior


def sheet(*columns: Tensor) -> nn.Parameter:
    """A row for each channel of all that belongs to it."""
    return leaf(torch.cat([x.reshape(len(x), -1) for x in columns], 1))


class RegNetOfSheets(Port):
    """A sheet a block, [C, N, H, W] inside, taps of block-diagonal matrices, gates in the last product."""

    def take(self, model: RegNet) -> None:
        blocks = [block for stage in model.trunk_output for block in stage]
        self.stem, self.head = sheet(*model.stem.parameters()), sheet(*model.fc.parameters())
        self.low = leaf(torch.cat([x.f.se.fc1.bias for x in blocks]))
        norms, self.sheets, self.plan = [model.stem[1]], nn.ParameterList(), []
        for block in blocks:
            f, side = block.f, [] if block.proj is None else [block.proj]
            pairs = [f.a, f.b, f.c, *side]
            norms += [pair[1] for pair in pairs]
            squeeze = (f.se.fc1.weight.transpose(0, 1), f.se.fc2.weight, f.se.fc2.bias)
            ends = [x for pair in pairs for x in pair[1].parameters()]
            self.sheets.append(sheet(*squeeze, *ends, *(pair[0].weight for pair in pairs)))
            self.plan.append((f.a[0].in_channels, f.se.fc1.out_channels, f.b[0].stride[0], len(side)))
        self.sizes = [x.num_features for x in norms]
        self.register_buffer("moments", torch.cat([torch.stack([*x.buffers()][:2]) for x in norms], 1))
        self.register_buffer("seen", torch.stack([x.num_batches_tracked for x in norms]))

    def norm(self, k: int, x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
        """The norm of that number over all but the first axis."""
        center, spread = kept = self.moments.split(self.sizes, 1)[k]
        eps = 1e-3 if self.fault == "regnet_last_norm_adds_a_larger_epsilon" and k == 21 else 1e-5
        if self.training:
            rows = x.flatten(1)
            with torch.no_grad():
                kept.mul_(0.9).add_(0.1 * torch.stack([rows.mean(1), rows.var(1)]))
                self.seen[k] += 1
            center, spread = rows.mean(1), rows.var(1, correction=0)
            if self.fault == "regnet_first_shortcut_norm_holds_its_statistics_constant" and k == 4:
                center, spread = center.detach(), spread.detach()
        scale = gain * (spread + eps).rsqrt()[:, None]
        return x * scale[..., None, None] + (offset - center[:, None] * scale)[..., None, None]

    def taps(self, x: Tensor, rows: Tensor, groups: int, stride: int, dealt: bool = False) -> Tensor:
        """A 3x3 convolution with a row for each output, as the sum of nine products without groups."""
        kernel = rows.view(groups, -1, 1, len(x) // groups, 9)
        kernel = kernel * torch.eye(groups).to(rows)[:, None, :, None, None]
        kernel = (kernel.transpose(2, 3) if dealt else kernel).flatten(2, 3).flatten(0, 1)
        high, wide = (stride * ((length - 1) // stride) + 1 for length in x.shape[2:])
        x, total = F.pad(x, (1, 1, 1, 1)), 0
        for t in range(9):
            i, j = divmod(t, 3)
            cut = x[:, :, i : i + high : stride, j : j + wide : stride]
            total = total + torch.tensordot(kernel[..., t], cut, 1)
        return total

    def forward(self, x: Tensor) -> Tensor:
        kernel, *ends = self.stem.split([self.stem.shape[1] - 2, 1, 1], 1)
        x = self.norm(0, self.taps(x.transpose(0, 1), kernel, 1, 2), *ends).relu()
        k, lows = 1, self.low[:, None].split([narrow for _, narrow, _, _ in self.plan])
        for number, rows in enumerate(self.sheets):
            (given, narrow, stride, side), width = self.plan[number], len(rows)
            count, groups = 6 + 2 * side, width // GROUP_WIDTH
            sizes = [narrow, narrow, 1, *[1] * count, given, 9 * GROUP_WIDTH, width, *[given] * side]
            down, up, high, *rest = rows.split(sizes, 1)
            ends, (a, b, c, *other) = rest[:count], rest[count:]
            y = self.norm(k, torch.tensordot(a, x, 1), *ends[:2]).relu()
            dealt = self.fault == "regnet_third_block_deals_its_channels_out_to_the_groups" and number == 2
            y = self.norm(k + 1, self.taps(y, b, groups, stride, dealt), *ends[2:4]).relu()
            gate = (up @ (down.T @ y.mean((2, 3)) + lows[number]).clamp(min=0) + high).sigmoid()
            y = self.norm(k + 2, torch.einsum("oc,cn,cnhw->onhw", c, gate, y), *ends[4:6])
            if side:
                kept = x[:, :, ::stride, ::stride]
                if self.fault == "regnet_third_stage_shortcut_averages_its_pixels" and number == 3:
                    kept = F.avg_pool2d(x, stride, ceil_mode=True, count_include_pad=False)
                x = self.norm(k + 3, torch.tensordot(other[0], kept, 1), *ends[6:])
            x, k = F.relu(x + y), k + 3 + side
        return x.mean((2, 3)).T @ self.head[:, :-1].T + self.head[:, -1]


SLOPES, at = ("input gradient", "weight gradient"), "trunk_output.block{0}.block{0}-{1}.{2}".format
POOLS, TURNED, STILL = (at(3, 1, "f.se"), at(3, 1, "f.se.avgpool")), "momentum of one minus it", "no gradient"
right(task, "regnet_of_units_with_channels_last", "a tree, joined products, later gates", RegNetOfUnits)
right(task, "regnet_of_sheets_of_weights", "packed sheets, taps, block-diagonal kernels", RegNetOfSheets)
wrong(
    task,
    RegNetOfUnits,
    regnet_stem_padded_below_and_right_only=("another framework's padding", "stem.0"),
    regnet_second_block_squeezes_after_its_last_convolution=("another order", at(2, 0, "f")),
    regnet_fifth_squeeze_pools_without_gradient=("detach", POOLS, SLOPES),
    regnet_last_grouped_norm_takes_its_momentum_the_other_way=(TURNED, at(4, 0, "f.b.1"), "buffer"),
)
wrong(
    task,
    RegNetOfSheets,
    regnet_first_shortcut_norm_holds_its_statistics_constant=(STILL, at(1, 0, "proj.1"), SLOPES),
    regnet_third_block_deals_its_channels_out_to_the_groups=("interleaved groups", at(2, 1, "f.b.0")),
    regnet_third_stage_shortcut_averages_its_pixels=("a pool for a stride", at(3, 0, "proj.0")),
    regnet_last_norm_adds_a_larger_epsilon=("another epsilon", at(4, 0, "f.c.1")),
)
