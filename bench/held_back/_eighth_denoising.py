"""A denoising U-Net of signals: blocks scaled and shifted by the time, attention at the lowest level."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, LENGTH, FASTEST = 8, 2, 4, 16, 100.0


class Waves(nn.Module):
    """Times [N] in [0, 1] -> sines, then cosines [N, C]."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width

    def forward(self, times: Tensor) -> Tensor:
        half = self.width // 2
        steps = torch.arange(half, dtype=times.dtype, device=times.device)
        angles = FASTEST * times[:, None] * torch.exp(-math.log(FASTEST) * steps / half)
        return torch.cat([angles.sin(), angles.cos()], 1)


class Block(nn.Module):
    """Two convolutions; the time scales and shifts what comes between them."""

    def __init__(self, before: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, before), nn.Conv1d(before, WIDTH, 3, padding=1)
        self.time = nn.Linear(WIDTH, 2 * WIDTH)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.skip = nn.Identity() if before == WIDTH else nn.Conv1d(before, WIDTH, 1)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        scale, shift = self.time(F.silu(time))[..., None].chunk(2, 1)
        h = self.norm2(h) * (1 + scale) + shift
        return self.skip(x) + self.conv2(F.silu(h))


class Attention(nn.Module):
    """Of each place of a signal over all."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, WIDTH)
        self.qkv, self.out = nn.Conv1d(WIDTH, 3 * WIDTH, 1, bias=False), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(1, (3, HEADS, -1)).transpose(3, 4).unbind(1)
        mixed = F.scaled_dot_product_attention(q, k, v)
        return x + self.out(mixed.transpose(2, 3).flatten(1, 2))


class Middle(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.attention, self.last = Block(WIDTH), Attention(), Block(WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        return self.last(self.attention(self.first(x, time)), time)


class Down(nn.Module):
    """What goes on at half the length, and what is kept for the way up."""

    def __init__(self):
        super().__init__()
        self.block, self.shrink = Block(WIDTH), nn.Conv1d(WIDTH, WIDTH, 3, stride=2, padding=1)

    def forward(self, x: Tensor, time: Tensor) -> tuple[Tensor, Tensor]:
        x = self.block(x, time)
        return self.shrink(x), x


class Grow(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class Up(nn.Module):
    def __init__(self):
        super().__init__()
        self.grow, self.block = Grow(), Block(2 * WIDTH)

    def forward(self, x: Tensor, kept: Tensor, time: Tensor) -> Tensor:
        return self.block(torch.cat([self.grow(x), kept], 1), time)


class Clean(nn.Module):
    """The signal without the noise, within its bounds once the network has learnt."""

    def forward(self, x: Tensor, noise: Tensor, times: Tensor) -> Tensor:
        angle = 0.5 * math.pi * times[:, None, None]
        clean = (x - angle.sin() * noise) / angle.cos()
        return clean if self.training else clean.clamp(-1, 1)


class Denoiser(nn.Module):
    """Signals [N, 1, 16] with noise and times [N] -> the noise and the signals without it."""

    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(Waves(WIDTH), nn.Linear(WIDTH, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))
        self.enter = nn.Conv1d(1, WIDTH, 3, padding=1)
        self.downs, self.middle = nn.ModuleList(Down() for _ in range(2)), Middle()
        self.ups = nn.ModuleList(Up() for _ in range(2))
        self.finish = nn.Sequential(nn.GroupNorm(GROUPS, WIDTH), nn.SiLU(), nn.Conv1d(WIDTH, 1, 3, padding=1))
        self.clean = Clean()

    def forward(self, x: Tensor, times: Tensor) -> dict[str, Tensor]:
        time, h, kept = self.time(times), self.enter(x), []
        for down in self.downs:
            h, skip = down(h, time)
            kept.append(skip)
        h = self.middle(h, time)
        for up in self.ups:
            h = up(h, kept.pop(), time)
        noise = self.finish(h)
        return {"noise": noise, "clean": self.clean(x, noise, times)}


def signals() -> tuple[dict[str, Tensor], Tensor]:
    """Sines and steps in noise; the targets are the noise and the signals."""
    places = torch.linspace(0, 1, LENGTH)
    waves = (6.0 * (1 + torch.rand(12, 1)) * places + 6.0 * torch.rand(12, 1)).sin()
    steps = (places - torch.rand(12, 1)).sign()
    clean = 0.9 * torch.where(torch.rand(12, 1) < 0.6, waves, steps)
    noise, times = torch.randn(12, LENGTH), 0.1 + 0.7 * torch.rand(12)
    angle = 0.5 * math.pi * times[:, None]
    x = angle.cos() * clean + angle.sin() * noise
    return {"x": x[:, None], "times": times}, torch.stack([noise, clean], 1)


def missed(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    target = target.to(outputs["noise"])
    noise = F.mse_loss(outputs["noise"], target[:, :1])
    return noise + 0.1 * F.mse_loss(outputs["clean"], target[:, 1:])
