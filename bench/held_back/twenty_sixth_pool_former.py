"""Two ports of a small PoolFormer: half blocks in a row with the channels last, and one class of stacks."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_sixth_pool_former import DEPTHS, MetaFormer, blobs, classes

task = few("twenty_sixth_pool_former", MetaFormer, blobs, classes)


def factor(scale: nn.Module) -> nn.Parameter | None:
    """The weight of a scale, if it has one."""
    return leaf(scale.scale) if hasattr(scale, "scale") else None


def threes(x: Tensor, axis: int, repeat: bool) -> Tensor:
    """The mean of three neighbours along an axis, of two at its ends, or with the ends twice."""
    ends = x.narrow(axis, 0, 1), x.narrow(axis, x.shape[axis] - 1, 1)
    first, last = ends if repeat else map(torch.zeros_like, ends)
    count = x.new_full(x.shape[axis : axis + 1], 3)
    count[[0, -1]] = 3 if repeat else 2
    total = torch.cat([first, x, last], axis).unfold(axis, 3, 1).sum(-1)
    return total / count.view(-1, *[1] * (x.ndim - axis - 1))


class Windows(nn.Module):
    """A strided convolution of [N, H, W, C], if there is a gain after a norm of each place."""

    def __init__(self, conv: nn.Conv2d, gain: Tensor | None = None, turned: bool = False):
        super().__init__()
        axes = (1, 3, 2, 0) if turned else (1, 2, 3, 0)
        self.kernel, self.offset = leaf(conv.weight.permute(axes)), leaf(conv.bias)
        self.gain = None if gain is None else leaf(gain)
        self.apart, self.edge = conv.stride[0], conv.padding[0]

    def forward(self, x: Tensor) -> Tensor:
        if self.gain is not None:
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * self.gain
        x, size = F.pad(x, (0, 0, *[self.edge] * 4)), self.kernel.shape[1]
        windows = x.unfold(1, size, self.apart).unfold(2, size, self.apart)
        return torch.tensordot(windows, self.kernel, 3) + self.offset


class Half(nn.Module):
    """A half of a block: the norm and the two scales of what a subclass does in between."""

    def __init__(self, norm: nn.Module, inner: nn.Module, outer: nn.Module):
        super().__init__()
        self.gain, self.share, self.keep = leaf(norm.weight), factor(inner), factor(outer)
        self.correction = 0

    def forward(self, x: Tensor) -> Tensor:
        var, mean = torch.var_mean(x, (1, 2, 3), correction=self.correction, keepdim=True)
        change = self.share * self.between((x - mean) * (var + 1e-6).rsqrt() * self.gain)
        return change + (x if self.keep is None else x * self.keep)


class Neighbours(Half):
    def __init__(self, block: nn.Module):
        super().__init__(block.norm1, block.layer_scale1, block.res_scale1)
        self.repeat = False

    def between(self, x: Tensor) -> Tensor:
        return threes(threes(x, 2, self.repeat), 1, self.repeat) - x


class Channels(Half):
    """The hidden channels in two lots."""

    def __init__(self, block: nn.Module):
        super().__init__(block.norm2, block.layer_scale2, block.res_scale2)
        mlp, self.gated = block.mlp, False
        self.up = nn.ParameterList(map(leaf, mlp.fc1.weight.flatten(1).T.chunk(2, 1)))
        self.down = nn.ParameterList(map(leaf, mlp.fc2.weight.flatten(1).T.chunk(2, 0)))
        self.rate, self.offset = leaf(mlp.act.scale), leaf(mlp.act.bias)

    def between(self, x: Tensor) -> Tensor:
        total = 0
        for up, down in zip(self.up, self.down, strict=True):
            h = x @ up
            gate = h.relu().detach() if self.gated else h.relu()
            total = total + (self.rate * h * gate + self.offset) @ down
        return total


class PoolFormerOfHalves(Port):
    """Windows and halves of blocks in a row, with the channels last."""

    def take(self, model: MetaFormer) -> None:
        turned = self.fault == "pool_former_stem_kernel_turned_on_its_side"
        row = [Windows(model.stem.conv, turned=turned)]
        for stage in model.stages:
            if not isinstance(stage.downsample, nn.Identity):
                row.append(Windows(stage.downsample.conv, stage.downsample.norm.weight))
            for block in stage.blocks:
                row += [Neighbours(block), Channels(block)]
        row[4].correction = int(self.fault == "pool_former_second_mlp_norm_by_the_unbiased_variance")
        row[6].repeat = self.fault == "pool_former_third_pooling_repeats_the_edge"
        row[9].gated = self.fault == "pool_former_fourth_star_relu_halves_its_slope"
        self.row = nn.Sequential(*row)
        norm, fc = model.head.norm, model.head.fc
        self.ends = nn.ParameterList(map(leaf, (norm.weight, norm.bias, fc.weight.T, fc.bias)))

    def forward(self, x: Tensor) -> Tensor:
        gain, shift, out, offset = self.ends
        x = self.row(x.permute(0, 2, 3, 1)).flatten(1, 2).mean(1)
        return F.layer_norm(x, gain.shape, gain, shift, 1e-6) @ out + offset


def sheet(layer: nn.Module) -> Tensor:
    """A row for each output: its weights and its bias."""
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


def band(length: int, like: Tensor) -> Tensor:
    """The matrix that averages each place with its neighbours."""
    near = torch.ones(length, length).triu(-1).tril(1).to(like)
    return near / near.sum(1, keepdim=True)


class StackedPoolFormer(Port):
    """Stacks by stage; the pooling is a product with a band matrix from either side."""

    def take(self, model: MetaFormer) -> None:
        self.maps, self.rows, stars = nn.ParameterList(), nn.ParameterList(), []
        for stage in model.stages:
            maps, rows = [], []
            for b in stage.blocks:
                maps.append(torch.stack([b.mlp.fc1.weight.flatten(1), b.mlp.fc2.weight.flatten(1).T]))
                scales = b.layer_scale1, b.layer_scale2, b.res_scale1, b.res_scale2
                scales = [x.scale for x in scales if hasattr(x, "scale")]
                rows.append(torch.stack([b.norm1.weight, b.norm2.weight, *scales]))
                stars.append(torch.cat([b.mlp.act.scale, b.mlp.act.bias]))
            self.maps.append(pile(maps)), self.rows.append(pile(rows))
        downs = [stage.downsample for stage in model.stages[1:]]
        self.stars, self.gains = pile(stars), nn.ParameterList(leaf(x.norm.weight) for x in downs)
        self.sheets = nn.ParameterList(leaf(sheet(x)) for x in (model.stem.conv, *(x.conv for x in downs)))
        self.end = leaf(torch.stack([model.head.norm.weight, model.head.norm.bias]))
        self.out = leaf(sheet(model.head.fc))

    def shrink(self, x: Tensor, rows: Tensor, size: int, apart: int, before: int, after: int) -> Tensor:
        x = F.pad(x, (before, after, before, after))
        high, wide = ((length - size) // apart + 1 for length in x.shape[2:])
        return (rows[:, :-1] @ F.unfold(x, size, stride=apart) + rows[:, -1:]).unflatten(2, (high, wide))

    def block(self, i: int, j: int, x: Tensor) -> Tensor:
        (one, two), gone = self.maps[i][j], 1
        rows = self.rows[i][j][:, :, None, None]
        kept = rows[4:] if i else (1, 1)
        y = F.layer_norm(x, x.shape[1:], eps=1e-6) * rows[0]
        x = kept[0] * x + rows[2] * (band(x.shape[2], x) @ y @ band(x.shape[3], x).T - y)
        y = F.layer_norm(x, x.shape[1:], eps=1e-6) * rows[1]
        rate, offset = self.stars[sum(DEPTHS[:i]) + j]
        y = torch.einsum("hc,nc...->nh...", one, y).clamp(min=0).square() * rate + offset
        y = torch.einsum("hc,nh...->nc...", two, y)
        if self.fault == "pool_former_fifth_block_scales_its_mlp_with_the_residual" and (i, j) == (2, 0):
            return (x + rows[3] * y) * kept[1]
        if self.fault == "pool_former_last_path_kept_by_its_rate_in_evaluation" and (i, j) == (2, 1):
            gone = 1 if self.training else 0.9
        return torch.addcmul(kept[1] * x, rows[3], gone * y)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shrink(x, self.sheets[0], 7, 4, 2, 2)
        for i, depth in enumerate(DEPTHS):
            if i:
                var, mean = torch.var_mean(x, 1, correction=0, keepdim=True)
                x = (x - mean) / (var + 1e-6).sqrt() * self.gains[i - 1][:, None, None]
                late = self.fault == "pool_former_first_downsampling_pads_at_the_end_only" and i == 1
                x = self.shrink(x, self.sheets[i], 3, 2, *((0, 1) if late else (1, 1)))
            for j in range(depth):
                x = self.block(i, j, x)
        eps = 1e-3 if self.fault == "pool_former_head_norm_takes_the_eps_of_keras" else 1e-6
        x = F.layer_norm(x.mean((2, 3)), x.shape[1:2], *self.end, eps) @ self.out[:, :-1].T
        return x + self.out[:, -1]


SLOPES, LAST = ("input gradient", "weight gradient"), "stages.2.blocks.1"
right(task, "pool_former_of_halves", "a row of half blocks, channels last, split hidden", PoolFormerOfHalves)
right(task, "pool_former_of_stacks", "packed stacks, band matrices, unfolded patches", StackedPoolFormer)
wrong(
    task,
    PoolFormerOfHalves,
    pool_former_stem_kernel_turned_on_its_side=("a kernel's axes swapped", "stem.conv"),
    pool_former_second_mlp_norm_by_the_unbiased_variance=("a variance", "stages.0.blocks.1.norm2"),
    pool_former_third_pooling_repeats_the_edge=("another padding", "stages.1.blocks.0.token_mixer.pool"),
    pool_former_fourth_star_relu_halves_its_slope=("a slope halved", "stages.1.blocks.1.mlp.act", SLOPES),
)
wrong(
    task,
    StackedPoolFormer,
    pool_former_first_downsampling_pads_at_the_end_only=("padding at one end", "stages.1.downsample.conv"),
    pool_former_fifth_block_scales_its_mlp_with_the_residual=("a scale's reach", "stages.2.blocks.0"),
    pool_former_last_path_kept_by_its_rate_in_evaluation=("a rate", (f"{LAST}.drop_path2", LAST), "eval"),
    pool_former_head_norm_takes_the_eps_of_keras=("another eps", "head.norm"),
)
