"""Two ports of a small SlowFast: a pathway after the other with channels last, and one flat class."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_third_slow_fast import ALPHA, SlowFast, classes_at_positions, clips
from bench.held_back._fourth_ports import Port, Rows, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_third_slow_fast", SlowFast, clips, classes_at_positions)


class Sweep(nn.Module):
    """A convolution of [N, T, H, W, C] by windows, and its norm; ``roll`` turns the channels that come in."""

    def __init__(self, layer: nn.Conv3d, norm: nn.Module, roll: int = 0):
        super().__init__()
        self.kernel = leaf(layer.weight.roll(roll, 1).permute(1, 2, 3, 4, 0))
        self.norm, self.strides = Rows(norm), layer.stride

    def forward(self, x: Tensor) -> Tensor:
        sizes = self.kernel.shape[1:4]
        x = F.pad(x, (0, 0, *(edge // 2 for size in reversed(sizes) for edge in (size, size))))
        for axis, (size, stride) in enumerate(zip(sizes, self.strides, strict=True), 1):
            x = x.unfold(axis, size, stride)
        return self.norm(torch.tensordot(x, self.kernel, 4))


class Entry(nn.Module):
    def __init__(self, stem: nn.Module):
        super().__init__()
        self.sweep, self.average = Sweep(stem.conv, stem.bn), False

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(self.sweep(x).relu(), (0, 0, 1, 1, 1, 1)).unfold(2, 3, 2).unfold(3, 3, 2)
        return x.mean((-1, -2)) if self.average else x.amax((-1, -2))


class Unit(nn.Module):
    def __init__(self, block: nn.Module, roll: int = 0):
        super().__init__()
        inner = block.branch2
        self.short = nn.Identity()
        if hasattr(block, "branch1"):
            self.short = Sweep(block.branch1, block.branch1_bn, roll)
        first, second = Sweep(inner.a, inner.a_bn, roll), Sweep(inner.b, inner.b_bn)
        self.long = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), Sweep(inner.c, inner.c_bn))
        self.early = False

    def forward(self, x: Tensor) -> Tensor:
        if self.early:
            return self.short(x) + self.long(x).relu()
        return (self.long(x) + self.short(x)).relu()


class Path(nn.Module):
    """One pathway: it joins what comes from the side before its own channels, and tells what it had there."""

    def __init__(self, model: nn.Module, p: int):
        super().__init__()
        self.entry, rolls = Entry(model.s1.get_submodule(f"pathway{p}_stem")), (0, 0)
        if p == 0:
            rolls = [len(fuse.bn.weight) for fuse in (model.s1_fuse, model.s2_fuse)]
        self.groups = nn.ModuleList()
        for stage, roll in zip((model.s2, model.s3), rolls, strict=True):
            blocks = [stage.get_submodule(f"pathway{p}_res{i}") for i in (0, 1)]
            self.groups.append(nn.Sequential(Unit(blocks[0], roll), Unit(blocks[1])))

    def forward(self, x: Tensor, side: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
        x, seen = self.entry(x), []
        for i, group in enumerate(self.groups):
            seen.append(x)
            x = group(torch.cat([side[i], x], -1) if side else x)
        return x, seen


class PathAfterPath(Port):
    def take(self, model: nn.Module) -> None:
        self.quick, self.calm = Path(model, 1), Path(model, 0)
        self.bridges = nn.ModuleList(Sweep(f.conv_f2s, f.bn) for f in (model.s1_fuse, model.s2_fuse))
        last, width = model.head.projection, model.s3.pathway0_res1.branch2.c.out_channels
        self.for_calm, self.for_quick = leaf(last.weight[:, :width].T), leaf(last.weight[:, width:].T)
        self.offset = leaf(last.bias)
        self.quick.entry.average = self.fault == "slow_fast_fast_stem_pools_by_averages"
        self.calm.groups[1][1].early = self.fault == "slow_fast_last_slow_block_adds_after_its_relu"

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, -1)
        fast, seen = self.quick(x, [])
        if self.fault == "slow_fast_second_fusion_sends_no_gradient_to_the_fast_pathway":
            seen[1] = seen[1].detach()
        side = [bridge(y).relu() for bridge, y in zip(self.bridges, seen, strict=True)]
        slow, _ = self.calm(x[:, ::ALPHA], side)
        y = slow.mean(1) @ self.for_calm + fast.mean(1) @ self.for_quick + self.offset
        y = y.unfold(1, 2, 1).unfold(2, 2, 1).mean((-1, -2)).flatten(1, 2)
        if self.training:
            return y.flatten(1)
        if self.fault == "slow_fast_softmax_of_the_mean_of_positions_in_evaluation":
            return y.mean(1).softmax(1)
        return y.softmax(2).mean(1)


class FlatSlowFast(Port):
    """Each convolution and its norm are rows of one matrix: kernel, gain, offset; all kept in one table."""

    def take(self, model: nn.Module) -> None:
        self.shapes, self.places, rows, means, variances, at = {}, {}, {}, [], [], 0
        modules = dict(model.named_modules())
        for name, layer in modules.items():
            if isinstance(layer, nn.Conv3d):
                parent, _, own = name.rpartition(".")
                norm = modules[f"{parent}." + (own + "_bn" if f"{parent}.{own}_bn" in modules else "bn")]
                weight = layer.weight
                if self.fault == "slow_fast_last_slow_block_reads_time_backwards":
                    weight = weight.flip(2) if name == "s3.pathway0_res1.branch2.a" else weight
                rows[name] = torch.cat([weight.flatten(1), norm.weight[:, None], norm.bias[:, None]], 1)
                self.shapes[name], self.places[name] = weight.shape[1:], slice(at, at + len(weight))
                means, variances = [*means, norm.running_mean], [*variances, norm.running_var]
                at += len(weight)
        self.w = nn.ParameterDict({name.replace(".", "-"): leaf(value) for name, value in rows.items()})
        self.register_buffer("kept", torch.stack([torch.cat(means), torch.cat(variances)]))
        self.register_buffer("count", model.s1_fuse.bn.num_batches_tracked.clone())
        self.ask = leaf(torch.cat([model.head.projection.weight, model.head.projection.bias[:, None]], 1))

    def layer(self, name: str, x: Tensor, stride: int = 1, skip: int = 1) -> Tensor:
        """A convolution of [N, T, C, H, W], as a sum of those of its frames, and the norm."""
        rows, shape, n = self.w[name.replace(".", "-")], self.shapes[name], len(x)
        kernel, times, size = rows[:, :-2].unflatten(1, shape), shape[1], shape[2]
        late = 1 if (self.fault, name) == ("slow_fast_first_fusion_a_frame_late", "s1_fuse.conv_f2s") else 0
        x = F.pad(x, (0, 0, 0, 0, 0, 0, times // 2 - late, times // 2 + late))
        length, total = x.shape[1] - times + 1, 0
        for k in range(times):
            frames = x[:, k : k + length : skip].flatten(0, 1)
            total = total + F.conv2d(frames, kernel[:, :, k], stride=stride, padding=size // 2)
        return self.normed(name, total, rows[:, -2:]).unflatten(0, (n, -1))

    def normed(self, name: str, x: Tensor, rows: Tensor) -> Tensor:
        kept = self.kept[:, self.places[name]]
        mean, variance, eps = *kept.unbind(), 1e-5
        if self.training:
            variance, mean = torch.var_mean(x, (0, 2, 3), correction=0)
            if (self.fault, name) == (CONSTANT, "s3.pathway1_res0.branch1"):
                mean, variance = mean.detach(), variance.detach()
            count = x[:, 0].numel()
            with torch.no_grad():
                kept.lerp_(torch.stack([mean, variance * count / (count - 1)]), 0.1)
        if (self.fault, name) == ("slow_fast_slow_stem_norm_with_a_larger_epsilon", "s1.pathway0_stem.conv"):
            eps = 1e-3
        scale = rows[:, 0] / (variance + eps).sqrt()
        return x * scale[:, None, None] + (rows[:, 1] - mean * scale)[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        self.count += int(self.training)
        paths = [x[:, ::ALPHA], x]
        for p in (0, 1):
            y = self.layer(f"s1.pathway{p}_stem.conv", paths[p], 2)
            paths[p] = F.max_pool2d(y.flatten(0, 1), 3, 2, 1).relu().unflatten(0, y.shape[:2])
        for s in (2, 3):
            more = self.layer(f"s{s - 1}_fuse.conv_f2s", paths[1], skip=ALPHA).relu()
            paths[0] = torch.cat([paths[0], more], 2)
            for p, i in ((0, 0), (0, 1), (1, 0), (1, 1)):
                y, name, stride = paths[p], f"s{s}.pathway{p}_res{i}", s - 1 if i == 0 else 1
                short = self.layer(f"{name}.branch1", y, stride) if i == 0 else y
                y = self.layer(f"{name}.branch2.b", self.layer(f"{name}.branch2.a", y).relu(), stride)
                paths[p] = (short + self.layer(f"{name}.branch2.c", y.relu())).relu()
        pooled = torch.cat([F.avg_pool2d(y.mean(1), 2, 1) for y in paths], 1).flatten(2)
        y = pooled.transpose(1, 2) @ self.ask[:, :-1].T + self.ask[:, -1]
        return y.flatten(1) if self.training else y.softmax(2).mean(1)


SLOPES = ("input gradient", "weight gradient")
CONSTANT = "slow_fast_shortcut_norm_of_constants"
right(task, "slow_fast_path_after_path", "a tree, channels last, windows, rolled channels", PathAfterPath)
right(task, "slow_fast_of_packed_rows", "flat, packed rows, sums of frames", FlatSlowFast)
wrong(
    task,
    PathAfterPath,
    slow_fast_fast_stem_pools_by_averages=("another pool", "s1.pathway1_stem.pool_layer"),
    slow_fast_second_fusion_sends_no_gradient_to_the_fast_pathway=("detach", "s2_fuse", SLOPES),
    slow_fast_last_slow_block_adds_after_its_relu=("another order", "s3.pathway0_res1"),
    slow_fast_softmax_of_the_mean_of_positions_in_evaluation=("another order in eval", "head", "eval"),
)
wrong(
    task,
    FlatSlowFast,
    slow_fast_slow_stem_norm_with_a_larger_epsilon=("another epsilon", "s1.pathway0_stem.bn"),
    slow_fast_first_fusion_a_frame_late=("an offset in time", "s1_fuse.conv_f2s"),
    slow_fast_last_slow_block_reads_time_backwards=("a flipped kernel", "s3.pathway0_res1.branch2.a"),
    slow_fast_shortcut_norm_of_constants=("detach", "s3.pathway1_res0.branch1_bn", SLOPES),
)
