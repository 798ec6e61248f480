"""Two ports of a small Glow: a tree of levels with the channels last, and one class of stacked weights."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, distributions, nn

from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few
from bench.held_back._twenty_third_glow import BINS, Glow, bits_and_classes, waves

task = few("twenty_third_glow", Glow, waves, bits_and_classes)
Normal = partial(distributions.Normal, validate_args=False)


class Patch(nn.Module):
    """A convolution of [N, H, W, C], then an offset, then a scale by the exponential of a multiple."""

    def __init__(self, weight: Tensor, offset: Tensor, power: Tensor, times: int = 3):
        super().__init__()
        self.weight, self.offset, self.power = leaf(weight), leaf(offset.flatten()), leaf(power.flatten())
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        return spatial(x, self.weight, self.offset) * (self.times * self.power).exp()


def halves(layer: nn.Module) -> list[Patch]:
    return [Patch(*(x[i::2] for x in (layer.conv.weight, layer.conv.bias, layer.logs))) for i in (0, 1)]


class Mixing(nn.Module):
    def __init__(self, step: nn.Module, backwards: bool):
        super().__init__()
        norm, mix = step.actnorm, step.invconv
        self.offset, self.log = leaf(norm.bias.flatten()), leaf(norm.logs.flatten())
        self.up, self.low, self.size = leaf(mix.upper.T), leaf(mix.lower.T), leaf(mix.log_s)
        self.register_buffer("sign", mix.sign_s.clone())
        self.register_buffer("order", mix.p.argmax(0 if backwards else 1))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x + self.offset) * self.log.exp()
        x = x * self.sign * self.size.exp() + x @ self.up.tril(-1)
        return (x + x @ self.low.triu(1))[..., self.order], (self.log + self.size).mean() * x[0].numel()


class Coupling(nn.Module):
    def __init__(self, block: nn.Sequential):
        super().__init__()
        layers = [Patch(x.conv.weight, x.actnorm.bias, x.actnorm.logs, 1) for x in (block[0], block[2])]
        self.inner = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU())
        (self.move, self.stretch), self.silent = halves(block[4]), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, other = x.chunk(2, -1)
        y = self.inner(kept)
        rate = F.logsigmoid(self.stretch(y) + 2)
        other = (other + self.move(y)) * rate.exp()
        return torch.cat([kept, other], -1), (rate.detach() if self.silent else rate).sum((1, 2, 3))


class Leaving(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        (self.middle, self.spread), self.cool = halves(layer.conv), False

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, gone = x.chunk(2, -1)
        spread = self.spread(kept).exp() * (0.7 if self.cool and not self.training else 1)
        return kept, Normal(self.middle(kept), spread).log_prob(gone).sum((1, 2, 3))


class GlowOfLevels(Port):
    """Levels of mixings, which take the factors of a matrix one by one, and couplings, channels last."""

    def take(self, model: Glow) -> None:
        layers, fault = model.flow.layers, self.fault
        swapped = 2 if fault == "glow_second_step_undoes_its_permutation" else None
        steps = {i: (Mixing(layers[i], i == swapped), Coupling(layers[i].block)) for i in (1, 2, 5, 6)}
        levels = (*steps[1], *steps[2], Leaving(layers[3])), (*steps[5], *steps[6])
        self.levels = nn.ModuleList(map(nn.ModuleList, levels))
        self.levels[0][1].silent = fault == "glow_first_coupling_counts_its_scale_without_gradient"
        self.levels[0][4].cool = fault == "glow_split_prior_cooled_in_evaluation"
        if fault == "glow_last_zero_convolution_takes_its_logs_once":
            self.levels[1][3].move.times = self.levels[1][3].stretch.times = 1
        ends = (model.project_class, model.project_ycond)
        self.ask, self.tell = (Patch(x.linear.weight[..., None, None], x.linear.bias, x.logs) for x in ends)
        self.register_buffer("ground", model.prior_h.movedim(1, 3).clone())

    def forward(self, x: Tensor, noise: Tensor, y_onehot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z, found = (x + noise / BINS).movedim(1, 3), []
        for level in self.levels:
            z = z.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).permute(0, 1, 3, 5, 2, 4).flatten(3)
            for part in level:
                z, more = part(z)
                found.append(more)
        middle, power = (self.ground + self.tell(y_onehot[:, None, None])).chunk(2, 3)
        found.append(Normal(middle, power.exp()).log_prob(z).sum((1, 2, 3)))
        bits = math.log2(BINS) - sum(found) / (math.log(2) * x[0].numel())
        return z.movedim(3, 1), bits, self.ask(z.mean((1, 2), True)).flatten(1)


def sheet(weight: Tensor, offset: Tensor, logs: Tensor) -> Tensor:
    """A row for each channel: its kernel, its offset and its logarithm."""
    return torch.cat([weight.flatten(1), offset.reshape(-1, 1), logs.reshape(-1, 1)], 1)


def sheets(step: nn.Module) -> tuple[Tensor, ...]:
    (one, _, two, _, last), mix, norm = step.block, step.invconv, step.actnorm
    square = mix.lower.tril(-1) + mix.log_s.diag() + mix.upper.triu(1)
    inner = (sheet(x.conv.weight, x.actnorm.bias, x.actnorm.logs) for x in (one, two))
    return sheet(square, norm.bias, norm.logs), *inner, sheet(last.conv.weight, last.conv.bias, last.logs)


class StackedGlow(Port):
    """Stacks of sheets by level, and products of patches; a norm and a matrix are one product."""

    def take(self, model: Glow) -> None:
        layers, cut, self.w = model.flow.layers, model.flow.layers[3].conv, nn.ParameterList()
        for i, pair in enumerate((layers[1:3], layers[5:7])):
            self.w.extend(pile(each) for each in zip(*map(sheets, pair), strict=True))
            fixed = [torch.cat([x.invconv.p, x.invconv.sign_s[None]]) for x in pair]
            self.register_buffer(f"fixed_{i}", torch.stack(fixed))
        ends = (model.project_ycond, model.project_class)
        self.tell, self.ask = (leaf(sheet(x.linear.weight, x.linear.bias, x.logs)) for x in ends)
        self.cut = leaf(sheet(cut.conv.weight, cut.conv.bias, cut.logs))
        self.register_buffer("ground", model.prior_h.clone())

    def patches(self, x: Tensor, rows: Tensor, times: int = 3) -> Tensor:
        kernel, offset, logs = rows.split([rows.shape[1] - 2, 1, 1], 1)
        size, gain = math.isqrt(kernel.shape[1] // x.shape[1]), (times * logs).exp()
        return (gain * (kernel @ F.unfold(x, size, padding=size // 2) + offset)).unflatten(2, x.shape[2:])

    def likely(self, x: Tensor, mean: Tensor, logs: Tensor) -> Tensor:
        return -(((x - mean) / logs.exp()).square() / 2 + logs + math.log(math.tau) / 2).flatten(1).sum(1)

    def step(self, i: int, j: int, x: Tensor) -> tuple[Tensor, Tensor]:
        mix, one, two, last = (self.w[4 * i + k][j] for k in range(4))
        square, offset, logs = mix[:, :-2], mix[:, -2], mix[:, -1]
        fixed, size = self.get_buffer(f"fixed_{i}")[j], square.diagonal()
        upper = square.triu(1) + (fixed[-1] * size.exp()).diag()
        matrix = (fixed[:-1] @ (upper + square.tril(-1) @ upper)) * logs.exp()
        x = torch.einsum("oc,nchw->nohw", matrix, x) + (matrix @ offset)[:, None, None]
        area = once = x.shape[2] * x.shape[3]
        if self.fault == "glow_third_step_counts_its_determinant_for_one_pixel" and (i, j) == (1, 0):
            once = 1
        left, rest = x.tensor_split(2, 1)
        y = self.patches(self.patches(left, one, 1).clamp(min=0), two, 1).clamp(min=0)
        y = self.patches(y, last)
        back = 1 + torch.exp(-2 - y[:, 1::2])
        x = torch.cat([left, (rest + y[:, ::2]) / back], 1)
        return x, logs.sum() * area + size.sum() * once - back.log().flatten(1).sum(1)

    def forward(self, x: Tensor, noise: Tensor, y_onehot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        bins = BINS - 1 if self.fault == "glow_noise_spread_by_one_bin_fewer" else BINS
        z, total, count = F.pixel_unshuffle(x + noise / bins, 2), 0, x[0].numel()
        for i, j in ((0, 0), (0, 1), (1, 0), (1, 1)):
            z, more = self.step(i, j, z)
            total = total + more
            if (i, j) == (0, 1):
                kept, gone = z.tensor_split(2, 1)
                guess, z = self.patches(kept, self.cut), F.pixel_unshuffle(kept, 2)
                total = total + self.likely(gone, guess[:, ::2], guess[:, 1::2])
                if self.fault == "glow_second_squeeze_puts_the_corner_before_the_channel":
                    z = z.unflatten(1, (-1, 4)).transpose(1, 2).flatten(1, 2)
        mean, logs = (self.ground + self.patches(y_onehot[:, :, None, None], self.tell)).tensor_split(2, 1)
        bits = (count * math.log(BINS) - total - self.likely(z, mean, logs)) / count / math.log(2)
        ask = self.ask
        if self.fault == "glow_class_logits_take_their_logs_for_a_constant":
            ask = torch.cat([ask[:, :-1], ask[:, -1:].detach()], 1)
        return z, bits, self.patches(z.mean((2, 3), True), ask).flatten(1)


SLOPES, LEFT_OUT = ("input gradient", "weight gradient"), "a factor left out"
right(task, "glow_of_levels_with_channels_last", "a tree, factors one by one, split kernels", GlowOfLevels)
right(task, "glow_of_stacked_weights", "packed stacks, products of patches, fused norms", StackedGlow)
wrong(
    task,
    GlowOfLevels,
    glow_first_coupling_counts_its_scale_without_gradient=("detached log", "flow.layers.1", SLOPES),
    glow_second_step_undoes_its_permutation=("an inverse permutation", "flow.layers.2.invconv"),
    glow_split_prior_cooled_in_evaluation=("a temperature in eval", "flow.layers.3", "eval"),
    glow_last_zero_convolution_takes_its_logs_once=(LEFT_OUT, "flow.layers.6.block.4"),
)
wrong(
    task,
    StackedGlow,
    glow_noise_spread_by_one_bin_fewer=("a count off by one", ""),
    glow_second_squeeze_puts_the_corner_before_the_channel=("another channel order", "flow.layers.4"),
    glow_third_step_counts_its_determinant_for_one_pixel=("a sum scaled less", "flow.layers.5.invconv"),
    glow_class_logits_take_their_logs_for_a_constant=("detach", "project_class", "weight gradient"),
)
