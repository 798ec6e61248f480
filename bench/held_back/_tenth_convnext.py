"""A small ConvNeXt V2 that classifies images: three stages of blocks with Global Response Normalization."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, DEPTHS, PATCH, CLASSES, IMAGES = (8, 12, 20), (2, 3, 2), 4, 5, 8


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of [N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class GlobalResponseNorm(nn.Module):
    """Channels of [N, H, W, C] compete by their norms over the image."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.eps = eps
        self.weight, self.bias = nn.Parameter(torch.zeros(width)), nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        size = x.norm(p=2, dim=(1, 2), keepdim=True)
        share = size / (size.mean(dim=-1, keepdim=True) + self.eps)
        return x + torch.addcmul(self.bias, self.weight, x * share)


class GlobalResponseNormMlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.grn = GlobalResponseNorm(hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.grn(self.act(self.fc1(x))))


class ConvNeXtBlock(nn.Module):
    """A depthwise convolution and an MLP over the channels, with or without a layer scale."""

    def __init__(self, width: int, layer_scale: bool):
        super().__init__()
        self.conv_dw = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = GlobalResponseNormMlp(width, 4 * width)
        self.gamma = nn.Parameter(torch.ones(width)) if layer_scale else None

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.conv_dw(x)
        x = self.mlp(self.norm(x.permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        if self.gamma is not None:
            x = x * self.gamma.reshape(1, -1, 1, 1)
        return x + shortcut


class ConvNeXtStage(nn.Module):
    def __init__(self, width_in: int, width: int, depth: int, layer_scale: bool):
        super().__init__()
        self.downsample = nn.Identity()
        if width_in != width:
            self.downsample = nn.Sequential(
                LayerNorm2d(width_in, eps=1e-6), nn.Conv2d(width_in, width, 2, stride=2)
            )
        self.blocks = nn.Sequential(*(ConvNeXtBlock(width, layer_scale) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class NormClassifierHead(nn.Module):
    def __init__(self, width: int, classes: int):
        super().__init__()
        self.global_pool = nn.AdaptiveAvgPool2d(1)
        self.norm = LayerNorm2d(width, eps=1e-6)
        self.flatten = nn.Flatten(1)
        self.fc = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.flatten(self.norm(self.global_pool(x))))


def spread_out(module: nn.Module) -> None:
    """Start away from zeros and ones, as after some training."""
    if isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, GlobalResponseNorm):
        nn.init.normal_(module.weight, std=0.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, ConvNeXtBlock):
        nn.init.normal_(module.conv_dw.weight, std=0.2)
        if module.gamma is not None:
            nn.init.uniform_(module.gamma, 0.3, 0.9)


class ConvNeXtV2(nn.Module):
    """Images [N, 3, H, W] -> logits [N, CLASSES]; the middle stage has layer scales."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, WIDTHS[0], PATCH, stride=PATCH), LayerNorm2d(WIDTHS[0], eps=1e-6)
        )
        before = (WIDTHS[0], *WIDTHS)
        self.stages = nn.Sequential(
            *(ConvNeXtStage(before[i], WIDTHS[i], DEPTHS[i], layer_scale=i == 1) for i in range(3))
        )
        self.head = NormClassifierHead(WIDTHS[-1], CLASSES)
        self.apply(spread_out)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


def images() -> tuple[Tensor, Tensor]:
    """Noisy coloured waves, of which the class tells the direction and the colour."""
    classes = torch.randint(CLASSES, (IMAGES,))
    down, right = torch.meshgrid(torch.arange(32) / 32, torch.arange(48) / 32, indexing="ij")
    angle = math.pi * classes / CLASSES
    way = angle.cos()[:, None, None] * down + angle.sin()[:, None, None] * right
    wave = torch.sin(2 * math.pi * (4 * way + torch.rand(IMAGES, 1, 1)))
    colours = torch.stack([angle.cos(), angle.sin(), 0.5 * torch.ones(IMAGES)], 1)
    contrast = 0.5 + torch.rand(IMAGES, 1, 1, 1)
    x = contrast * (wave[:, None] * (1 + colours[:, :, None, None])) + 0.3 * colours[:, :, None, None]
    return x + 0.5 * torch.randn(x.shape), classes


def likelihood(outputs: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(outputs, target)
