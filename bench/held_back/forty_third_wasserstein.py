"""Two ports of a small WGAN-GP: a tree with the channels last, and one class of few weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from bench.held_back._fifth_vision import right
from bench.held_back._forty_third_wasserstein import DRIFT, LAMBDA, WGANGP, gratings, joint
from bench.held_back._fourth_ports import Port, leaf, pile, spatial, wrong
from bench.held_back._sixth_ports import few

task = few("forty_third_wasserstein", WGANGP, gratings, joint)


def halved(x: Tensor) -> Tensor:
    return x.unflatten(2, (-1, 2)).unflatten(1, (-1, 2)).mean((2, 4))


class ByClass(nn.Module):
    """A batch norm of the last axis, scaled and moved by class, then the positive part."""

    rate = 0.1

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.gain, self.offset = map(leaf, norm.embed.weight.chunk(2, 1))
        self.register_buffer("seen", torch.stack([norm.bn.running_mean, norm.bn.running_var]))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        seen = self.seen
        if self.training:
            rows = x.flatten(0, 2)
            seen = torch.stack([rows.mean(0), rows.var(0, correction=0)])
            self.seen.lerp_(torch.stack([rows.mean(0), rows.var(0)]).detach(), self.rate)
        x = (x - seen[0]) / (seen[1] + 1e-5).sqrt()
        return (x * self.gain[y][:, None, None] + self.offset[y][:, None, None]).clamp(min=0)


def doubled(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv_transpose2d(x.movedim(3, 1), weight, stride=2, padding=1).movedim(1, 3)


class Painter(nn.Module):
    def __init__(self, generator: nn.Module):
        super().__init__()
        stem, up = generator.blocks
        self.grid, self.mood = leaf(stem.deconv.weight), leaf(generator.embed.weight)
        self.norms = nn.ModuleList([ByClass(stem.norm), ByClass(up.norm)])
        self.up, self.last = (leaf(c.weight) for c in (up.deconv, generator.to_rgb))
        self.offset = leaf(generator.to_rgb.bias)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        x = torch.einsum("nc,cohw->nhwo", torch.cat([z, self.mood[y]], 1), self.grid)
        x = self.norms[1](doubled(self.norms[0](x, y), self.up), y)
        return 2 * torch.sigmoid(2 * (doubled(x, self.last) + self.offset)) - 1


class Layer(nn.Module):
    def __init__(self, norm: nn.Module, conv: nn.Module):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)
        self.weight, self.bias, self.axes = leaf(conv.weight), leaf(conv.bias), (1, 2, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x - x.mean(self.axes, True)
        x = x / (x.square().mean(self.axes, True) + 1e-5).sqrt()
        return spatial(F.leaky_relu(x * self.gain + self.offset, 0.2), self.weight, self.bias)


class Judge(nn.Module):
    def __init__(self, critic: nn.Module):
        super().__init__()
        self.first, self.start = leaf(critic.conv_in.weight), leaf(critic.conv_in.bias)
        pairs = ((Layer(b.norm1, b.conv1), Layer(b.norm2, b.conv2)) for b in critic.blocks)
        self.ways = nn.ModuleList(nn.Sequential(*pair) for pair in pairs)
        self.sides = nn.ParameterList(leaf(rows(b.shortcut).T) for b in critic.blocks)
        ends = (critic.linear.weight, critic.embed.weight, critic.linear.bias)
        self.common, self.own, self.level = map(leaf, ends)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = spatial(x, self.first, self.start)
        for way, side in zip(self.ways, self.sides, strict=True):
            x = halved(way(x) + x @ side[:-1] + side[-1])
        return (F.leaky_relu(x, 0.2).mean((1, 2)) * (self.common + self.own[y])).sum(1) + self.level


class WassersteinTree(Port):
    def take(self, model: WGANGP) -> None:
        self.painter, self.judge = Painter(model.generator), Judge(model.critic)
        if self.fault == "wasserstein_second_norm_keeps_a_tenth_of_its_statistics":
            self.painter.norms[1].rate = 0.9
        if self.fault == "wasserstein_second_block_norm_by_pixel":
            self.judge.ways[1][0].axes = (3,)

    def forward(self, real: Tensor, y: Tensor, z: Tensor, anew: Tensor, epsilon: Tensor) -> tuple:
        fake, photo = self.painter(z, y).detach(), real.movedim(1, 3)
        one, two = self.judge(torch.cat([photo, fake]), y.repeat(2)).chunk(2)
        mixed = torch.lerp(fake, photo, epsilon.reshape(-1, 1, 1, 1)).detach()
        with torch.enable_grad():
            total = self.judge(mixed.requires_grad_(), y).sum()
            slope = torch.autograd.grad(total, mixed, create_graph=True)[0]
            axes = 3 if self.fault == "wasserstein_penalty_norm_over_channels_only" else (1, 2, 3)
            penalty = (slope.square().sum(axes).sqrt() - 1).square().mean()
        second = self.painter(anew, y)
        freed = self.fault == "wasserstein_generator_cost_trains_the_critic"
        frozen = {} if freed else {key: weight.detach() for key, weight in self.judge.named_parameters()}
        three = functional_call(self.judge, frozen, (second, y))
        cost = (two - one + DRIFT * one**2 - three).mean() + LAMBDA * penalty
        return fake.movedim(3, 1), second.movedim(3, 1), torch.stack([one, two, three]), penalty, cost


def rows(conv: nn.Module) -> Tensor:
    return torch.cat([conv.weight.flatten(1), conv.bias[:, None]], 1)


class WassersteinFlat(Port):
    def take(self, model: WGANGP) -> None:
        c, (stem, up), last = model.critic, model.generator.blocks, model.generator.to_rgb
        g = [stem.deconv.weight.flatten(1).T, model.generator.embed.weight.T]
        g += [stem.norm.embed.weight.T, up.norm.embed.weight.T, up.deconv.weight, last.weight, last.bias]
        seen = (torch.stack([b.norm.bn.running_mean, b.norm.bn.running_var]) for b in (stem, up))
        self.register_buffer("seen", torch.cat([*seen], 1))
        w = [rows(c.conv_in)]
        for b in c.blocks:
            w += [rows(b.conv1), rows(b.conv2), rows(b.shortcut)]
            w += [pile([norm.weight, norm.bias]) for norm in (b.norm1, b.norm2)]
        w += [torch.cat([c.linear.weight, c.embed.weight]), c.linear.bias]
        self.g, self.c = (nn.ParameterList(map(leaf, each)) for each in (g, w))

    def normal(self, x: Tensor, y: Tensor, i: int) -> Tensor:
        seen = self.seen[:, :20] if i == 0 else self.seen[:, 20:]
        x = F.batch_norm(x, *seen, training=self.training)
        gain, offset = self.g[2 + i].T[y][..., None, None].tensor_split(2, 1)
        return F.relu(torch.addcmul(offset, gain, x))

    def make(self, z: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([z, self.g[1].T[y]], 1) @ self.g[0].T
        x = self.normal(x.unflatten(1, (20, 4, 3)), y, 0)
        x = self.normal(F.conv_transpose2d(x, self.g[4], stride=2, padding=1), y, 1)
        turned = (2,) if self.fault == "wasserstein_last_transposed_kernel_upside_down" else ()
        return F.conv_transpose2d(x, self.g[5].flip(turned), self.g[6], 2, 1).tanh()

    def conv(self, x: Tensor, rows: Tensor, size: int = 3) -> Tensor:
        return (rows[:, :-1] @ F.unfold(x, size, padding=size // 2) + rows[:, -1:]).unflatten(2, x.shape[2:])

    def ready(self, x: Tensor, pair: Tensor, leak: float = 0.2) -> Tensor:
        spread, middle = torch.var_mean(x, (1, 2, 3), correction=0, keepdim=True)
        x = (x - middle) * (spread + 1e-5).rsqrt() * pair[0, :, None, None] + pair[1, :, None, None]
        return x.relu() - leak * (-x).relu()

    def score(self, x: Tensor, y: Tensor, w: list[Tensor]) -> Tensor:
        x = self.conv(x, w[0])
        for i in (1, 6):
            one, two, side, first, then = w[i : i + 5]
            off = self.fault == "wasserstein_first_block_second_leak_of_a_hundredth" and i == 1
            h = self.conv(self.ready(x, first), one)
            h = self.conv(self.ready(h, then, 0.01 if off else 0.2), two)
            x = F.avg_pool2d(h + self.conv(x, side, 1), 2)
        h = (x.relu() - 0.2 * (-x).relu()).flatten(2).mean(2)
        return torch.einsum("nc,nc->n", h, w[11][0] + w[11][1:][y]) + w[12]

    def forward(self, real: Tensor, y: Tensor, z: Tensor, anew: Tensor, epsilon: Tensor) -> tuple:
        w, fault = list(self.c), self.fault
        fake = self.make(z, y).detach()
        one, two = self.score(real, y, w), self.score(fake, y, w)
        between = (fake + epsilon[:, None, None, None] * (real - fake)).detach()
        with torch.enable_grad():
            value = self.score(between.requires_grad_(), y, w).sum()
            graph = fault != "wasserstein_penalty_slope_without_a_graph"
            (slope,) = torch.autograd.grad(value, between, create_graph=graph)
            penalty = (torch.einsum("nchw,nchw->n", slope, slope).sqrt() - 1).pow(2).mean()
        second = self.make(anew, y)
        three = self.score(second, y, [x.detach() for x in w])
        drift = two if fault == "wasserstein_drift_of_the_made_scores" else one
        cost = (two - one - three + DRIFT * drift * drift).mean() + LAMBDA * penalty
        return fake, second, torch.stack([one, two, three]), penalty, cost


TURNED, BN = "a momentum the other way", "generator.blocks.1.norm.bn"
right(task, "wasserstein_tree_with_channels_last", "a tree, channels last, zeros between", WassersteinTree)
right(task, "wasserstein_flat_of_packed_weights", "packed weights, products of patches", WassersteinFlat)
wrong(
    task,
    WassersteinTree,
    wasserstein_second_norm_keeps_a_tenth_of_its_statistics=(TURNED, BN, ("buffer", "eval")),
    wasserstein_second_block_norm_by_pixel=("a norm over fewer axes", "critic.blocks.1.norm1"),
    wasserstein_penalty_norm_over_channels_only=("a norm over fewer axes", "penalty"),
    wasserstein_generator_cost_trains_the_critic=("a missing freeze", "", "weight gradient"),
)
wrong(
    task,
    WassersteinFlat,
    wasserstein_last_transposed_kernel_upside_down=("a flipped kernel", "generator.to_rgb"),
    wasserstein_first_block_second_leak_of_a_hundredth=("another slope", "critic.blocks.0"),
    wasserstein_penalty_slope_without_a_graph=("no second derivative", "penalty", "weight gradient"),
    wasserstein_drift_of_the_made_scores=("another term", ""),
)
