"""Two ports of a small ResNeSt: a tree of branches with channels last, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import picked, right
from bench.held_back._forty_third_resnest import ResNeSt, smoothed, stripes
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_third_resnest", ResNeSt, stripes, smoothed)


def windows(x: Tensor, size: int, stride: int) -> Tensor:
    """[N, H, W, C] -> [N, H', W', C, size, size]."""
    return x.unfold(1, size, stride).unfold(2, size, stride)


class Unit(nn.Module):
    """A convolution of [N, H, W, C], by groups, and its norm."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, weights: tuple[Tensor, ...] = ()):
        super().__init__()
        self.kernels, self.norm, self.stride = pile(weights or [conv.weight]), Rows(norm), conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        shares = zip(x.chunk(len(self.kernels), -1), self.kernels, strict=True)
        return self.norm(torch.cat([spatial(share, w, stride=self.stride) for share, w in shares], -1))


class Vote(nn.Module):
    """How much of each channel comes of the first branch: two softmax weights are a logistic function."""

    def __init__(self, split: nn.Module):
        super().__init__()
        self.down, self.up = (pile(x.weight.flatten(1).chunk(2)) for x in (split.fc1, split.fc2))
        self.low, self.high, self.norm = leaf(split.fc1.bias), leaf(split.fc2.bias), split.bn1

    def forward(self, x: Tensor) -> Tensor:
        x = torch.einsum("ngi,goi->ngo", x.unflatten(1, (2, -1)), self.down).flatten(1)
        x = self.norm(x + self.low).relu().unflatten(1, (2, -1))
        x = torch.einsum("ngi,goi->ngo", x, self.up).flatten(1) + self.high
        return (-x.unflatten(1, (2, 2, -1)).diff(dim=2)).sigmoid().flatten(1)


class Shrunk(nn.Module):
    def __init__(self, layers: nn.Sequential):
        super().__init__()
        self.unit, self.stride, self.full = Unit(layers[1], layers[2]), layers[0].stride, False

    def forward(self, x: Tensor) -> Tensor:
        high, wide = (-length % self.stride for length in x.shape[1:3])
        grown, there = (F.pad(y, (0, 0, 0, wide, 0, high)) for y in (x, torch.ones_like(x)))
        total, count = (windows(y, self.stride, self.stride).sum((-2, -1)) for y in (grown, there))
        return self.unit(total / (self.stride**2 if self.full else count))


