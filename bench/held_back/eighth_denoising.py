"""A port of a denoising U-Net: channels last, windows in one product, all scales and shifts at once."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._eighth_denoising import FASTEST, GROUPS, HEADS, WIDTH, Block, Denoiser, missed, signals
from bench.held_back._fifth_vision import right
from bench.held_back._fourth_ports import Port, leaf, wrong
from bench.held_back._sixth_ports import few

denoiser = few("eighth_denoising", Denoiser, signals, missed)
BLOCKS = ("downs.0.block", "downs.1.block", "middle.first", "middle.last", "ups.0.block", "ups.1.block")


def tap(x: Tensor, weight: Tensor, bias: Tensor, stride: int = 1, ahead: int = 1) -> Tensor:
    """A convolution of [N, L, C] with [3 C, O]; ``ahead`` zeros stand before the signal."""
    windows = F.pad(x, (0, 0, ahead, 2 - ahead)).unfold(1, 3, stride)[:, : x.shape[1] // stride]
    return windows.transpose(2, 3).flatten(2) @ weight + bias


def grouped(x: Tensor, affine: Tensor, fixed: bool = False) -> Tensor:
    """A group norm of [N, L, C]; ``fixed`` statistics carry no gradient."""
    groups = x.unflatten(2, (GROUPS, -1))
    mean = groups.mean((1, 3), keepdim=True)
    spread = (groups * groups).mean((1, 3), keepdim=True) - mean * mean
    if fixed:
        mean, spread = mean.detach(), spread.detach()
    return ((groups - mean) / (spread + 1e-5).sqrt()).flatten(2) * affine[0] + affine[1]


def taps(conv: nn.Conv1d) -> nn.Parameter:
    return leaf(conv.weight.permute(2, 1, 0).flatten(0, 1))


class ChannelsLast(Port):
    """Signals [N, L, C]; on the way up what was kept stands before what comes from below."""

    def take(self, model: Denoiser) -> None:
        self.w = nn.ParameterDict()
        blocks = [model.get_submodule(name) for name in BLOCKS]
        for i, block in enumerate(blocks):
            self.add_block(i, block)
        self.w["times"] = leaf(torch.cat([block.time.weight for block in blocks]).T)
        self.w["times_b"] = leaf(torch.cat([block.time.bias for block in blocks]))
        convs = {f"shrink{i}": down.shrink for i, down in enumerate(model.downs)}
        convs |= {f"grow{i}": up.grow.conv for i, up in enumerate(model.ups)}
        for name, conv in (convs | {"enter": model.enter, "finish": model.finish[2]}).items():
            self.w[name], self.w[name + "_b"] = taps(conv), leaf(conv.bias)
        for name, linear in (("time0", model.time[1]), ("time1", model.time[3])):
            self.w[name], self.w[name + "_b"] = leaf(linear.weight.T), leaf(linear.bias)
        for name, norm in (("finish_norm", model.finish[0]), ("attend_norm", model.middle.attention.norm)):
            self.w[name] = leaf(torch.stack([norm.weight, norm.bias]))
        at = model.middle.attention
        self.w["qkv"] = leaf(at.qkv.weight[..., 0].unflatten(0, (3, HEADS, -1)).transpose(2, 3))
        self.w["merge"] = leaf(at.out.weight[..., 0].T.unflatten(0, (HEADS, -1)))
        self.w["merge_b"] = leaf(at.out.bias)

    def add_block(self, i: int, block: Block) -> None:
        turn = WIDTH if block.conv1.in_channels > WIDTH else 0
        first = block.conv1.weight.roll(turn, 1)
        self.w[f"a{i}"] = leaf(first.permute(2, 1, 0).flatten(0, 1))
        self.w[f"b{i}"] = taps(block.conv2)
        self.w[f"ab{i}"] = leaf(torch.stack([block.conv1.bias, block.conv2.bias]))
        norm1, norm2 = block.norm1, block.norm2
        self.w[f"m{i}"] = leaf(torch.stack([norm1.weight, norm1.bias]).roll(turn, 1))
        self.w[f"n{i}"] = leaf(torch.stack([norm2.weight, norm2.bias]))
        if turn:
            self.w[f"past{i}"] = leaf(block.skip.weight[..., 0].roll(turn, 1).T)
            self.w[f"past_b{i}"] = leaf(block.skip.bias)

    def block(self, i: int, x: Tensor, times: Tensor) -> Tensor:
        w, shifts = self.w, self.w[f"ab{i}"]
        fixed = self.fault == "statistics_of_one_norm_held_fixed" and i == 1
        h = tap(F.silu(grouped(x, w[f"m{i}"], fixed)), w[f"a{i}"], shifts[0])
        scale, shift = times[:, None, i].tensor_split(2, 2)
        if self.fault == "time_enters_one_block_before_its_norm" and i == 4:
            h = grouped(h + h * scale + shift, w[f"n{i}"])
        else:
            h = grouped(h, w[f"n{i}"])
            h = h + h * scale + shift
        past = x @ w[f"past{i}"] + w[f"past_b{i}"] if f"past{i}" in w else x
        return tap(F.silu(h), w[f"b{i}"], shifts[1]) + past

    def attend(self, x: Tensor) -> Tensor:
        normed = grouped(x, self.w["attend_norm"])
        q, k, v = torch.einsum("nlc,jhcd->jnhld", normed, self.w["qkv"])
        scores = torch.einsum("nhqd,nhkd->nhqk", q, k) / math.sqrt(WIDTH // HEADS)
        mixed = torch.einsum("nhqk,nhkd,hdo->nqo", scores.softmax(3), v, self.w["merge"])
        past = normed if self.fault == "attention_added_to_the_normed_signal" else x
        return past + mixed + self.w["merge_b"]

    def moments(self, times: Tensor) -> Tensor:
        """All scales and shifts [N, B, 2 C]."""
        w, half = self.w, WIDTH // 2
        last = half - 1 if self.fault == "slowest_wave_at_the_very_end" else half
        rates = FASTEST ** (1 - torch.arange(half, dtype=times.dtype, device=times.device) / last)
        angles = torch.outer(times, rates)
        waves = torch.stack([angles.sin(), angles.cos()], 1).flatten(1)
        time = F.silu(waves @ w["time0"] + w["time0_b"]) @ w["time1"] + w["time1_b"]
        return (F.silu(time) @ w["times"] + w["times_b"]).unflatten(1, (len(BLOCKS), -1))

    def forward(self, x: Tensor, times: Tensor) -> dict[str, Tensor]:
        w, moments, kept = self.w, self.moments(times), []
        h = tap(x.transpose(1, 2), w["enter"], w["enter_b"])
        for i in range(2):
            h = self.block(i, h, moments)
            kept.append(h)
            ahead = 0 if self.fault == "second_halving_padded_at_the_end_alone" and i == 1 else 1
            h = tap(h, w[f"shrink{i}"], w[f"shrink{i}_b"], 2, ahead)
        h = self.block(3, self.attend(self.block(2, h, moments)), moments)
        for i in range(2):
            h = tap(h.repeat_interleave(2, 1), w[f"grow{i}"], w[f"grow{i}_b"])
            h = self.block(4 + i, torch.cat([kept[1 - i], h], 2), moments)
        h = F.silu(grouped(h, w["finish_norm"]))
        noise = tap(h, w["finish"], w["finish_b"]).transpose(1, 2)
        angle = (math.pi / 2) * times.view(-1, 1, 1)
        clean = x / angle.cos() - angle.tan() * noise
        if not self.training and self.fault != "bounds_of_the_signal_forgotten_in_eval":
            clean = clean.clip(-1.0, 1.0)
        return {"noise": noise, "clean": clean}


right(denoiser, "denoiser_with_channels_last", "channels last, all scales and shifts at once", ChannelsLast)
wrong(
    denoiser,
    ChannelsLast,
    slowest_wave_at_the_very_end=("frequencies spaced otherwise", "time.0"),
    time_enters_one_block_before_its_norm=("order of a norm and a scale", "ups.0.block"),
    second_halving_padded_at_the_end_alone=("padding at one side", "downs.1.shrink"),
    attention_added_to_the_normed_signal=("residual taken at another point", "middle.attention"),
    statistics_of_one_norm_held_fixed=(
        "a detach too many",
        "downs.1.block.norm1",
        ("input gradient", "weight gradient"),
    ),
    bounds_of_the_signal_forgotten_in_eval=("wrong in eval mode alone", "clean", "eval"),
)
