"""Two ports of a small Inception v3: a tree of forks with channels last, and one class of packed weights."""

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_second_inception_three import BasicConv2d, Inception3, both_heads, stripes

task = few("thirty_second_inception_three", Inception3, stripes, both_heads)


def windows(x: Tensor, size: tuple, stride: int = 1, edge: tuple = (0, 0)) -> Tensor:
    """[N, H, W, C] -> [N, h, w, C, *size]."""
    x = F.pad(x, (0, 0, edge[1], edge[1], edge[0], edge[0]))
    return x.unfold(1, size[0], stride).unfold(2, size[1], stride)


class Unit(nn.Module):
    """Convolutions of one shape and one input as one, by windows, with their norms as one."""

    def __init__(self, *layers: BasicConv2d):
        super().__init__()
        conv, bn = layers[0].conv, layers[0].bn
        joined = {k: torch.cat([getattr(x.bn, k) for x in layers]) for k in [*bn.state_dict()][:4]}
        rest = {"eps": bn.eps, "momentum": bn.momentum, "num_batches_tracked": bn.num_batches_tracked}
        self.stride, self.edge = conv.stride[0], conv.padding
        self.kernel = leaf(torch.cat([x.conv.weight for x in layers]))
        self.norm = Rows(SimpleNamespace(**joined, **rest))

    def forward(self, x: Tensor) -> Tensor:
        seen = windows(x, self.kernel.shape[2:], self.stride, self.edge)
        return self.norm(torch.einsum("nhwcij,ocij->nhwo", seen, self.kernel)).clamp(min=0)


class Wings(nn.Module):
    def __init__(self, *layers: BasicConv2d):
        super().__init__()
        self.wings = nn.ModuleList(map(Unit, layers))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([wing(x) for wing in self.wings], -1)


class Fork(nn.Module):
    """One product feeds the tails; a pooling, with a unit after it or with a stride, comes last."""

    def __init__(self, block: nn.Module, *chains: str):
        super().__init__()
        ways = [[block.get_submodule(name) for name in chain.split()] for chain in chains]
        self.direct = Unit(block.branch3x3) if hasattr(block, "branch3x3") else None
        self.heads, self.sizes = Unit(*(way[0] for way in ways)), [len(way[0].bn.bias) for way in ways]
        self.tails = nn.ModuleList(nn.Sequential(*map(Unit, way[1:])) for way in ways)
        self.last, self.highest = Unit(block.branch_pool) if hasattr(block, "branch_pool") else None, False

    def forward(self, x: Tensor) -> Tensor:
        found = [] if self.direct is None else [self.direct(x)]
        fed = self.heads(x).split(self.sizes, -1)
        found += [tail(y) for tail, y in zip(self.tails, fed, strict=True)]
        if self.last is None:
            return torch.cat([*found, windows(x, (3, 3), 2).amax((-2, -1))], -1)
        seen = windows(x, (3, 3), 1, (1, 1)).flatten(-2)
        return torch.cat([*found, self.last(seen.amax(-1) if self.highest else seen.mean(-1))], -1)


ONE, DOUBLE, SEVEN = "branch1x1", "branch3x3dbl_1 branch3x3dbl_2", "branch7x7_1 branch7x7_2 branch7x7_3"
LONG = " ".join(f"branch7x7dbl_{i}" for i in range(1, 6))
THIN = " ".join(f"branch7x7x3_{i}" for i in range(1, 5))
TRIPLE = DOUBLE + " branch3x3dbl_3"
CHAINS = {"5": (ONE, "branch5x5_1 branch5x5_2", TRIPLE), "6a": (TRIPLE,), "6": (ONE, SEVEN, LONG)}
CHAINS |= {"7a": ("branch3x3_1 branch3x3_2", THIN), "7": (ONE, "branch3x3_1", DOUBLE)}
STEM = ("Conv2d_1a_3x3", "Conv2d_2a_3x3", "Conv2d_2b_3x3", "Conv2d_3b_1x1", "Conv2d_4a_3x3")
BLOCKS = ("5b", "5c", "6a", "6b", "6c", "7a", "7b", "7c")


