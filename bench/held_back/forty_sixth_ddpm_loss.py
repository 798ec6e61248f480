"""Two ports of a small DDPM objective: a tree with the channels last, and one class of packed rows."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_vision import right, tapped
from bench.held_back._forty_sixth_ddpm_loss import DDPM, GAMMA, GROUPS, STRIDE, stripes, weighed
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

task = few("forty_sixth_ddpm_loss", DDPM, stripes, weighed)


def resnets(unet: nn.Module) -> list[nn.Module]:
    return [x for block in (*unet.down_blocks, unet.mid_block, *unet.up_blocks) for x in block.resnets]


def sheet(layer: nn.Module) -> Tensor:
    return torch.cat([layer.weight.flatten(1), layer.bias[:, None]], 1)


class Taps(nn.Module):
    def __init__(self, conv: nn.Conv2d):
        super().__init__()
        self.kernel, self.offset, self.stride = leaf(conv.weight), leaf(conv.bias), conv.stride[0]

    def forward(self, x: Tensor) -> Tensor:
        return tapped(x, self.kernel, self.stride) + self.offset


class Grouped(nn.Module):
    def __init__(self, norm: nn.GroupNorm):
        super().__init__()
        self.gain, self.offset = leaf(norm.weight), leaf(norm.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = x.unflatten(3, (GROUPS, -1))
        var, mean = torch.var_mean(y, (1, 2, 4), correction=0, keepdim=True)
        return ((y - mean) * (var + 1e-5).rsqrt()).flatten(3) * self.gain + self.offset


class Clock(nn.Module):
    def __init__(self, unet: nn.Module):
        super().__init__()
        self.first, self.second = unet.time_embedding.linear_1, unet.time_embedding.linear_2
        self.labels, self.last = leaf(unet.class_embedding.weight), 1
        layers = [resnet.time_emb_proj for resnet in resnets(unet)]
        self.sizes = [layer.out_features for layer in layers]
        self.fan = leaf(torch.cat([sheet(layer) for layer in layers]).T)

    def forward(self, steps: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        half = self.first.in_features // 2
        angles = steps[:, None] * 10000.0 ** (-torch.arange(half).to(steps) / (half - self.last))
        e = F.silu(self.first(torch.cat([angles.cos(), angles.sin()], 1)))
        e = F.silu(self.second(e) + self.labels[labels])
        return (e @ self.fan[:-1] + self.fan[-1])[:, None, None].split(self.sizes, 3)


class Residual(nn.Module):
    def __init__(self, block: nn.Module):
        super().__init__()
        self.enter, self.one = Grouped(block.norm1), Taps(block.conv1)
        self.middle, self.two = Grouped(block.norm2), Taps(block.conv2)
        self.side = Taps(block.conv_shortcut) if block.conv_shortcut else nn.Identity()
        self.bare = False

    def forward(self, x: Tensor, told: Tensor) -> Tensor:
        y, (scale, shift) = self.middle(self.one(F.silu(self.enter(x)))), told.chunk(2, 3)
        return self.two(F.silu(y * scale + shift + (0 if self.bare else y))) + self.side(x)


class DiffusionOfLastChannels(Port):
    def take(self, model: DDPM) -> None:
        unet = model.unet
        self.clock, self.norm = Clock(unet), Grouped(unet.conv_norm_out)
        self.blocks = nn.ModuleList(map(Residual, resnets(unet)))
        self.begin, self.end = Taps(unet.conv_in), Taps(unet.conv_out)
        ends = unet.down_blocks[0].downsamplers[0], unet.up_blocks[0].upsamplers[0]
        self.down, self.up = map(Taps, ends)
        self.register_buffer("kept", model.scheduler.alphas_cumprod.clone())
        self.clock.last = int(self.fault != "ddpm_loss_frequencies_spread_without_shift")
        self.blocks[3].bare = self.fault == "ddpm_loss_second_middle_block_scales_without_one"

    def velocity(self, x: Tensor, told: tuple[Tensor, ...]) -> Tensor:
        b = self.blocks
        s1 = b[0](s0 := self.begin(x), told[0])
        s3 = b[1](s2 := self.down(s1), told[1])
        if self.fault == "ddpm_loss_first_up_block_holds_a_skip":
            s2 = s2.detach()
        y = b[3](b[2](s3, told[2]), told[3])
        y = b[5](torch.cat([b[4](torch.cat([y, s3], 3), told[4]), s2], 3), told[5])
        y = self.up(y.repeat_interleave(2, 1).repeat_interleave(2, 2))
        y = b[7](torch.cat([b[6](torch.cat([y, s1], 3), told[6]), s0], 3), told[7])
        return self.end(F.silu(self.norm(y)))

    def forward(self, sample, noise, timesteps, class_labels, drop) -> tuple[Tensor, ...]:
        kept = self.kept[timesteps]
        odds = (kept.log() - torch.log1p(-kept))[:, None, None, None]
        clear, dim = odds.sigmoid().sqrt(), (-odds).sigmoid().sqrt()
        noisy, goal = clear * sample + dim * noise, clear * noise - dim * sample
        told = self.clock(timesteps.to(sample), class_labels.masked_fill(drop, -1))
        guess = self.velocity(noisy.movedim(1, 3), told).movedim(3, 1)
        loss = torch.minimum(kept, GAMMA * (1 - kept)) * (guess - goal).square().mean((1, 2, 3))
        before = torch.cat([torch.ones_like(self.kept[:STRIDE]), self.kept])[timesteps][:, None, None, None]
        picture = (clear * noisy - dim * guess).clamp(-1, 1)
        drift = clear * guess + dim * noisy
        if self.fault == "ddpm_loss_ddim_direction_from_the_clipped_picture":
            drift = (noisy - clear * picture) / dim
        past = before.sqrt() * picture + (1 - before).sqrt() * drift
        return (guess, loss) if self.training else (guess, loss, past)


def packed(block: nn.Module) -> Tensor:
    norm, told = torch.stack([block.norm2.weight, block.norm2.bias], 1), sheet(block.time_emb_proj).chunk(2)
    side = [sheet(block.conv_shortcut)] if block.conv_shortcut else []
    return torch.cat([sheet(block.conv1), sheet(block.conv2), norm, *told, *side], 1)


class DiffusionOfRows(Port):
    def take(self, model: DDPM) -> None:
        unet, blocks = model.unet, resnets(model.unet)
        self.rows = nn.ParameterList(map(leaf, map(packed, blocks)))
        norms = [*(block.norm1 for block in blocks), unet.conv_norm_out]
        self.sizes = [len(norm.weight) for norm in norms]
        self.norms = leaf(torch.cat([torch.stack([norm.weight, norm.bias]) for norm in norms], 1))
        down, up = unet.down_blocks[0].downsamplers[0], unet.up_blocks[0].upsamplers[0]
        self.convs = nn.ParameterList(leaf(sheet(x)) for x in (unet.conv_in, down, up, unet.conv_out))
        self.time = nn.ParameterList(leaf(sheet(x)) for x in [*unet.time_embedding.children()][::2])
        self.labels = leaf(unet.class_embedding.weight)
        self.register_buffer("bar", model.scheduler.alphas_cumprod.clone())

    def conv(self, x: Tensor, rows: Tensor, **how: int) -> Tensor:
        size = math.isqrt(rows.shape[1] // x.shape[1])
        return F.conv2d(x, rows[:, :-1].reshape(len(rows), -1, size, size), rows[:, -1], **how)

    def block(self, i: int, x: Tensor, e: Tensor) -> Tensor:
        rows, pair = self.rows[i], self.norms.split(self.sizes, 1)[i]
        sizes = [9 * x.shape[1] + 1, 9 * len(rows) + 1, 2, e.shape[1] + 1, e.shape[1] + 1]
        one, two, norm, scale, shift, side = rows.split([*sizes, rows.shape[1] - sum(sizes)], 1)
        if self.fault == "ddpm_loss_seventh_block_told_a_constant_time" and i == 6:
            e = e.detach()
        scale, shift = (F.linear(e, w[:, :-1], w[:, -1])[:, :, None, None] for w in (scale, shift))
        y = self.conv(F.silu(F.group_norm(x, GROUPS, *pair)), one, padding=1)
        y = F.group_norm(y, GROUPS, *norm.T)
        y = self.conv(F.silu(y * (1 + scale) + shift), two, padding=1)
        return y + (self.conv(x, side) if side.numel() else x)

    def forward(self, sample, noise, timesteps, class_labels, drop) -> tuple[Tensor, ...]:
        bar = self.bar[timesteps].view(-1, 1, 1, 1)
        noisy = bar.sqrt() * sample + (1 - bar).sqrt() * noise
        one, two = self.time
        waves = 1e4 ** torch.linspace(0, 1, one.shape[1] // 2, dtype=sample.dtype)
        angle = timesteps[:, None] / waves.to(sample)
        e = F.silu(F.linear(torch.cat([angle.cos(), angle.sin()], 1), one[:, :-1], one[:, -1]))
        e = F.silu(F.linear(e, two[:, :-1], two[:, -1]) + self.labels[class_labels.masked_fill(drop, -1)])
        x = self.conv(noisy, self.convs[0], padding=1)
        held = [x, x := self.block(0, x, e)]
        near = int(self.fault != "ddpm_loss_downsampling_padded_at_the_far_edges")
        x = self.conv(F.pad(x, (near, 1) * 2), self.convs[1], stride=2)
        held += [x, x := self.block(1, x, e)]
        x = self.block(3, self.block(2, x, e), e)
        for i in range(4, 8):
            x = self.block(i, torch.cat([x, held.pop()], 1), e)
            if i == 5:
                x = self.conv(torch.kron(x, torch.ones(2, 2).to(x)), self.convs[2], padding=1)
        eps = 1e-3 if self.fault == "ddpm_loss_last_norm_with_a_hundredfold_epsilon" else 1e-5
        x = F.silu(F.group_norm(x, GROUPS, *self.norms.split(self.sizes, 1)[8], eps))
        v = self.conv(x, self.convs[3], padding=1)
        snr = (bar / (1 - bar)).flatten()
        share = snr if self.fault == "ddpm_loss_weight_of_noise_prediction" else snr + 1
        error = v - bar.sqrt() * noise + (1 - bar).sqrt() * sample
        loss = error.pow(2).flatten(1).mean(1) * (snr.clamp(max=GAMMA) / share)
        past = torch.where(timesteps < STRIDE, 1.0, self.bar[timesteps - STRIDE]).view(-1, 1, 1, 1)
        clean = (bar.sqrt() * noisy - (1 - bar).sqrt() * v).clamp(-1, 1)
        step = past.sqrt() * clean + (1 - past).sqrt() * (bar.sqrt() * v + (1 - bar).sqrt() * noisy)
        return (v, loss) if self.training else (v, loss, step)


right(task, "ddpm_loss_with_channels_last", "a tree, fused modulations", DiffusionOfLastChannels)
right(task, "ddpm_loss_of_packed_rows", "packed rows, functions", DiffusionOfRows)
BOTH, UP = ("input gradient", "weight gradient"), "unet.up_blocks.1.resnets.0"
wrong(
    task,
    DiffusionOfLastChannels,
    ddpm_loss_frequencies_spread_without_shift=("a count off by one", "unet.time_proj"),
    ddpm_loss_second_middle_block_scales_without_one=("a term left out", "unet.mid_block.resnets.1"),
    ddpm_loss_first_up_block_holds_a_skip=("detach", "unet.up_blocks.0", BOTH),
    ddpm_loss_ddim_direction_from_the_clipped_picture=("another formula in eval", ("scheduler", ""), "eval"),
)
wrong(
    task,
    DiffusionOfRows,
    ddpm_loss_downsampling_padded_at_the_far_edges=("another padding", "unet.down_blocks.0.downsamplers.0"),
    ddpm_loss_seventh_block_told_a_constant_time=("detach", UP, BOTH),
    ddpm_loss_last_norm_with_a_hundredfold_epsilon=("another epsilon", "unet.conv_norm_out"),
    ddpm_loss_weight_of_noise_prediction=("another weight", ""),
)
