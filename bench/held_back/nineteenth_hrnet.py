"""Two ports of a pose network: columns that give to all resolutions, and stacks of flat kernels."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import GRADIENTS
from bench.held_back import _nineteenth_hrnet as hrnet
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("nineteenth_hrnet", hrnet.PoseHighResolutionNet, hrnet.people, hrnet.joints_loss)


class Unit(nn.Module):
    """Convolutions of one input as one, with their norms."""

    def __init__(self, *pairs: nn.Sequential | tuple[nn.Module, ...]):
        super().__init__()
        (conv, norm, *_), norms = pairs[0], [pair[1] for pair in pairs]
        self.stride, self.edge, self.eps, self.rate = conv.stride, conv.padding, norm.eps, norm.momentum
        self.sizes, self.kernel = [len(x.bias) for x in norms], leaf(torch.cat([x[0].weight for x in pairs]))
        self.gain = leaf(torch.cat([x.weight for x in norms]))
        self.shift = leaf(torch.cat([x.bias for x in norms]))
        self.register_buffer("center", torch.cat([x.running_mean for x in norms]))
        self.register_buffer("spread", torch.cat([x.running_var for x in norms]))

    def forward(self, x: Tensor) -> Tensor:
        x, kept = F.conv2d(x, self.kernel, None, self.stride, self.edge), (self.center, self.spread)
        return F.batch_norm(x, *kept, self.gain, self.shift, self.training, self.rate, self.eps)


class Residual(nn.Module):
    """Units with ReLU between; the first one makes the way around as well where that is projected."""

    def __init__(self, block: nn.Module):
        super().__init__()
        (first, *rest), side = hrnet.convolved(block), getattr(block, "downsample", None)
        self.first, self.rest = Unit(first, *([side] if side else [])), nn.ModuleList(map(Unit, rest))

    def forward(self, x: Tensor) -> Tensor:
        y, *side = self.first(x).split(self.first.sizes, 1)
        for unit in self.rest:
            y = unit(F.relu(y))
        return F.relu(y + (side[0] if side else x))


class Column(nn.Module):
    """The blocks of one resolution, and what it gives to each resolution."""

    def __init__(self, module: hrnet.HighResolutionModule, own: int):
        super().__init__()
        ways = [row[own] for row in module.fuse_layers]
        above, below = ways[:own], ways[own + 1 :]
        self.blocks = nn.Sequential(*(Residual(block) for block in module.branches[own]))
        self.up = Unit(*above) if above else None
        self.down = Unit(*(way[0] for way in below)) if below else None
        self.further = nn.ModuleList(nn.Sequential(*(Unit(link) for link in way[1:])) for way in below)
        self.smooth, self.bent = False, False

    def risen(self, x: Tensor, times: int) -> Tensor:
        if self.smooth and times == 4:
            return F.interpolate(x, scale_factor=times, mode="bilinear", align_corners=False)
        return x.repeat_interleave(times, 2).repeat_interleave(times, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        given = [self.blocks(x)]
        if self.down is not None:
            for part, units in zip(self.down(given[0]).split(self.down.sizes, 1), self.further, strict=True):
                given.append(units(F.relu(part) if len(units) or self.bent else part))
        if self.up is not None:
            parts = self.up(given[0]).split(self.up.sizes, 1)
            given = [*(self.risen(part, 2 ** (len(parts) - i)) for i, part in enumerate(parts)), *given]
        return given


class PoseColumns(Port):
    """A trunk, rounds of exchange between columns, the mean places under the softmax of the heatmaps."""

    def take(self, model: hrnet.PoseHighResolutionNet) -> None:
        (near, (low,)), (_, _, (lowest,)), head = model.transition1, model.transition2, model.final_layer
        stem = [module for pair in hrnet.convolved(model) for module in (Unit(pair), nn.ReLU())]
        self.trunk = nn.Sequential(*stem, *(Residual(block) for block in model.layer1))
        self.entries, modules = nn.ModuleList(map(Unit, (near, low, lowest))), [*model.stage2, *model.stage3]
        columns = ([Column(x, i) for i in range(len(x.branches))] for x in modules)
        self.rounds = nn.ModuleList(map(nn.ModuleList, columns))
        self.weight, self.bias = leaf(head.weight.flatten(1).T), leaf(head.bias)
        self.rounds[1][0].bent = self.fault == "hrnet_high_to_middle_way_rectified_before_the_sum"
        self.rounds[2][2].smooth = self.fault == "hrnet_lowest_map_rises_bilinearly_in_the_last_exchange"

    def places(self, maps: Tensor) -> Tensor:
        corners = self.fault == "hrnet_soft_argmax_grid_from_corner_to_corner"
        ends = [(n, 1 if corners else 1 - 1 / n) for n in maps.shape[2:]]
        grid = torch.cartesian_prod(*(torch.linspace(-e, e, n, dtype=maps.dtype) for n, e in ends)).flip(1)
        if self.fault == "hrnet_coordinates_from_heatmaps_cut_off_the_graph":
            maps = maps.detach()
        return (hrnet.SHARPNESS * maps.flatten(2)).softmax(2) @ grid.to(maps)

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.trunk(images)
        maps = [F.relu(unit(x)) for unit in self.entries[:2]]
        for columns in self.rounds:
            if len(maps) < len(columns):
                maps.append(F.relu(self.entries[2](maps[-1])))
            given = [column(x) for column, x in zip(columns, maps, strict=True)]
            maps = [F.relu(torch.stack(parts).sum(0)) for parts in zip(*given, strict=True)]
        heatmaps = (maps[0].movedim(1, 3) @ self.weight + self.bias).movedim(3, 1)
        named = dict(zip(("high", "middle", "low"), maps, strict=True))
        return {"heatmaps": heatmaps, "coordinates": self.places(heatmaps)} | named


class PoseStacks(Port):
    """Maps [N, H, W, C] in products of windows; modules of one make share stacks of weights."""

    def take(self, model: hrnet.PoseHighResolutionNet) -> None:
        (near, (low,)), (_, _, (lowest,)) = model.transition1, model.transition2
        blocks = zip("sab", map(hrnet.convolved, (model, *model.layer1)), strict=True)
        single = [(f"{mark}{i}", *pair) for mark, pairs in blocks for i, pair in enumerate(pairs)]
        ends = ("near", *near), ("low", *low), ("lowest", *lowest), ("side", *model.layer1[0].downsample)
        rows = [(x,) for x in (*single, *ends, *hrnet.layers(model.stage2[0], "p"))]
        rows += zip(*(hrnet.layers(module, "q") for module in model.stage3), strict=True)
        self.index = {row[0][0]: (i, row[0][1].stride[0]) for i, row in enumerate(rows)}
        self.kernels = nn.ParameterList(pile(x[1].weight.permute(2, 3, 1, 0) for x in row) for row in rows)
        norms = [[x[2] for x in row] for row in rows]
        self.lines = nn.ParameterList(pile(torch.stack([x.weight, x.bias]) for x in row) for row in norms)
        for i, row in enumerate(norms):
            kept = torch.stack([torch.stack([x.running_mean, x.running_var]) for x in row])
            self.register_buffer(f"kept{i}", kept)
        self.head, self.offset = leaf(model.final_layer.weight[:, :, 0, 0]), leaf(model.final_layer.bias)

    def unit(self, name: str, x: Tensor, m: int = 0) -> Tensor:
        i, step = self.index[name]
        kept, (gain, shift) = getattr(self, f"kept{i}")[m], self.lines[i][m]
        same = self.fault == "hrnet_second_middle_block_ends_with_the_kernel_of_the_first" and name == "q1b"
        kernel = self.kernels[i][0 if same else m]
        far = self.fault == "hrnet_lowest_resolution_enters_with_edges_at_the_far_side" and name == "lowest"
        edges = (0, 1, 0, 1) if far else [len(kernel) // 2] * 4
        windows = F.pad(x, (0, 0, *edges)).unfold(1, len(kernel), step).unfold(2, len(kernel), step)
        x = torch.einsum("nhwcij,ijco->nhwo", windows, kernel)
        center, spread = kept
        if self.training:
            spread, center = torch.var_mean(x, (0, 1, 2), correction=0)
            with torch.no_grad():
                kept.lerp_(torch.stack([center, x.var((0, 1, 2))]), 0.1)
        root = (spread + 1e-5).rsqrt()
        bare = self.fault == "hrnet_projected_shortcut_folds_its_mean_without_the_gain" and name == "side"
        low = center * root if bare and not self.training else center * root * gain
        return torch.addcmul(shift - low, x, root * gain)

    def exchange(self, mark: str, maps: list[Tensor], m: int = 0) -> list[Tensor]:
        for j, x in enumerate(maps):
            y = self.unit(f"{mark}{j}a", x, m).relu()
            maps[j] = (x + self.unit(f"{mark}{j}b", y, m)).relu()
        here = self.fault == "hrnet_first_exchange_overwrites_a_map_still_to_be_read" and mark == "p"
        fused = maps if here else [*maps]
        for i in range(len(maps)):
            total = 0
            for j, x in enumerate(maps):
                for k in range(max(i - j, int(j > i))):
                    x = self.unit(f"{mark}{j}{i}{k}", x.relu() if k else x, m)
                times = 2 ** max(j - i, 0)
                x = x[:, :, None, :, None].expand(-1, -1, times, -1, times, -1)
                total = total + x.flatten(3, 4).flatten(1, 2)
            fused[i] = total.relu()
        return fused

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        x = self.unit("s1", self.unit("s0", images.movedim(1, 3)).relu()).relu()
        for mark in "ab":
            side = self.unit("side", x) if mark == "a" else x
            for i in range(3):
                x = self.unit(f"{mark}{i}", x.relu())
            x = (x + side).relu()
        maps = self.exchange("p", [self.unit("near", x).relu(), self.unit("low", x).relu()])
        maps.append(self.unit("lowest", maps[1]).relu())
        maps = self.exchange("q", self.exchange("q", maps), 1)
        heat = torch.einsum("nhwc,jc->njhw", maps[0], self.head) + self.offset[:, None, None]
        share = (hrnet.SHARPNESS * (heat - heat.amax((2, 3), keepdim=True))).exp()
        y, x = ((torch.arange(n).to(heat) + 0.5) * 2 / n - 1 for n in heat.shape[2:])
        sums = [torch.einsum("njhw,hw->nj", share, z) for z in torch.broadcast_tensors(x, y[:, None])]
        named = {name: z.movedim(3, 1) for name, z in zip(("high", "middle", "low"), maps, strict=True)}
        return {"heatmaps": heat, "coordinates": torch.stack(sums, 2) / share.sum((2, 3))[..., None]} | named


right(task, "hrnet_by_columns_that_give_to_all_resolutions", "fused convolutions", PoseColumns)
right(task, "hrnet_by_windows_and_stacks_of_kernels", "channels last, stacked weights", PoseStacks)
WAY, RISE = "stage3.0.fuse_layers.1.0", ("stage3.1.fuse_layers.0.2.2", "stage3.1.fuse_layers.0.2")
TOP, BLOCK, SIDE = ("soft_argmax", ""), "stage3.1.branches.1.0.conv2", "layer1.0.downsample.1"
wrong(
    task,
    PoseColumns,
    hrnet_high_to_middle_way_rectified_before_the_sum=("a ReLU too many", (WAY, WAY + ".0", "stage3.0")),
    hrnet_lowest_map_rises_bilinearly_in_the_last_exchange=("another interpolation", RISE),
    hrnet_soft_argmax_grid_from_corner_to_corner=("a grid of corners, not of centres", "soft_argmax"),
    hrnet_coordinates_from_heatmaps_cut_off_the_graph=("a detach too many", TOP, GRADIENTS),
)
wrong(
    task,
    PoseStacks,
    hrnet_first_exchange_overwrites_a_map_still_to_be_read=("an overwritten input", ("stage2.0", "stage2")),
    hrnet_lowest_resolution_enters_with_edges_at_the_far_side=("edges on one side", "transition2.2.0.0"),
    hrnet_second_middle_block_ends_with_the_kernel_of_the_first=("weights of another module", BLOCK),
    hrnet_projected_shortcut_folds_its_mean_without_the_gain=("a wrong fold", SIDE, "eval"),
)