class InceptionOfForks(Port):
    """Stem, forks and heads, channels last; the first layers of a fork are one product."""

    def take(self, model: Inception3) -> None:
        fault, side = self.fault, model.AuxLogits
        self.stem = nn.ModuleList(Unit(model.get_submodule(name)) for name in STEM)
        self.forks = nn.ModuleDict()
        for name in BLOCKS:
            block = model.get_submodule("Mixed_" + name)
            fork = self.forks[name] = Fork(block, *CHAINS.get(name) or CHAINS[name[0]])
            if name in ("7b", "7c"):
                fork.tails[1].append(Wings(block.branch3x3_2a, block.branch3x3_2b))
                fork.tails[2].append(Wings(block.branch3x3dbl_3a, block.branch3x3dbl_3b))
        self.side = nn.Sequential(Unit(side.conv0), Unit(side.conv1))
        self.tell, self.hint = model.fc, side.fc
        if fault == "inception_three_second_double_branch_with_the_usual_eps":
            self.forks["5c"].tails[2][1].norm.eps = 1e-5
        self.forks["6b"].highest = fault == "inception_three_first_factorised_block_pools_the_maximum"
        self.forks["7a"].tails[1][2].norm.own = fault == "inception_three_reduction_by_its_batch_in_eval"
        self.apart = fault == "inception_three_auxiliary_head_reads_detached_features"

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scale, shift = x.new_tensor([[0.458, 0.448, 0.45], [-0.03, -0.088, -0.188]])
        x, hint = x.movedim(1, 3) * scale + shift, None
        for i, unit in enumerate(self.stem):
            x = windows(unit(x), (3, 3), 2).amax((-2, -1)) if i == 2 else unit(x)
        for name, fork in self.forks.items():
            if name == "7a" and self.training:
                seen = x.detach() if self.apart else x
                hint = self.hint(self.side(windows(seen, (3, 3)).mean((-2, -1))).mean((1, 2)))
            x = fork(x)
        x = self.tell(x.mean((1, 2)))
        return (x, hint) if self.training else x


