"""A small EDM-preconditioned score network: a DDPM++ UNet of two levels, with class and augment labels."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, HIGH, WIDE, PICTURES = 3, 8, 12, 5
CLASSES, AUGMENTS, NOISE, EMBED, WIDTHS, BLOCKS = 7, 9, 16, 28, (12, 20), 1
SIGMA_DATA = 0.5


def drawn(module: nn.Module, size: float = 0.8) -> nn.Module:
    """The module with random weights, those of a norm about one."""
    norm = isinstance(module, nn.GroupNorm)
    for name, value in module.named_parameters():
        if name == "bias":
            nn.init.normal_(value, std=0.1)
        else:
            nn.init.normal_(value, float(norm), 0.2 if norm else size / math.sqrt(value[0].numel()))
    return module


def group_norm(channels: int) -> nn.Module:
    return drawn(nn.GroupNorm(min(32, channels // 4), channels, eps=1e-6))


class Conv2d(nn.Module):
    """A convolution after a resampling by a filter; a kernel of zero is the resampling alone."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, up: bool = False, down=False):
        super().__init__()
        self.in_channels, self.out_channels, self.up, self.down = in_channels, out_channels, up, down
        shape = out_channels, in_channels, kernel, kernel
        self.weight = nn.Parameter(torch.empty(shape)) if kernel else None
        self.bias = nn.Parameter(torch.empty(out_channels)) if kernel else None
        drawn(self)
        f = torch.tensor([1.0, 3.0, 3.0, 1.0])
        self.register_buffer("resample_filter", f.outer(f)[None, None] / f.sum() ** 2 if up or down else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.up or self.down:
            f, count = self.resample_filter, self.in_channels
            f_pad = (f.shape[-1] - 1) // 2
            f = f.tile(count, 1, 1, 1)
            if self.up:
                x = F.conv_transpose2d(x, f * 4, groups=count, stride=2, padding=f_pad)
            if self.down:
                x = F.conv2d(x, f, groups=count, stride=2, padding=f_pad)
        if self.weight is not None:
            x = F.conv2d(x, self.weight, padding=self.weight.shape[-1] // 2)
            x = x + self.bias[:, None, None]
        return x


class UNetBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, **resample: bool):
        super().__init__()
        self.in_channels, self.out_channels, self.skip_scale = in_channels, out_channels, math.sqrt(0.5)
        self.norm0 = group_norm(in_channels)
        self.conv0 = Conv2d(in_channels, out_channels, 3, **resample)
        self.affine = drawn(nn.Linear(EMBED, 2 * out_channels))
        self.norm1 = group_norm(out_channels)
        self.conv1 = Conv2d(out_channels, out_channels, 3)
        self.skip = None
        if resample or in_channels != out_channels:
            self.skip = Conv2d(in_channels, out_channels, int(in_channels != out_channels), **resample)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        orig = x
        x = self.conv0(F.silu(self.norm0(x)))
        scale, shift = self.affine(emb)[:, :, None, None].chunk(2, 1)
        x = F.silu(torch.addcmul(shift, self.norm1(x), scale + 1))
        x = self.conv1(x) + (orig if self.skip is None else self.skip(orig))
        return x * self.skip_scale


class PositionalEmbedding(nn.Module):
    def __init__(self, num_channels: int, max_positions: int = 10000):
        super().__init__()
        self.num_channels, self.max_positions = num_channels, max_positions

    def forward(self, x: Tensor) -> Tensor:
        half = self.num_channels // 2
        freqs = torch.arange(half, dtype=x.dtype, device=x.device) / (half - 1)
        x = x.outer((1 / self.max_positions) ** freqs)
        return torch.cat([x.cos(), x.sin()], 1)


class SongUNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.map_noise = PositionalEmbedding(NOISE)
        self.map_label = drawn(nn.Linear(CLASSES, NOISE))
        self.map_augment = drawn(nn.Linear(AUGMENTS, NOISE, bias=False))
        self.map_layer0, self.map_layer1 = drawn(nn.Linear(NOISE, EMBED)), drawn(nn.Linear(EMBED, EMBED))
        self.enc, self.dec, cout = nn.ModuleDict(), nn.ModuleDict(), COLOURS
        names = [f"{HIGH >> level}x{WIDE >> level}" for level in range(len(WIDTHS))]
        for level, (res, width) in enumerate(zip(names, WIDTHS, strict=True)):
            if level == 0:
                self.enc[f"{res}_conv"], cout = Conv2d(COLOURS, width, 3), width
            else:
                self.enc[f"{res}_down"] = UNetBlock(cout, cout, down=True)
            for i in range(BLOCKS):
                self.enc[f"{res}_block{i}"], cout = UNetBlock(cout, width), width
        skips = [block.out_channels for block in self.enc.values()]
        for level, (res, width) in reversed([*enumerate(zip(names, WIDTHS, strict=True))]):
            if level == len(WIDTHS) - 1:
                self.dec[f"{res}_in0"] = UNetBlock(cout, cout)
                self.dec[f"{res}_in1"] = UNetBlock(cout, cout)
            else:
                self.dec[f"{res}_up"] = UNetBlock(cout, cout, up=True)
            for i in range(BLOCKS + 1):
                self.dec[f"{res}_block{i}"] = UNetBlock(cout + skips.pop(), width)
                cout = width
        self.dec[f"{names[0]}_aux_norm"] = group_norm(cout)
        self.dec[f"{names[0]}_aux_conv"] = Conv2d(cout, COLOURS, 3)

    def forward(self, x: Tensor, noise_labels: Tensor, class_labels: Tensor, augment_labels: Tensor):
        emb = self.map_noise(noise_labels)
        emb = emb.reshape(len(emb), 2, -1).flip(1).reshape(emb.shape)
        emb = emb + self.map_label(class_labels * math.sqrt(self.map_label.in_features))
        emb = emb + self.map_augment(augment_labels)
        emb = F.silu(self.map_layer0(emb))
        emb = F.silu(self.map_layer1(emb))
        skips = []
        for block in self.enc.values():
            x = block(x, emb) if isinstance(block, UNetBlock) else block(x)
            skips.append(x)
        for name, block in self.dec.items():
            if "aux_norm" in name:
                x = F.silu(block(x))
            elif "aux_conv" in name:
                x = block(x)
            else:
                if x.shape[1] != block.in_channels:
                    x = torch.cat([x, skips.pop()], 1)
                x = block(x, emb)
        return x


class EDMPrecond(nn.Module):
    """Noisy pictures, their noise's size, one-hot classes and augment labels -> clean pictures."""

    def __init__(self):
        super().__init__()
        self.sigma_data, self.model = SIGMA_DATA, SongUNet()

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor, augment_labels: Tensor) -> Tensor:
        sigma = sigma.reshape(-1, 1, 1, 1)
        c_skip = self.sigma_data**2 / (sigma**2 + self.sigma_data**2)
        c_out = sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()
        c_in = 1 / (self.sigma_data**2 + sigma**2).sqrt()
        c_noise = sigma.log() / 4
        return c_skip * x + c_out * self.model(c_in * x, c_noise.flatten(), class_labels, augment_labels)


def noisy() -> tuple[dict[str, Tensor], Tensor]:
    """Waves by class under noise; the target is the clean picture with its weight as one more channel."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    tone = 2 * torch.arange(COLOURS)[:, None, None] + 6 * torch.rand(PICTURES, 1, 1, 1)
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    clean = torch.sin(turn.cos() * across + turn.sin() * down + tone)
    clean, sigma = 0.7 * clean, (1.2 * torch.randn(PICTURES) - 1.2).exp().clamp(0.05, 5)
    weight = ((sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2)[:, None, None, None]
    x = clean + sigma[:, None, None, None] * torch.randn_like(clean)
    augment = torch.randn(PICTURES, AUGMENTS) * (torch.rand(PICTURES, AUGMENTS) < 0.6)
    inputs = {"x": x, "sigma": sigma, "class_labels": F.one_hot(label, CLASSES).to(x)}
    inputs["augment_labels"] = augment
    return inputs, torch.cat([clean, weight.expand_as(clean[:, :1])], 1)


def denoising(output: Tensor, target: Tensor) -> Tensor:
    """The weighted squared error, by four."""
    return (target[:, COLOURS:] * (output - target[:, :COLOURS]) ** 2).mean() / 4
