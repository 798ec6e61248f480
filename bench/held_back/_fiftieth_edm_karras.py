"""A small denoiser of Karras et al. (EDM): a preconditioned U-Net of pictures, noise levels and classes."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import silu

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 8, 12, 5, 3
NOISE, EMB, WIDTHS, PER_HEAD, SIGMA_DATA = 14, 18, (12, 20), 10, 0.5


def drawn(*shape: int, std: float, mean: float = 0.0) -> nn.Parameter:
    return nn.Parameter(mean + std * torch.randn(shape))


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.in_features = in_features
        self.weight = drawn(out_features, in_features, std=0.6 / math.sqrt(in_features))
        self.bias = drawn(out_features, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.t() + self.bias


class Conv2d(nn.Module):
    """A convolution, after a doubling or a halving of the picture by a box filter."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int, up=False, down=False):
        super().__init__()
        self.in_channels, self.up, self.down = in_channels, up, down
        self.weight = drawn(out_channels, in_channels, kernel, kernel, std=0.7 / kernel / in_channels**0.5)
        self.bias = drawn(out_channels, std=0.1)
        f = torch.ones(2)
        self.register_buffer("resample_filter", f.ger(f)[None, None] / f.sum() ** 2 if up or down else None)

    def forward(self, x: Tensor) -> Tensor:
        if self.up:
            f = self.resample_filter.mul(4).tile([self.in_channels, 1, 1, 1])
            x = F.conv_transpose2d(x, f, groups=self.in_channels, stride=2)
        if self.down:
            f = self.resample_filter.tile([self.in_channels, 1, 1, 1])
            x = F.conv2d(x, f, groups=self.in_channels, stride=2)
        return F.conv2d(x, self.weight, self.bias, padding=self.weight.shape[-1] // 2)


class GroupNorm(nn.Module):
    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__()
        self.num_groups, self.eps = num_channels // 4, eps
        self.weight, self.bias = drawn(num_channels, std=0.2, mean=1.1), drawn(num_channels, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return F.group_norm(x, self.num_groups, self.weight, self.bias, self.eps)


class UNetBlock(nn.Module):
    def __init__(self, cin: int, cout: int, up: bool = False, down: bool = False, attention: bool = False):
        super().__init__()
        self.in_channels, self.skip_scale = cin, math.sqrt(0.5)
        self.num_heads = cout // PER_HEAD if attention else 0
        self.norm0, self.conv0 = GroupNorm(cin), Conv2d(cin, cout, 3, up=up, down=down)
        self.affine = Linear(EMB, 2 * cout)
        self.norm1, self.conv1 = GroupNorm(cout), Conv2d(cout, cout, 3)
        self.skip = Conv2d(cin, cout, 1, up=up, down=down) if up or down or cin != cout else None
        if attention:
            self.norm2 = GroupNorm(cout)
            self.qkv, self.proj = Conv2d(cout, 3 * cout, 1), Conv2d(cout, cout, 1)

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        orig = x
        x = self.conv0(silu(self.norm0(x)))
        scale, shift = self.affine(emb).unsqueeze(2).unsqueeze(3).chunk(2, dim=1)
        x = silu(torch.addcmul(shift, self.norm1(x), scale + 1))
        x = self.conv1(x)
        x = (x + (self.skip(orig) if self.skip is not None else orig)) * self.skip_scale
        if self.num_heads:
            n, c = len(x) * self.num_heads, x.shape[1] // self.num_heads
            q, k, v = self.qkv(self.norm2(x)).reshape(n, c, 3, -1).unbind(2)
            w = torch.einsum("ncq,nck->nqk", q, k / math.sqrt(c)).softmax(dim=2)
            a = torch.einsum("nqk,nck->ncq", w, v)
            x = (self.proj(a.reshape(*x.shape)) + x) * self.skip_scale
        return x


class PositionalEmbedding(nn.Module):
    def __init__(self, num_channels: int, max_positions: int = 10000):
        super().__init__()
        self.num_channels, self.max_positions = num_channels, max_positions

    def forward(self, x: Tensor) -> Tensor:
        half = self.num_channels // 2
        freqs = torch.arange(half, dtype=x.dtype, device=x.device) / (half - 1)
        x = x.ger((1 / self.max_positions) ** freqs)
        return torch.cat([x.cos(), x.sin()], dim=1)


class SongUNet(nn.Module):
    def __init__(self):
        super().__init__()
        few, many = WIDTHS
        self.map_noise, self.map_label = PositionalEmbedding(NOISE), Linear(CLASSES, NOISE)
        self.map_layer0, self.map_layer1 = Linear(NOISE, EMB), Linear(EMB, EMB)
        self.enc = nn.ModuleDict(
            {
                "8x12_conv": Conv2d(CHANNELS, few, 3),
                "8x12_block0": UNetBlock(few, few),
                "4x6_down": UNetBlock(few, few, down=True),
                "4x6_block0": UNetBlock(few, many, attention=True),
            }
        )
        self.dec = nn.ModuleDict(
            {
                "4x6_in0": UNetBlock(many, many, attention=True),
                "4x6_block0": UNetBlock(2 * many, many),
                "4x6_block1": UNetBlock(many + few, many, attention=True),
                "8x12_up": UNetBlock(many, many, up=True),
                "8x12_block0": UNetBlock(many + few, few),
                "8x12_block1": UNetBlock(2 * few, few),
                "8x12_aux_norm": GroupNorm(few),
                "8x12_aux_conv": Conv2d(few, CHANNELS, 3),
            }
        )

    def forward(self, x: Tensor, noise_labels: Tensor, class_labels: Tensor) -> Tensor:
        emb = self.map_noise(noise_labels)
        emb = emb.reshape(emb.shape[0], 2, -1).flip(1).reshape(*emb.shape)
        emb = emb + self.map_label(class_labels * math.sqrt(self.map_label.in_features))
        emb = silu(self.map_layer0(emb))
        emb = silu(self.map_layer1(emb))
        skips = []
        for block in self.enc.values():
            x = block(x, emb) if isinstance(block, UNetBlock) else block(x)
            skips.append(x)
        for name, block in self.dec.items():
            if "aux" not in name:
                if x.shape[1] != block.in_channels:
                    x = torch.cat([x, skips.pop()], dim=1)
                x = block(x, emb)
        return self.dec["8x12_aux_conv"](silu(self.dec["8x12_aux_norm"](x)))


class EDMPrecond(nn.Module):
    """Noisy pictures, their noise levels and one-hot classes -> denoised pictures."""

    def __init__(self):
        super().__init__()
        self.sigma_data, self.model = SIGMA_DATA, SongUNet()

    def forward(self, x: Tensor, sigma: Tensor, class_labels: Tensor) -> Tensor:
        sigma = sigma.reshape(-1, 1, 1, 1)
        c_skip = self.sigma_data**2 / (sigma**2 + self.sigma_data**2)
        c_out = sigma * self.sigma_data / (sigma**2 + self.sigma_data**2).sqrt()
        c_in = 1 / (self.sigma_data**2 + sigma**2).sqrt()
        c_noise = sigma.log() / 4
        f_x = self.model(c_in * x, c_noise.flatten(), class_labels)
        return c_skip * x + c_out * f_x


def noisy_waves() -> tuple[dict[str, Tensor], Tensor]:
    """Waves whose class tells their direction, under noise; the target has sigma as its last channel."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    tone = 2 * torch.arange(CHANNELS)[:, None, None] + 6 * torch.rand(PICTURES, 1, 1, 1)
    y = 0.7 * torch.sin(turn.cos() * across + turn.sin() * down + tone)
    sigma = (1.2 * torch.randn(PICTURES) - 1.2).exp().clamp(0.05, 3)
    level = sigma[:, None, None, None]
    inputs = {"x": y + level * torch.randn_like(y), "sigma": sigma}
    target = torch.cat([y, level.expand(-1, 1, HIGH, WIDE)], 1)
    return inputs | {"class_labels": F.one_hot(label, CLASSES).to(y)}, target


def edm_loss(d_x: Tensor, target: Tensor) -> Tensor:
    """The weighted error, by four."""
    y, sigma = target[:, :-1], target[:, -1:]
    weight = (sigma**2 + SIGMA_DATA**2) / (sigma * SIGMA_DATA) ** 2
    return (weight * (d_x - y) ** 2).mean() / 4