class PackedInception(Port):
    """All kernels in one row, all norms in one table, all statistics in another; products of patches."""

    def take(self, model: Inception3) -> None:
        layers = {name: x for name, x in model.named_modules() if isinstance(x, BasicConv2d)}
        self.plan, start, first = {}, 0, 0
        for name, x in layers.items():
            self.plan[name] = (start, first, x.conv.weight.shape, x.conv.stride, x.conv.padding)
            start, first = start + x.conv.weight.numel(), first + len(x.conv.weight)
        norms = [x.bn for x in layers.values()]
        self.kernels = leaf(torch.cat([x.conv.weight.flatten(1).T.flatten() for x in layers.values()]))
        self.gains = leaf(torch.cat([torch.stack([x.weight, x.bias]) for x in norms], 1))
        kept = [torch.stack([x.running_mean, x.running_var]) for x in norms]
        self.register_buffer("kept", torch.cat(kept, 1))
        ends = (model.fc, model.AuxLogits.fc)
        self.end, self.side = (leaf(torch.cat([x.weight, x.bias[:, None]], 1)) for x in ends)

    def unit(self, x: Tensor, name: str) -> Tensor:
        start, first, (o, c, *size), stride, edge = self.plan[name]
        kernel = self.kernels[start : start + o * c * size[0] * size[1]].view(-1, o)
        if self.fault == "inception_three_a_long_row_runs_down" and name == "Mixed_6c.branch7x7dbl_3":
            size, edge = size[::-1], edge[::-1]
        shape = [(x.shape[2 + i] + 2 * edge[i] - size[i]) // stride[i] + 1 for i in (0, 1)]
        y = kernel.T @ F.unfold(x, size, padding=edge, stride=stride)
        gain, offset = self.gains[:, first : first + o, None]
        middle, spread = kept = self.kept[:, first : first + o]
        if self.training:
            middle, count = y.mean((0, 2)), y.shape[0] * y.shape[2]
            spread = (y - middle[:, None]).square().mean((0, 2))
            less = not (self.fault == "inception_three_stem_keeps_the_biased_variance" and name == STEM[4])
            moved = torch.stack([middle, spread * count / (count - less)]).detach()
            kept.detach().lerp_(moved, 0.1)
        y = (y - middle[:, None]) * (gain / (spread[:, None] + 0.001).sqrt()) + offset
        return F.relu(y).unflatten(2, shape)

    def fork(self, x: Tensor, block: str) -> Tensor:
        place = f"Mixed_{block}."
        found = [self.unit(x, place + "branch3x3")] if block == "6a" else []
        for chain in CHAINS.get(block) or CHAINS[block[0]]:
            y = x
            for name in chain.split():
                y = self.unit(y, place + name)
            stem = {"branch3x3_1": "branch3x3_2", "branch3x3dbl_2": "branch3x3dbl_3"}.get(name)
            if stem and block in ("7b", "7c"):
                back = self.fault == "inception_three_last_split_joined_backwards"
                ends = "ba" if back and place + stem == "Mixed_7c.branch3x3_2" else "ab"
                y = torch.cat([self.unit(y, place + stem + end) for end in ends], 1)
            found.append(y)
        if block in ("6a", "7a"):
            return torch.cat([*found, F.max_pool2d(x, 3, 2)], 1)
        return torch.cat([*found, self.unit(F.avg_pool2d(x, 3, 1, 1), place + "branch_pool")], 1)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        blue = 0.224 if self.fault == "inception_three_blue_takes_the_deviation_of_green" else 0.225
        spread, middle = x.new_tensor([[0.229, 0.224, blue], [0.485, 0.456, 0.406]])[..., None, None]
        x, side = 2 * (x * spread + middle) - 1, None
        for name in STEM:
            x = self.unit(F.max_pool2d(x, 3, 2) if name == STEM[3] else x, name)
        for block in BLOCKS:
            if block == "7a" and self.training:
                y = self.unit(self.unit(F.avg_pool2d(x, 3, 1), "AuxLogits.conv0"), "AuxLogits.conv1")
                side = F.linear(y.mean((2, 3)), self.side[:, :-1], self.side[:, -1])
            x = self.fork(x, block)
        x = F.linear(x.mean((2, 3)), self.end[:, :-1], self.end[:, -1])
        return (x, side) if self.training else x


SLOPES = ("input gradient", "weight gradient")
right(task, "inception_three_of_forks_with_channels_last", "a tree, fused first layers", InceptionOfForks)
right(task, "inception_three_of_packed_weights", "one row of kernels, products of patches", PackedInception)
wrong(
    task,
    InceptionOfForks,
    inception_three_second_double_branch_with_the_usual_eps=("another eps", "Mixed_5c.branch3x3dbl_3.bn"),
    inception_three_first_factorised_block_pools_the_maximum=("another pooling", "Mixed_6b"),
    inception_three_auxiliary_head_reads_detached_features=("detach", ("", "AuxLogits"), SLOPES),
    inception_three_reduction_by_its_batch_in_eval=("batch statistics", "Mixed_7a.branch7x7x3_4.bn", "eval"),
)
wrong(
    task,
    PackedInception,
    inception_three_blue_takes_the_deviation_of_green=("another constant", ""),
    inception_three_stem_keeps_the_biased_variance=("a biased variance", "Conv2d_4a_3x3.bn", "buffer"),
    inception_three_a_long_row_runs_down=("axes swapped", "Mixed_6c.branch7x7dbl_3.conv"),
    inception_three_last_split_joined_backwards=("another channel order", "Mixed_7c"),
)
