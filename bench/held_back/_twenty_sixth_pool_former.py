"""A small PoolFormer (the second version): stages of blocks that mix places by an average pooling."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, HIGH, WIDE, PICTURES, CLASSES = 3, 40, 56, 5, 6
DIMS, DEPTHS = (8, 14, 22), (2, 2, 2)


class GroupNorm1NoBias(nn.GroupNorm):
    """A norm of all channels and places of a picture, with a weight by channel."""

    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__(1, num_channels, eps=eps)
        self.bias = None


class LayerNorm2d(nn.LayerNorm):
    """A norm of the channels at each place of [N, C, H, W]."""

    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__(num_channels, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class LayerNorm2dNoBias(LayerNorm2d):
    def __init__(self, num_channels: int, eps: float = 1e-6):
        super().__init__(num_channels, eps=eps)
        self.bias = None


class Stem(nn.Module):
    """Overlapping patches of seven by seven, four apart."""

    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=7, stride=4, padding=2)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


class Downsampling(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.norm = LayerNorm2dNoBias(in_channels)
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size=3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.norm(x))


class Scale(nn.Module):
    """A factor for each channel."""

    def __init__(self, dim: int):
        super().__init__()
        self.shape = (dim, 1, 1)
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale.view(self.shape)


class StarReLU(nn.Module):
    """s * relu(x) ** 2 + b"""

    def __init__(self, scale_value: float = 0.8944, bias_value: float = -0.4472):
        super().__init__()
        self.relu = nn.ReLU()
        self.scale = nn.Parameter(scale_value + 0.1 * torch.randn(1))
        self.bias = nn.Parameter(bias_value + 0.1 * torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.relu(x) ** 2 + self.bias


class Pooling(nn.Module):
    """The average of a place and its neighbours, less the place itself."""

    def __init__(self, pool_size: int = 3):
        super().__init__()
        self.pool = nn.AvgPool2d(pool_size, stride=1, padding=pool_size // 2, count_include_pad=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.pool(x)
        return y - x


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1 = nn.Conv2d(in_features, hidden_features, kernel_size=1, bias=False)
        self.act = StarReLU()
        self.fc2 = nn.Conv2d(hidden_features, in_features, kernel_size=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class MetaFormerBlock(nn.Module):
    def __init__(self, dim: int, res_scale: bool):
        super().__init__()
        self.norm1 = GroupNorm1NoBias(dim)
        self.token_mixer = Pooling()
        self.drop_path1 = nn.Identity()
        self.layer_scale1 = Scale(dim)
        self.res_scale1 = Scale(dim) if res_scale else nn.Identity()

        self.norm2 = GroupNorm1NoBias(dim)
        self.mlp = Mlp(dim, 4 * dim)
        self.drop_path2 = nn.Identity()
        self.layer_scale2 = Scale(dim)
        self.res_scale2 = Scale(dim) if res_scale else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.layer_scale1(self.drop_path1(self.token_mixer(self.norm1(x))))
        x = self.res_scale1(x) + mixed
        mixed = self.layer_scale2(self.drop_path2(self.mlp(self.norm2(x))))
        return self.res_scale2(x) + mixed


class MetaFormerStage(nn.Module):
    def __init__(self, in_chs: int, out_chs: int, depth: int, res_scale: bool):
        super().__init__()
        self.downsample = nn.Identity() if in_chs == out_chs else Downsampling(in_chs, out_chs)
        self.blocks = nn.Sequential(*(MetaFormerBlock(out_chs, res_scale) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class MetaFormer(nn.Module):
    """Pictures [N, 3, H, W] -> logits; all stages but the first scale their residuals."""

    def __init__(self):
        super().__init__()
        self.stem = Stem(COLOURS, DIMS[0])
        before = DIMS[0], *DIMS[:-1]
        stages = zip(before, DIMS, DEPTHS, strict=True)
        self.stages = nn.Sequential(*(MetaFormerStage(*x, i > 0) for i, x in enumerate(stages)))
        head = {
            "global_pool": nn.AdaptiveAvgPool2d(1),
            "norm": LayerNorm2d(DIMS[-1]),
            "flatten": nn.Flatten(1),
            "drop": nn.Identity(),
            "fc": nn.Linear(DIMS[-1], CLASSES),
        }
        self.head = nn.Sequential(OrderedDict(head))
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.GroupNorm | nn.LayerNorm):
            nn.init.normal_(module.weight, 1.0, 0.2)
        if isinstance(module, nn.Conv2d | nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight[0].numel()))
        if isinstance(module, nn.Conv2d | nn.Linear | nn.LayerNorm) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)
        if isinstance(module, MetaFormerBlock):
            nn.init.normal_(module.layer_scale1.scale, 0.6, 0.1)
            nn.init.normal_(module.layer_scale2.scale, 0.5, 0.1)
            for scale in (module.res_scale1, module.res_scale2):
                if isinstance(scale, Scale):
                    nn.init.normal_(scale.scale, 1.0, 0.15)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.stem(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def blobs() -> tuple[Tensor, Tensor]:
    """Pictures of one striped blob somewhere, whose class tells the stripes' direction and the colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None]
    down, across = torch.arange(HIGH)[:, None] / 8, torch.arange(WIDE) / 8
    y, x = (size / 8 * (0.3 + 0.4 * torch.rand(PICTURES, 1, 1)) for size in (HIGH, WIDE))
    near = torch.exp(-((down - y) ** 2 + (across - x) ** 2) / 4)
    stripes = torch.sin(6 * (turn.cos() * across + turn.sin() * down)) + 0.5
    tint = torch.cos(2 * turn[..., None] + 2 * torch.arange(COLOURS)[:, None, None])
    picture = (near * stripes)[:, None] * (1 + tint) + 0.1 * (down - across)
    return picture + 0.1 * torch.randn_like(picture), label


def classes(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy."""
    return F.cross_entropy(logits, label) / 4