class Block(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        split, half = block.conv2, torch.arange(len(block.conv2.bn0.weight)).chunk(2)
        self.enter, self.leave = Unit(block.conv1, block.bn1), Unit(block.conv3, block.bn3)
        parts = ((picked(split.bn0, index), split.conv.weight[index].chunk(2)) for index in half)
        self.branches = nn.ModuleList(Unit(split.conv, *part) for part in parts)
        self.vote, self.stride = Vote(split), block.avd_layer.stride if block.avd else 0
        self.around = nn.Identity() if block.downsample is None else Shrunk(block.downsample)
        self.share, self.silent = 1, False

    def forward(self, x: Tensor) -> Tensor:
        shares = self.enter(x).relu().chunk(2, -1)
        one, two = (branch(share).relu() for branch, share in zip(self.branches, shares, strict=True))
        part = self.vote((one + two).mean((1, 2)) * self.share)[:, None, None]
        y = two + (part.detach() if self.silent else part) * (one - two)
        if self.stride:
            y = windows(F.pad(y, (0, 0, 1, 1, 1, 1)), 3, self.stride).mean((-2, -1))
        return (self.leave(y) + self.around(x)).relu()


class ResNestOfBranches(Port):
    """Units and blocks with the channels last; each split is a branch of its own."""

    def take(self, model: ResNeSt) -> None:
        stem, fault = model.conv1, self.fault
        pairs = (stem[0], stem[1]), (stem[3], stem[4]), (stem[6], model.bn1)
        self.stem = nn.ModuleList(Unit(*pair) for pair in pairs)
        self.blocks = nn.Sequential(*map(Block, (*model.layer1, *model.layer2)))
        self.matrix, self.offset = leaf(model.fc.weight.T), leaf(model.fc.bias)
        self.stem[1].norm.own = fault == "resnest_stem_second_norm_of_the_batch_in_evaluation"
        self.blocks[0].share = 0.5 if fault == "resnest_first_attention_pools_the_mean_of_the_splits" else 1
        self.blocks[2].around.full = fault == "resnest_shortcut_pool_counts_what_lies_beyond_the_edge"
        self.blocks[3].silent = fault == "resnest_last_attention_weighs_without_gradient"

    def forward(self, x: Tensor) -> Tensor:
        x = x.movedim(1, 3)
        for unit in self.stem:
            x = unit(x).relu()
        x = windows(F.pad(x, (0, 0, 1, 1, 1, 1)), 3, 2).amax((-2, -1))
        return self.blocks(x).mean((1, 2)) @ self.matrix + self.offset


def affine(layer: nn.Conv2d) -> Tensor:
    """Products by groups with their offsets as a last column: [groups, out, in + 1]."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1).unflatten(0, (2, -1))


class PackedResNest(Port):
    """All norms in two vectors, weights stacked by layer; convolutions are products of patches."""

    def take(self, model: ResNeSt) -> None:
        norms = {k: v for k, v in model.named_modules() if isinstance(v, nn.BatchNorm2d)}
        self.slices, end = {}, 0
        for name, norm in norms.items():
            self.slices[name] = slice(end, end := end + len(norm.weight))
        ends = ("weight", "bias", "running_mean", "running_var")
        gain, shift, mean, var = (torch.cat([getattr(x, k) for x in norms.values()]) for k in ends)
        self.gain, self.shift = leaf(gain), leaf(shift)
        self.register_buffer("mean", mean)
        self.register_buffer("var", var)
        stages = [list(model.layer1), list(model.layer2)]
        self.stem = nn.ParameterList(leaf(model.conv1[i].weight.flatten(1)[None]) for i in (0, 3, 6))
        self.thin = nn.ParameterList(leaf(x.conv1.weight[:, :, 0, 0]) for s in stages for x in s)
        self.side = nn.ParameterList(leaf(s[0].downsample[1].weight[:, :, 0, 0]) for s in stages)
        splits, weights = [[x.conv2 for x in s] for s in stages], nn.ParameterList
        self.cross = weights(pile(x.conv.weight.flatten(1).unflatten(0, (4, -1)) for x in s) for s in splits)
        self.wide = weights(pile(x.conv3.weight[:, :, 0, 0] for x in s) for s in stages)
        self.ask = weights(pile(affine(x.fc1) for x in s) for s in splits)
        self.tell = weights(pile(affine(x.fc2) for x in s) for s in splits)
        self.pairs = weights(pile(torch.stack([x.bn1.weight, x.bn1.bias]) for x in s) for s in splits)
        self.last = leaf(torch.cat([model.fc.weight, model.fc.bias[:, None]], 1))

    def norm(self, x: Tensor, name: str, eps: float = 1e-5) -> Tensor:
        at = self.slices[name]
        mean, var = self.mean[at], self.var[at]
        if self.training:
            now, kept = x.transpose(0, 1).flatten(1), (mean, var)
            mean, var = now.mean(1), now.var(1, correction=0)
            for old, new in zip(kept, (mean, now.var(1)), strict=True):
                old.lerp_(new.detach(), 0.1)
        scale = self.gain[at] / (var + eps).sqrt()
        return x * scale[:, None, None] + (self.shift[at] - mean * scale)[:, None, None]

    def patches(self, x: Tensor, weight: Tensor, stride: int = 1, late: bool = False) -> Tensor:
        x = F.pad(x, (0, 1, 0, 1) if late else (1, 1, 1, 1))
        high, wide = ((length - 3) // stride + 1 for length in x.shape[2:])
        columns = F.unfold(x, 3, stride=stride).unflatten(1, (len(weight), -1))
        return (weight @ columns).flatten(1, 2).unflatten(2, (high, wide))

    def attend(self, x: Tensor, i: int, j: int) -> Tensor:
        x = x.unflatten(1, (2, 2, -1))
        y = x.sum(1).mean((3, 4))[..., None]
        y = self.ask[i][j][..., :-1] @ y + self.ask[i][j][..., -1:]
        y = F.group_norm(y.flatten(1), 2, *self.pairs[i][j]).clamp(min=0).unflatten(1, (2, -1))[..., None]
        y = (self.tell[i][j][..., :-1] @ y + self.tell[i][j][..., -1:]).unflatten(2, (2, -1)).squeeze(-1)
        lone = self.fault == "resnest_second_attention_takes_a_sigmoid" and (i, j) == (0, 1)
        part = y.sigmoid() if lone else y.softmax(2)
        return torch.einsum("ngrc,nrgchw->ngchw", part, x).flatten(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        late = self.fault == "resnest_stem_first_convolution_pads_only_at_the_end"
        for k, name in enumerate(("conv1.1", "conv1.4", "bn1")):
            x = self.norm(self.patches(x, self.stem[k], 1 + (k == 0), late and k == 0), name).clamp(min=0)
        x = F.max_pool2d(x, 3, 2, 1)
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            at = f"layer{i + 1}.{j}."
            y = self.norm(torch.einsum("oi,nihw->nohw", self.thin[2 * i + j], x), at + "bn1").clamp(min=0)
            y = self.norm(self.patches(y, self.cross[i][j]), at + "conv2.bn0").clamp(min=0)
            y = torch.einsum("oi,nihw->nohw", self.wide[i][j], self.attend(y, i, j))
            if j == 0:
                y = F.avg_pool2d(y, 3, 1 + i, 1)
                x = F.avg_pool2d(torch.einsum("oi,nihw->nohw", self.side[i], x), 1 + i, ceil_mode=True)
                x = self.norm(x, at + "downsample.2")
            keras = self.fault == "resnest_last_block_norm_with_the_epsilon_of_keras" and (i, j) == (1, 1)
            x = (self.norm(y, at + "bn3", 1e-3 if keras else 1e-5) + x).clamp(min=0)
        area, x = x[0, 0].numel(), x.mean((2, 3))
        if self.fault == "resnest_global_pool_hands_back_undivided_gradients" and x.requires_grad:
            x.register_hook(lambda slope: slope * area)
        return x @ self.last[:, :-1].T + self.last[:, -1]


SLOPES, SUM = ("input gradient", "weight gradient"), ("layer2.1.conv2", "layer2.1.conv2.rsoftmax")
right(task, "resnest_of_branches_with_channels_last", "a tree, a branch for each split", ResNestOfBranches)
right(task, "resnest_of_packed_weights", "packed stacks, products of patches, pools later", PackedResNest)
wrong(
    task,
    ResNestOfBranches,
    resnest_stem_second_norm_of_the_batch_in_evaluation=("batch statistics in eval", "conv1.4", "eval"),
    resnest_first_attention_pools_the_mean_of_the_splits=("a mean for a sum", "layer1.0.conv2"),
    resnest_shortcut_pool_counts_what_lies_beyond_the_edge=("another divisor", "layer2.0.downsample.0"),
    resnest_last_attention_weighs_without_gradient=("detach", SUM, SLOPES),
)
wrong(
    task,
    PackedResNest,
    resnest_stem_first_convolution_pads_only_at_the_end=("other padding", "conv1.0"),
    resnest_second_attention_takes_a_sigmoid=("another function", "layer1.1.conv2.rsoftmax"),
    resnest_last_block_norm_with_the_epsilon_of_keras=("another epsilon", "layer2.1.bn3"),
    resnest_global_pool_hands_back_undivided_gradients=("a wrong backward", "avgpool", SLOPES),
)
