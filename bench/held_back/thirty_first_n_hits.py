"""Two ports of a small N-HiTS: a tree of stacks in the order of time, and one class of packed weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._thirty_first_n_hits import HORIZON, INPUT, NHITS, QUANTILES, quantile_loss, seasons

task = few("thirty_first_n_hits", NHITS, seasons, quantile_loss)
COUNT = len(QUANTILES)


class Dense(nn.Module):
    """x @ weight + bias, of the rows ``weight`` [out, in]."""

    def __init__(self, weight: Tensor, bias: Tensor):
        super().__init__()
        self.weight, self.bias = leaf(weight.T), leaf(bias)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Curve(nn.Module):
    """Knots [N, K, Q] -> the horizon [N, H, Q], by the weights of each knot at each hour."""

    def __init__(self, mode: str):
        super().__init__()
        self.mode, self.sharp = mode, 0.75

    def near(self, distance: Tensor) -> Tensor:
        d, a = distance.abs(), self.sharp
        inner = 1 + d * d * ((2 - a) * d - (3 - a))
        outer = -a * (d - 1) * (d - 2).square()
        return torch.where(d <= 1, inner, torch.where(d < 2, outer, 0.0 * d))

    def forward(self, knots: Tensor) -> Tensor:
        count = knots.shape[1]
        at = torch.arange(HORIZON).to(knots) * count / HORIZON
        if self.mode == "nearest":
            return knots[:, at.long()]
        at = at + (count / HORIZON - 1) / 2
        if self.mode == "linear":
            first = at.clamp(min=0).long()
            part = (at.clamp(min=0) - first)[:, None]
            return torch.lerp(knots[:, first], knots[:, (first + 1).clamp(max=count - 1)], part)
        first, total = at.floor().long(), 0
        for tap in range(-1, 3):
            weight = self.near(at - first - tap)[:, None]
            total = total + weight * knots[:, (first + tap).clamp(0, count - 1)]
        return total


class Stage(nn.Module):
    """One block, its residual in the order of time and its entry split by what it reads."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.size, entry, end = block.pooling_layer.kernel_size, block.layers[0], block.layers[5]
        past, whole = -(-INPUT // self.size), -(-(INPUT + HORIZON) // self.size)
        series, before, known, fixed = entry.weight.split([past, 2 * past, 3 * whole, 4], 1)
        self.read = Dense(series.flip(1), entry.bias)
        self.before, self.known, self.fixed = leaf(before.T), leaf(known.T), leaf(fixed.T)
        self.mix, self.narrow = (Dense(x.weight, x.bias) for x in (block.layers[1], block.layers[3]))
        both = (torch.cat([x[:INPUT].flip(0), x[INPUT:]]) for x in (end.weight, end.bias))
        self.end, self.curve = Dense(*both), Curve(block.basis.interpolation_mode)
        self.averages, self.straight = False, False

    def pool(self, x: Tensor, from_end: bool = False) -> Tensor:
        """The greatest of each ``size`` hours of [N, T, C], counted from the start or from the end."""
        lack, empty = -x.shape[1] % self.size, torch.nan if self.averages else -torch.inf
        x = F.pad(x, (0, 0, lack, 0) if from_end else (0, 0, 0, lack), value=empty)
        x = x.unflatten(1, (-1, self.size))
        return x.nanmean(2) if self.averages else x.amax(2)

    def forward(self, left: Tensor, before: Tensor, known: Tensor, fixed: Tensor) -> tuple[Tensor, Tensor]:
        x = self.read(self.pool(left[:, :, None], True).flatten(1)) + fixed @ self.fixed
        x = x + self.pool(before).flatten(1) @ self.before + self.pool(known).flatten(1) @ self.known
        x = self.narrow(self.mix(x).clamp(min=0))
        y = F.relu(x)
        if self.straight:
            y = x + (y - x).detach()
        back, ahead = self.end(y).tensor_split([INPUT], 1)
        return back, self.curve(ahead.unflatten(1, (COUNT, -1)).transpose(1, 2))


class Stacks(Port):
    """A tree of stacks of stages."""

    def take(self, model: NHITS) -> None:
        a, b, c, d = (Stage(block) for block in model.blocks)
        self.stacks = nn.ModuleList([nn.ModuleList([a]), nn.ModuleList([b, c]), nn.ModuleList([d])])
        b.straight = self.fault == "n_hits_second_block_last_relu_passes_every_gradient"
        c.curve.sharp = 0.5 if self.fault == "n_hits_third_block_cubic_of_one_half" else 0.75
        d.averages = self.fault == "n_hits_last_block_pools_by_the_mean"

    def forward(self, insample_y: Tensor, insample_mask: Tensor, **exog: Tensor) -> Tensor:
        gone, count = ~insample_mask, insample_mask.sum(1, keepdim=True)
        middle = insample_y.masked_fill(gone, 0).sum(1, keepdim=True) / count
        away = (insample_y - middle).masked_fill(gone, 0)
        spread = (away.square().sum(1, keepdim=True) / count).sqrt() + 1e-6
        left = away / spread
        start = 0 if self.fault == "n_hits_naive_level_is_the_oldest_value" else INPUT - 1
        total = left[:, start, None, None]
        for stack in self.stacks:
            for stage in stack:
                back, ahead = stage(left, exog["hist_exog"], exog["futr_exog"], exog["stat_exog"])
                left, total = (left - back).masked_fill(gone, 0), total + ahead
        return torch.addcmul(middle[:, :, None], total, spread[:, :, None])


class PackedHits(Port):
    """All entries in one weight, all ends in another; the two first products are one; knots by matrices."""

    def take(self, model: NHITS) -> None:
        layers = [block.layers for block in model.blocks]
        self.sizes = [block.pooling_layer.kernel_size for block in model.blocks]
        self.ins, self.outs = ([x[k].weight.shape[1 - k // 5] for x in layers] for k in (0, 5))
        self.entry = leaf(torch.cat([x[0].weight for x in layers], 1))
        self.second, self.third = (pile(x[k].weight.T for x in layers) for k in (1, 3))
        self.offsets = pile(torch.cat([x[k].bias for k in (0, 1, 3)]) for x in layers)
        self.end = leaf(torch.cat([torch.cat([x[5].weight, x[5].bias[:, None]], 1) for x in layers]))
        self.modes = [block.basis.interpolation_mode for block in model.blocks]

    def spread(self, i: int, knots: Tensor) -> Tensor:
        """[N, Q, K] -> [N, H, Q]."""
        eye = torch.eye(knots.shape[2], dtype=knots.dtype, device=knots.device)[None, None]
        if self.modes[i] == "cubic":
            over = F.interpolate(eye, size=(eye.shape[2], HORIZON), mode="bicubic")[0, 0]
        else:
            over = F.interpolate(eye[0], size=HORIZON, mode=self.modes[i])[0]
        return torch.einsum("nqk,kh->nhq", knots, over)

    def most(self, x: Tensor, size: int) -> Tensor:
        """[N, T, C] -> [N, T / size, C], the last of fewer."""
        return torch.stack([part.amax(1) for part in x.split(size, 1)], 1)

    def block(self, i: int, left: Tensor, futr: Tensor, hist: Tensor, stat: Tensor) -> tuple[Tensor, Tensor]:
        series, hist, futr = (self.most(x, self.sizes[i]) for x in (left[:, :, None], hist, futr))
        if self.fault == "n_hits_second_block_reads_the_future_feature_by_feature" and i == 1:
            futr = futr.transpose(1, 2)
        x = torch.cat([series.flatten(1), hist.flatten(1), futr.flatten(1), stat], 1)
        first, second, third = self.offsets[i].split([32, 36, 28])
        both = self.second[i].T @ self.entry.split(self.ins, 1)[i]
        x = (x @ both.T + first @ self.second[i] + second).relu()
        x = (x @ self.third[i] + third).relu()
        end = self.end.split(self.outs)[i]
        back, knots = (x @ end[:, :-1].T + end[:, -1]).tensor_split([INPUT], 1)
        knots = knots.unflatten(1, (COUNT, -1))
        if self.fault == "n_hits_first_block_knots_before_quantiles" and i == 0:
            knots = knots.flatten(1).unflatten(1, (-1, COUNT)).transpose(1, 2)
        return back, self.spread(i, knots)

    def forward(self, insample_y: Tensor, insample_mask: Tensor, **exog: Tensor) -> Tensor:
        held = insample_mask.to(insample_y)
        count = held.sum(1)
        share = held / count[:, None]
        middle = (insample_y * share).sum(1)
        square = ((insample_y - middle[:, None]).square() * share).sum(1)
        if self.fault == "n_hits_scale_divides_by_one_value_fewer":
            square = square * count / (count - 1)
        spread = square.sqrt() + 1e-6
        left = ((insample_y - middle[:, None]) / spread[:, None] * held).flip(1)
        total, held = left[:, :1, None], held.flip(1)
        for i in range(4):
            back, ahead = self.block(i, left, exog["futr_exog"], exog["hist_exog"], exog["stat_exog"])
            left, total = left - back, total + ahead
            if self.training or i != 2 or self.fault != "n_hits_third_residual_unmasked_in_evaluation":
                left = left * held
        return total * spread[:, None, None] + middle[:, None, None]


SLOPES = ("input gradient", "weight gradient")
right(task, "n_hits_of_stacks_in_the_order_of_time", "a tree, split entries, taps of knots", Stacks)
right(task, "n_hits_of_packed_weights", "packed weights, products made one, matrices of knots", PackedHits)
wrong(
    task,
    Stacks,
    n_hits_naive_level_is_the_oldest_value=("the wrong end of a window", ""),
    n_hits_second_block_last_relu_passes_every_gradient=("a wrong backward", "blocks.1.layers.4", SLOPES),
    n_hits_third_block_cubic_of_one_half=("another constant of a kernel", "blocks.2.basis"),
    n_hits_last_block_pools_by_the_mean=("another pooling", "blocks.3.pooling_layer"),
)
wrong(
    task,
    PackedHits,
    n_hits_scale_divides_by_one_value_fewer=("an unbiased variance", "scaler"),
    n_hits_first_block_knots_before_quantiles=("another order of axes", "blocks.0.basis"),
    n_hits_second_block_reads_the_future_feature_by_feature=("another flattening", "blocks.1"),
    n_hits_third_residual_unmasked_in_evaluation=("a mask left out in eval", "", "eval"),
)
