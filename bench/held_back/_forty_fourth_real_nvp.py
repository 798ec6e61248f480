"""A small RealNVP: masked affine couplings at two scales, with half the channels factored out between."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, BINS, PICTURES = 3, 8, 12, 256, 4
MIDDLE, BLOCKS, SCALES = 7, 2, 2


def checkerboard_mask(height: int, width: int, reverse_mask: bool = False) -> Tensor:
    mask = (torch.arange(height)[:, None] + torch.arange(width)) % 2
    return (1 - mask if reverse_mask else mask)[None, None].float()


def channel_mask(channels: int, reverse_mask: bool = False) -> Tensor:
    """Ones for the second half of the channels, or for the first."""
    mask = (torch.arange(channels) >= channels // 2).float()
    return (1 - mask if reverse_mask else mask)[None, :, None, None]


def squeeze_2x2(x: Tensor, reverse: bool = False, alt_order: bool = False) -> Tensor:
    """[N, C, H, W] -> [N, 4 C, H / 2, W / 2]; in the alternative order opposite corners are neighbours."""
    if not alt_order:
        return F.pixel_shuffle(x, 2) if reverse else F.pixel_unshuffle(x, 2)
    channels = x.shape[1] // 4 if reverse else x.shape[1]
    corners = torch.eye(4).to(x)[[0, 3, 1, 2]].view(4, 1, 1, 2, 2)
    weight = (corners * torch.eye(channels).to(x)[:, :, None, None]).flatten(0, 1)
    return F.conv_transpose2d(x, weight, stride=2) if reverse else F.conv2d(x, weight, stride=2)


class WNConv2d(nn.Module):
    """A weight-normalised convolution."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int):
        super().__init__()
        self.padding = kernel_size // 2
        self.weight_v = nn.Parameter(0.1 * torch.randn(out_channels, in_channels, kernel_size, kernel_size))
        self.weight_g = nn.Parameter(0.5 + 0.3 * torch.rand(out_channels, 1, 1, 1))
        self.bias = nn.Parameter(0.1 * torch.randn(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        norm = self.weight_v.square().sum((1, 2, 3), keepdim=True).sqrt()
        return F.conv2d(x, self.weight_g * self.weight_v / norm, self.bias, padding=self.padding)


class ResidualBlock(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.in_conv, self.out_conv = WNConv2d(channels, channels, 3), WNConv2d(channels, channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_conv(F.relu(self.in_conv(F.relu(x)))) + x


class ResNet(nn.Module):
    """Residual blocks, of which a skip connection each adds to what comes out."""

    def __init__(self, in_channels: int, mid_channels: int, out_channels: int):
        super().__init__()
        self.in_conv = WNConv2d(2 * in_channels, mid_channels, 3)
        self.in_skip = WNConv2d(mid_channels, mid_channels, 1)
        self.blocks = nn.ModuleList(ResidualBlock(mid_channels) for _ in range(BLOCKS))
        self.skips = nn.ModuleList(WNConv2d(mid_channels, mid_channels, 1) for _ in range(BLOCKS))
        self.out_conv = WNConv2d(mid_channels, out_channels, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.in_conv(F.relu(torch.cat((x, -x), dim=1)))
        x_skip = self.in_skip(x)
        for block, skip in zip(self.blocks, self.skips, strict=True):
            x = block(x)
            x_skip = x_skip + skip(x)
        return self.out_conv(F.relu(x_skip))


class Rescale(nn.Module):
    """A learned factor for each channel."""

    def __init__(self, num_channels: int):
        super().__init__()
        self.weight = nn.Parameter(0.3 + 0.4 * torch.rand(num_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class CouplingLayer(nn.Module):
    """Keeps what the mask lets through, and changes the rest by a scale and a translation that read it."""

    def __init__(self, channels: int, mid_channels: int, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask)
        self.st_net = ResNet(channels, mid_channels, 2 * channels)
        self.rescale = Rescale(channels)

    def forward(self, x: Tensor, sldj: Tensor) -> tuple[Tensor, Tensor]:
        s, t = self.st_net(x * self.mask).chunk(2, dim=1)
        s = self.rescale(torch.tanh(s)) * (1 - self.mask)
        t = t * (1 - self.mask)
        return (x + t) * s.exp(), sldj + s.flatten(1).sum(-1)


class BatchNorm(nn.Module):
    """Batch norm as a layer of the flow."""

    def __init__(self, num_channels: int, momentum: float = 0.1, eps: float = 1e-5):
        super().__init__()
        self.momentum, self.eps = momentum, eps
        self.log_gamma = nn.Parameter(0.2 * torch.randn(num_channels))
        self.beta = nn.Parameter(0.2 * torch.randn(num_channels))
        self.register_buffer("running_mean", 0.3 * torch.randn(num_channels))
        self.register_buffer("running_var", 1 + torch.rand(num_channels))

    def forward(self, x: Tensor, sldj: Tensor) -> tuple[Tensor, Tensor]:
        mean, var = self.running_mean, self.running_var
        if self.training:
            mean = x.mean((0, 2, 3))
            var = (x - mean[:, None, None]).square().mean((0, 2, 3))
            with torch.no_grad():
                self.running_mean.mul_(1 - self.momentum).add_(self.momentum * mean)
                self.running_var.mul_(1 - self.momentum).add_(self.momentum * var)
        x_hat = (x - mean[:, None, None]) / (var + self.eps).sqrt()[:, None, None]
        y = self.log_gamma.exp()[:, None, None] * x_hat + self.beta[:, None, None]
        ldj = self.log_gamma - 0.5 * torch.log(var + self.eps)
        return y, sldj + ldj.sum() * x.shape[2] * x.shape[3]


class _RealNVP(nn.Module):
    """One scale, and the next one inside."""

    def __init__(self, scale: int, channels: int, mid: int, height: int, width: int):
        super().__init__()
        self.is_last_block = scale == SCALES - 1
        masks = [checkerboard_mask(height, width, reverse) for reverse in (False, True)]
        self.in_couplings = nn.ModuleList(CouplingLayer(channels, mid, mask) for mask in masks)
        if not self.is_last_block:
            self.norm = BatchNorm(channels)
            masks = [channel_mask(4 * channels, reverse) for reverse in (False, True)]
            self.out_couplings = nn.ModuleList(CouplingLayer(4 * channels, 2 * mid, mask) for mask in masks)
            self.next_block = _RealNVP(scale + 1, 2 * channels, 2 * mid, height // 2, width // 2)

    def forward(self, x: Tensor, sldj: Tensor) -> tuple[Tensor, Tensor]:
        for coupling in self.in_couplings:
            x, sldj = coupling(x, sldj)
        if self.is_last_block:
            return x, sldj
        x, sldj = self.norm(x, sldj)
        x = squeeze_2x2(x)
        for coupling in self.out_couplings:
            x, sldj = coupling(x, sldj)
        x = squeeze_2x2(squeeze_2x2(x, reverse=True), alt_order=True)
        x, x_split = x.chunk(2, dim=1)
        x, sldj = self.next_block(x, sldj)
        return squeeze_2x2(torch.cat((x, x_split), dim=1), reverse=True, alt_order=True), sldj


class RealNVP(nn.Module):
    """Pictures from zero to one, and noise -> latents in the place of pixels, and bits per dimension."""

    def __init__(self):
        super().__init__()
        self.register_buffer("data_constraint", torch.tensor([0.9]))
        self.flows = _RealNVP(0, CHANNELS, MIDDLE, HIGH, WIDE)

    def pre_process(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Dequantised logits, and the logarithm of what they stretch."""
        y = (x * (BINS - 1) + noise) / BINS
        y = ((2 * y - 1) * self.data_constraint + 1) / 2
        y = y.log() - (1 - y).log()
        edge = (1 - self.data_constraint).log() - self.data_constraint.log()
        return y, (F.softplus(y) + F.softplus(-y) - F.softplus(edge)).flatten(1).sum(-1)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        z, sldj = self.flows(*self.pre_process(x, noise))
        prior_ll = (-0.5 * (z**2 + math.log(2 * math.pi))).flatten(1).sum(-1)
        dimensions = x[0].numel()
        nll = math.log(BINS) * dimensions - prior_ll - sldj
        return z, nll / (math.log(2) * dimensions)


def waves() -> tuple[dict[str, Tensor], Tensor]:
    """Waves in bins; the target, by which the pictures weigh, is how bright they are."""
    turn, phase = 3 * torch.rand(2, PICTURES, 1, 1, 1)
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    tone = 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + 2 * phase) + torch.cos(2 * turn + tone)
    bright = 0.5 + 0.2 * wave + 0.03 * torch.randn_like(wave)
    x = (bright * BINS).floor().clamp(0, BINS - 1) / (BINS - 1)
    return {"x": x, "noise": torch.rand_like(x)}, 0.5 + x.mean((1, 2, 3))


def weighed_bits(outputs: tuple[Tensor, Tensor], weight: Tensor) -> Tensor:
    return (weight * outputs[1]).mean() / 8
