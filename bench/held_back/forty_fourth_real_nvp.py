"""Two ports of a small RealNVP: a tree with the channels last, and one class of packed weights."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right
from bench.held_back._forty_fourth_real_nvp import BINS, RealNVP, waves, weighed_bits
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_fourth_real_nvp", RealNVP, waves, weighed_bits)


class Kernel(nn.Module):
    """Directions and lengths of the filters of a convolution of [N, H, W, C]."""

    def __init__(self, conv: nn.Module, part: slice = slice(None)):
        super().__init__()
        self.way, self.offset = leaf(conv.weight_v[part]), leaf(conv.bias[part])
        self.length = leaf(conv.weight_g[part].flatten())

    def forward(self, x: Tensor) -> Tensor:
        y = spatial(x, F.normalize(self.way.flatten(1), dim=1, eps=0).view_as(self.way))
        return y * self.length + self.offset


def branch(block: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.ReLU(), Kernel(block.in_conv), nn.ReLU(), Kernel(block.out_conv))


class Affine(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        net, half = layer.st_net, layer.rescale.weight.numel()
        self.enter, self.branches = Kernel(net.in_conv), nn.ModuleList(map(branch, net.blocks))
        self.taps = nn.ModuleList(map(Kernel, (net.in_skip, *net.skips)))
        self.stretch, self.move = (Kernel(net.out_conv, part) for part in (slice(half), slice(half, None)))
        self.most, self.silent, self.plain = leaf(layer.rescale.weight.flatten()), False, None
        self.register_buffer("kept", layer.mask.movedim(1, 3) > 0)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        seen = x.where(self.kept, 0)
        states = [self.enter(torch.cat([seen.clamp(min=0), (-seen).clamp(min=0)], -1))]
        for i, inner in enumerate(self.branches):
            states.append(inner(states[-1]) + (0 if i == self.plain else states[-1]))
        total = sum(tap(h) for tap, h in zip(self.taps, states, strict=True)).relu()
        rate = (self.most * self.stretch(total).tanh()).masked_fill(self.kept, 0)
        y = torch.where(self.kept, x, rate.exp() * (x + self.move(total)))
        return y, (rate.detach() if self.silent else rate).sum((1, 2, 3))


class Whitening(nn.Module):
    def __init__(self, norm: nn.Module):
        super().__init__()
        self.rate, self.eps, self.own = norm.momentum, norm.eps, False
        self.power, self.offset = leaf(norm.log_gamma), leaf(norm.beta)
        for name, values in (("center", norm.running_mean), ("spread", norm.running_var)):
            self.register_buffer(name, values.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spread, center = torch.var_mean(x, (0, 1, 2), correction=0)
        if self.training:
            self.center.lerp_(center.detach(), self.rate)
            self.spread.lerp_(spread.detach(), self.rate)
        elif not self.own:
            spread, center = self.spread, self.center
        log = self.power - (spread + self.eps).log() / 2
        return (x - center) * log.exp() + self.offset, log.mean() * x[0].numel()


class Chain(nn.Sequential):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        logs = []
        for layer in self:
            x, more = layer(x)
            logs.append(more)
        return x, sum(logs)


class ChainsOfCouplings(Port):
    """Three chains with the channels last; between them the corners of each square have an axis."""

    def take(self, model: RealNVP) -> None:
        flows, fault = model.flows, self.fault
        self.fine = Chain(*map(Affine, flows.in_couplings), Whitening(flows.norm))
        self.squares = Chain(*map(Affine, flows.out_couplings))
        self.coarse = Chain(*map(Affine, flows.next_block.in_couplings))
        self.alpha = float(model.data_constraint)
        self.bins = BINS - 1 if fault == "real_nvp_dequantised_by_one_bin_fewer" else BINS
        self.fine[0].plain = 1 if fault == "real_nvp_second_block_of_first_coupling_is_not_residual" else None
        self.fine[2].own = fault == "real_nvp_flow_norm_evaluates_by_the_batch"
        self.coarse[1].silent = fault == "real_nvp_last_coupling_counts_its_scale_without_gradient"

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        n, channels, high, wide = x.shape
        share = ((x * (BINS - 1) + noise) / self.bins).movedim(1, 3)
        share = 0.5 + (share - 0.5) * self.alpha
        total = -(share.log() + (1 - share).log() - math.log(self.alpha)).sum((1, 2, 3))
        z, more = self.fine(share.logit())
        z = z.view(n, high // 2, 2, wide // 2, 2, channels).permute(0, 1, 3, 5, 2, 4).flatten(3)
        z, much = self.squares(z)
        corners = z.unflatten(3, (channels, 4)).transpose(3, 4)
        z, most = self.coarse(corners[..., [0, 3], :].flatten(3))
        a, b = z.unflatten(3, (2, channels)).split(1, 3)
        z = torch.cat([a, corners[..., 1:3, :], b], 3).view(n, high // 2, wide // 2, 2, 2, channels)
        z = z.permute(0, 5, 1, 3, 2, 4).reshape(x.shape)
        likely = total + more + much + most - z.square().sum((1, 2, 3)) / 2
        return z, math.log2(BINS) + math.log2(math.tau) / 2 - likely / (math.log(2) * x[0].numel())


def sheet(conv: nn.Module) -> Tensor:
    """A row for each filter: its direction, its length and its offset."""
    return torch.cat([conv.weight_v.flatten(1), conv.weight_g.flatten(1), conv.bias[:, None]], 1)


class PackedFlow(Port):
    """Three pairs of couplings, whose sheets of weights are stacked by their use; products of patches."""

    def take(self, model: RealNVP) -> None:
        flows, self.w, self.alpha = model.flows, nn.ParameterList(), float(model.data_constraint)
        for k, pair in enumerate((flows.in_couplings, flows.out_couplings, flows.next_block.in_couplings)):
            nets = [layer.st_net for layer in pair]
            inner = [torch.stack([sheet(c) for b in x.blocks for c in (b.in_conv, b.out_conv)]) for x in nets]
            taps = [torch.stack([sheet(c) for c in (x.in_skip, *x.skips)]) for x in nets]
            ends = [[sheet(x.in_conv) for x in nets], [sheet(x.out_conv) for x in nets]]
            self.w.extend(map(pile, (ends[0], inner, taps, ends[1], [x.rescale.weight for x in pair])))
            same = k == 0 and self.fault == "real_nvp_second_checkerboard_not_inverted"
            masks = [pair[0].mask, pair[0 if same else 1].mask]
            self.register_buffer(f"mask_{k}", torch.stack(masks))
        self.norm = pile([flows.norm.log_gamma, flows.norm.beta])
        self.register_buffer("moments", torch.stack([flows.norm.running_mean, flows.norm.running_var]))

    def patches(self, x: Tensor, rows: Tensor, fixed: bool = False) -> Tensor:
        way, length, offset = rows.split([rows.shape[1] - 2, 1, 1], 1)
        size, length = math.isqrt(way.shape[1] // x.shape[1]), length.detach() if fixed else length
        gain = length / way.norm(dim=1, keepdim=True)
        return ((gain * way) @ F.unfold(x, size, padding=size // 2) + offset).unflatten(2, x.shape[2:])

    def couple(self, k: int, x: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        fixed = k == 2 and self.fault == "real_nvp_lengths_of_filters_are_constants"
        for j, mask in enumerate(self.get_buffer(f"mask_{k}")):
            first, inner, taps, last, factor = (self.w[5 * k + i][j] for i in range(5))
            seen = mask * x
            h = self.patches(torch.cat([seen, -seen], 1).relu(), first, fixed and j == 0)
            gathered = self.patches(h, taps[0])
            for one, two, tap in zip(inner[::2], inner[1::2], taps[1:], strict=True):
                h = h + self.patches(self.patches(h.relu(), one).relu(), two)
                gathered = gathered + self.patches(h, tap)
            s, t = self.patches(gathered.relu(), last).tensor_split(2, 1)
            early = self.fault == "real_nvp_first_channelwise_factor_inside_tanh" and (k, j) == (1, 0)
            s = (1 - mask) * ((factor * s).tanh() if early else factor * s.tanh())
            x, total = seen + (1 - mask) * (x + t) * s.exp(), total + s.flatten(1).sum(1)
        return x, total

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        count, (power, beta) = x[0].numel(), self.norm
        y = self.alpha * (2 * (x * (BINS - 1) + noise) / BINS - 1)
        total = (math.log(4 * self.alpha) - torch.log1p(-y.square())).flatten(1).sum(1)
        z, total = self.couple(0, 2 * y.atanh(), total)
        mean, var = self.moments
        if self.training:
            mean = z.mean((0, 2, 3))
            var = z.square().mean((0, 2, 3)) - mean.square()
            self.moments.mul_(0.9).add_(0.1 * torch.stack([mean, var]).detach())
        log = power - 0.5 * (var + 1e-5).log()
        total = total + log.sum() * x.shape[2] * x.shape[3]
        z = z * log.exp()[:, None, None] + (beta - mean * log.exp())[:, None, None]
        z, total = self.couple(1, F.pixel_unshuffle(z, 2), total)
        order = (0, 1, 2, 3) if self.fault == "real_nvp_corners_factored_out_by_rows" else (0, 3, 1, 2)
        index = torch.tensor([4 * c + corner for corner in order for c in range(x.shape[1])])
        left, gone = z[:, index].tensor_split(2, 1)
        left, total = self.couple(2, left, total)
        z = F.pixel_shuffle(torch.cat([left, gone], 1)[:, index.argsort()], 2)
        total = total - (z.square() + math.log(math.tau)).flatten(1).sum(1) / 2
        return z, (math.log(BINS) - total / count) / math.log(2)


SLOPES, COARSE = ("input gradient", "weight gradient"), "flows.next_block.in_couplings"
BLOCK, ENTRY = "flows.in_couplings.0.st_net.blocks.1", f"{COARSE}.0.st_net.in_conv"
right(task, "real_nvp_of_chains_with_channels_last", "a tree, corners on an axis", ChainsOfCouplings)
right(task, "real_nvp_of_packed_weights", "packed stacks, products of patches, a permutation", PackedFlow)
wrong(
    task,
    ChainsOfCouplings,
    real_nvp_dequantised_by_one_bin_fewer=("a count off by one", ""),
    real_nvp_second_block_of_first_coupling_is_not_residual=("a residual left out", BLOCK),
    real_nvp_flow_norm_evaluates_by_the_batch=("batch statistics in eval", "flows.norm", "eval"),
    real_nvp_last_coupling_counts_its_scale_without_gradient=("detached log", f"{COARSE}.1", SLOPES),
)
wrong(
    task,
    PackedFlow,
    real_nvp_second_checkerboard_not_inverted=("another mask", "flows.in_couplings.1"),
    real_nvp_first_channelwise_factor_inside_tanh=("another order of operations", "flows.out_couplings.0"),
    real_nvp_corners_factored_out_by_rows=("another channel order", "flows"),
    real_nvp_lengths_of_filters_are_constants=("detach", ENTRY, "weight gradient"),
)
