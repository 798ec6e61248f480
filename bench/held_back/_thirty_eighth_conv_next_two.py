"""A small ConvNeXt V2: three stages of blocks with global response normalisation, over gratings."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 32, 48, 7, 5
DEPTHS, DIMS = (2, 3, 2), (9, 14, 22)


class LayerNorm(nn.Module):
    """Over the channels of [N, H, W, C] (channels_last) or of [N, C, H, W] (channels_first)."""

    def __init__(self, normalized_shape: int, eps: float = 1e-6, data_format: str = "channels_last"):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(normalized_shape))
        self.bias = nn.Parameter(0.2 * torch.randn(normalized_shape))
        self.eps, self.data_format, self.normalized_shape = eps, data_format, (normalized_shape,)

    def forward(self, x: Tensor) -> Tensor:
        if self.data_format == "channels_last":
            return F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class GRN(nn.Module):
    """Global response normalisation of [N, H, W, C]."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(0.4 + 0.3 * torch.randn(1, 1, 1, dim))
        self.beta = nn.Parameter(0.2 * torch.randn(1, 1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        gx = torch.norm(x, p=2, dim=(1, 2), keepdim=True)
        nx = gx / (gx.mean(dim=-1, keepdim=True) + 1e-6)
        return self.gamma * (x * nx) + self.beta + x


class Block(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dwconv = nn.Conv2d(dim, dim, kernel_size=7, padding=3, groups=dim)
        self.norm = LayerNorm(dim, eps=1e-6)
        self.pwconv1 = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.grn = GRN(4 * dim)
        self.pwconv2 = nn.Linear(4 * dim, dim)
        self.drop_path = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.dwconv(x)
        x = x.permute(0, 2, 3, 1)
        x = self.norm(x)
        x = self.pwconv1(x)
        x = self.act(x)
        x = self.grn(x)
        x = self.pwconv2(x)
        x = x.permute(0, 3, 1, 2)
        return shortcut + self.drop_path(x)


class ConvNeXtV2(nn.Module):
    """Pictures [N, 3, H, W] -> logits [N, classes]."""

    def __init__(self):
        super().__init__()
        stem = nn.Conv2d(CHANNELS, DIMS[0], kernel_size=4, stride=4)
        first = LayerNorm(DIMS[0], eps=1e-6, data_format="channels_first")
        self.downsample_layers = nn.ModuleList([nn.Sequential(stem, first)])
        for i in range(len(DIMS) - 1):
            norm = LayerNorm(DIMS[i], eps=1e-6, data_format="channels_first")
            conv = nn.Conv2d(DIMS[i], DIMS[i + 1], kernel_size=2, stride=2)
            self.downsample_layers.append(nn.Sequential(norm, conv))
        stages = (
            nn.Sequential(*(Block(dim) for _ in range(depth)))
            for depth, dim in zip(DEPTHS, DIMS, strict=True)
        )
        self.stages = nn.ModuleList(stages)
        self.norm = nn.LayerNorm(DIMS[-1], eps=1e-6)
        self.head = nn.Linear(DIMS[-1], CLASSES)
        nn.init.normal_(self.norm.weight, 1, 0.2), nn.init.normal_(self.norm.bias, 0, 0.2)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Conv2d | nn.Linear):
            nn.init.trunc_normal_(m.weight, std=0.8 / math.sqrt(m.weight[0].numel()))
            nn.init.normal_(m.bias, std=0.2)

    def forward_features(self, x: Tensor) -> Tensor:
        for downsample, stage in zip(self.downsample_layers, self.stages, strict=True):
            x = stage(downsample(x))
        return self.norm(x.mean([-2, -1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def gratings() -> tuple[Tensor, Tensor]:
    """Gratings under a window somewhere in the picture; their class tells the direction and the colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE), torch.arange(HIGH)[:, None]
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin((turn.cos() * across + turn.sin() * down) / 2 + phase + tone * (1 + turn))
    middle = torch.rand(2, PICTURES, 1, 1, 1)
    distance = (across - WIDE * middle[0]) ** 2 + (down - HIGH * middle[1]) ** 2
    return 1.5 * wave * torch.exp(-distance / 400) + 0.2 * torch.randn_like(wave), label


def smoothed(logits: Tensor, label: Tensor) -> Tensor:
    """A part of the cross entropy with labels smoothed by a tenth."""
    return F.cross_entropy(logits, label, label_smoothing=0.1) / 4
