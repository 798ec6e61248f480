"""Two ports of a small mixer: a tree of branches with the channels last, and one class of stacked weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fifth_mixer_token import GRID, KERNEL, PATCH, Mixer, smoothed, waves
from bench.held_back._fourth_ports import Port, Rows, leaf, pile, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fifth_mixer_token", Mixer, waves, smoothed)


def bell(x: Tensor) -> Tensor:
    """The exact gelu, by the normal distribution's integral."""
    return x * torch.special.ndtr(x)


class Standard(nn.Module):
    """A layer norm of the last axis; ``less`` is taken from the count that the variance is divided by."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.scale, self.shift, self.eps, self.less = leaf(norm.weight), leaf(norm.bias), norm.eps, 0

    def forward(self, x: Tensor) -> Tensor:
        spread, center = torch.var_mean(x, -1, correction=self.less, keepdim=True)
        return (x - center) / (spread + self.eps).sqrt() * self.scale + self.shift


class Stretch(nn.Module):
    def __init__(self, affine: nn.Module):
        super().__init__()
        self.scale, self.shift = leaf(affine.alpha.flatten()), leaf(affine.beta.flatten())

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift


class Products(nn.Module):
    """Products over the last axis, or across the one before it, with the bell between them."""

    def __init__(self, *layers: nn.Module, across: bool = False):
        super().__init__()
        self.across, weights = across, [x.weight.flatten(1) for x in layers]
        self.weights = nn.ParameterList(leaf(x if across else x.T) for x in weights)
        self.offsets = nn.ParameterList(leaf(x.bias[:, None] if across else x.bias) for x in layers)

    def forward(self, x: Tensor) -> Tensor:
        for i, (weight, offset) in enumerate(zip(self.weights, self.offsets, strict=True)):
            x = bell(x) if i else x
            x = (weight @ x if self.across else x @ weight) + offset
        return x


class Level(nn.Module):
    """Two branches, each added to what it reads, by a gain where there is one."""

    def __init__(self, block: nn.Module):
        super().__init__()
        scaled = hasattr(block, "ls1")
        norm, mlp = (Stretch if scaled else Standard), block.mlp_channels
        first = [block.linear_tokens] if scaled else [block.mlp_tokens.fc1, block.mlp_tokens.fc2]
        self.first = nn.Sequential(norm(block.norm1), Products(*first, across=True))
        self.second = nn.Sequential(norm(block.norm2), Products(mlp.fc1, mlp.fc2))
        self.gains = pile([block.ls1, block.ls2]) if scaled else None
        self.parallel, self.which = False, (0, 1)

    def forward(self, x: Tensor) -> Tensor:
        one, two = (1, 1) if self.gains is None else (self.gains[i] for i in self.which)
        y = x + one * self.first(x)
        return y + two * self.second(x if self.parallel else y)


class Window(nn.Module):
    """A depthwise part with a skip and a pointwise part, of [N, H, W, C]."""

    def __init__(self, block: nn.Sequential):
        super().__init__()
        depthwise, _, norm = block[0].fn
        self.kernel, self.offset, self.local = leaf(depthwise.weight[:, 0]), leaf(depthwise.bias), Rows(norm)
        self.point, self.final = Products(block[1]), Rows(block[3])

    def forward(self, x: Tensor) -> Tensor:
        edge = KERNEL // 2
        windows = F.pad(x, (0, 0, *[edge] * 4)).unfold(1, KERNEL, 1).unfold(2, KERNEL, 1)
        y = torch.einsum("nhwcij,cij->nhwc", windows, self.kernel) + self.offset
        return self.final(bell(self.point(x + self.local(bell(y)))))


class MixerOfBranches(Port):
    """Levels of two branches, then windows, all with the channels last; the mean is taken by a sum."""

    def take(self, model: Mixer) -> None:
        self.cut = Products(model.stem.proj)
        self.levels = nn.ModuleList(Level(x) for x in model.blocks)
        self.windows = nn.ModuleList(Window(x) for x in model.convs)
        self.last, self.tell = Standard(model.norm), Products(model.head)
        self.levels[1].parallel = self.fault == "mixer_token_second_block_reads_its_input_twice"
        if self.fault == "mixer_token_third_block_norm_divides_by_one_less":
            self.levels[2].second[0].less = 1
        if self.fault == "mixer_token_last_resmlp_scales_both_branches_by_the_first":
            self.levels[4].which = 0, 0
        self.windows[1].local.own = self.fault == "mixer_token_last_depthwise_norm_by_batch_in_evaluation"

    def forward(self, x: Tensor) -> Tensor:
        x = x.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH).movedim(1, 3).flatten(3)
        x = self.cut(x).flatten(1, 2)
        for level in self.levels:
            x = level(x)
        x = x.unflatten(1, GRID)
        for window in self.windows:
            x = window(x)
        return self.tell(self.last(x).sum((1, 2)) / math.prod(GRID))


def stacks(blocks: list[nn.Module]) -> nn.ParameterList:
    """A stack for each weight that the blocks all have."""
    return nn.ParameterList(map(pile, zip(*(x.parameters() for x in blocks), strict=True)))


class StackedMixer(Port):
    """Stacks of weights by kind, and products of [N, C, T] from the left."""

    def take(self, model: Mixer) -> None:
        self.stem, self.stem_b = leaf(model.stem.proj.weight), leaf(model.stem.proj.bias[:, None])
        self.mixers, self.residuals = stacks(model.blocks[:3]), stacks(model.blocks[3:])
        self.convs, norms = stacks(model.convs), [x for y in model.convs for x in (y[0].fn[2], y[3])]
        self.register_buffer("center", torch.stack([x.running_mean for x in norms]))
        self.register_buffer("spread", torch.stack([x.running_var for x in norms]))
        self.register_buffer("seen", torch.stack([x.num_batches_tracked for x in norms]))
        ends = model.norm.weight[None], model.norm.bias[None], model.head.weight
        self.end, self.end_b = leaf(torch.cat(ends)), leaf(model.head.bias)

    def norm(self, x: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        x = x - x.mean(1, keepdim=True)
        x = x * (x.square().mean(1, keepdim=True) + 1e-6).rsqrt()
        return x * scale[:, None] + shift[:, None]

    def within(self, x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor, kind: str = "none") -> Tensor:
        return v @ F.gelu(w @ x + b[:, None], approximate=kind) + c[:, None]

    def count(self, x: Tensor, i: int, scale: Tensor, shift: Tensor) -> Tensor:
        self.seen[i] += self.training
        return F.batch_norm(x, self.center[i], self.spread[i], scale, shift, self.training)

    def forward(self, x: Tensor) -> Tensor:
        fault, (high, wide) = self.fault, GRID
        x = x.unflatten(3, (wide, PATCH)).unflatten(2, (high, PATCH))
        swap = fault == "mixer_token_patches_read_column_by_column"
        stem = self.stem.mT if swap else self.stem
        x = torch.einsum("nchiwj,dcij->ndhw", x, stem).flatten(2) + self.stem_b
        for i in range(3):
            n, m, w, b, v, c, o, p, *channels = (y[i] for y in self.mixers)
            x = x + F.gelu(self.norm(x, n, m) @ w.T + b) @ v.T + c
            rough = i == 0 and fault == "mixer_token_first_channel_mlp_by_the_tanh_gelu"
            x = x + self.within(self.norm(x, o, p), *channels, "tanh" if rough else "none")
        for i in range(2):
            one, two, a, b, w, c, d, e, *channels = (y[i] for y in self.residuals)
            x = x + one[:, None] * ((a[0].T * x + b[0].T) @ w.T + c)
            y = d[0].T * x + e[0].T
            if i == 0 and fault == "mixer_token_first_resmlp_affine_shifts_before_it_scales":
                y = d[0].T * (x + e[0].T)
            x = x + two[:, None] * self.within(y, *channels)
        for i in range(2):
            w, b, n, m, v, c, o, p = (y[i] for y in self.convs)
            y = F.unfold(x.unflatten(2, GRID), KERNEL, padding=KERNEL // 2).unflatten(1, (len(w), -1))
            y = torch.einsum("nckt,ck->nct", y, w.flatten(1)) + b[:, None]
            cut = i == 0 and fault == "mixer_token_first_depthwise_skip_without_gradient"
            x = self.count(F.gelu(y), 2 * i, n, m) + (x.detach() if cut else x)
            x = self.count(F.gelu(v.flatten(1) @ x + c[:, None]), 2 * i + 1, o, p)
        x = self.norm(x, self.end[0], self.end[1]).mean(2)
        return x @ self.end[2:].T + self.end_b


SLOPES = ("input gradient", "weight gradient")
right(task, "mixer_token_of_branches_with_channels_last", "a tree of branches, own norms", MixerOfBranches)
right(task, "mixer_token_of_stacked_weights", "stacks, channels first, products from the left", StackedMixer)
wrong(
    task,
    MixerOfBranches,
    mixer_token_second_block_reads_its_input_twice=("parallel branches", "blocks.1"),
    mixer_token_third_block_norm_divides_by_one_less=("another variance", "blocks.2.norm2"),
    mixer_token_last_resmlp_scales_both_branches_by_the_first=("another weight's use", "blocks.4"),
    mixer_token_last_depthwise_norm_by_batch_in_evaluation=("batch statistics", "convs.1.0.fn.2", "eval"),
)
wrong(
    task,
    StackedMixer,
    mixer_token_patches_read_column_by_column=("a transposed kernel", "stem.proj"),
    mixer_token_first_channel_mlp_by_the_tanh_gelu=("another gelu", "blocks.0.mlp_channels.act"),
    mixer_token_first_resmlp_affine_shifts_before_it_scales=("another order", "blocks.3.norm2"),
    mixer_token_first_depthwise_skip_without_gradient=("detach", "convs.0.0", SLOPES),
)
