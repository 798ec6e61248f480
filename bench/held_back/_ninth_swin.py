"""A small Swin Transformer: attention in windows, every second time in windows moved by half their size."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, DEPTHS, HEADS, WINDOW, GRID, CLASSES = 8, (2, 2), (2, 4), 4, (12, 16), 4


def window_partition(x: Tensor, size: int) -> Tensor:
    """[N, H, W, C] -> [N * windows, size * size, C]."""
    x = x.unflatten(2, (-1, size)).unflatten(1, (-1, size))
    return x.transpose(2, 3).flatten(0, 2).flatten(1, 2)


def window_reverse(windows: Tensor, size: int, high: int, wide: int) -> Tensor:
    """[N * windows, size * size, C] -> [N, H, W, C]."""
    x = windows.unflatten(1, (size, size)).unflatten(0, (-1, high // size, wide // size))
    return x.transpose(2, 3).flatten(3, 4).flatten(1, 2)


def relative_positions(size: int) -> Tensor:
    """The row of the bias table for each two places of a window."""
    place = torch.arange(size)
    rows, columns = (grid.flatten() for grid in torch.meshgrid(place, place, indexing="ij"))
    down, across = rows[:, None] - rows + size - 1, columns[:, None] - columns + size - 1
    return down * (2 * size - 1) + across


def shifted_mask(high: int, wide: int, size: int, shift: int) -> Tensor:
    """[windows, size * size, size * size], far below zero where two places were not neighbours."""
    rows, columns = (
        (torch.arange(length) >= length - size).long() + (torch.arange(length) >= length - shift)
        for length in (high, wide)
    )
    regions = window_partition((3 * rows[:, None] + columns)[None, :, :, None], size)[..., 0]
    return (regions[:, :, None] != regions[:, None]) * -100.0


def lively(module: nn.Module) -> None:
    """Start with biases that are not zero and norms that are not alike."""
    if isinstance(module, nn.LayerNorm):
        nn.init.normal_(module.weight, 1.0, 0.25)
        nn.init.normal_(module.bias, 0.0, 0.2)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        if module.bias is not None:
            nn.init.normal_(module.bias, 0.0, 0.2)


class PatchEmbed(nn.Module):
    def __init__(self, dim: int, patch_size: int = 2):
        super().__init__()
        self.proj = nn.Conv2d(3, dim, patch_size, patch_size)
        self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class PatchMerging(nn.Module):
    """Four neighbours become one; the one below comes before the one to the right."""

    def __init__(self, dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        four = [x[:, down::2, across::2] for across in (0, 1) for down in (0, 1)]
        return self.reduction(self.norm(torch.cat(four, -1)))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class WindowAttention(nn.Module):
    """Attention among the places of each window, with a learnt bias for each offset and head."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.relative_position_bias_table = nn.Parameter(0.7 * torch.randn((2 * WINDOW - 1) ** 2, heads))
        self.register_buffer("relative_position_index", relative_positions(WINDOW), persistent=False)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.softmax = nn.Softmax(-1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        bias = self.relative_position_bias_table[self.relative_position_index]
        scores = (q * self.scale) @ k.transpose(2, 3) + bias.permute(2, 0, 1)
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        return self.proj((self.softmax(scores) @ v).transpose(1, 2).flatten(2))


class SwinTransformerBlock(nn.Module):
    def __init__(self, dim: int, heads: int, grid: tuple[int, int], shift: int):
        super().__init__()
        self.shift_size = shift
        self.norm1, self.attn = nn.LayerNorm(dim), WindowAttention(dim, heads)
        self.norm2, self.mlp = nn.LayerNorm(dim), Mlp(dim, 2 * dim)
        high, wide = (length + -length % WINDOW for length in grid)
        mask = shifted_mask(high, wide, WINDOW, shift) if shift else None
        self.register_buffer("attn_mask", mask, persistent=False)

    def attend(self, x: Tensor) -> Tensor:
        high, wide = x.shape[1:3]
        x = F.pad(x, (0, 0, 0, -wide % WINDOW, 0, -high % WINDOW))
        size = x.shape[1:3]
        if self.shift_size:
            x = torch.roll(x, (-self.shift_size, -self.shift_size), (1, 2))
        windows = self.attn(window_partition(x, WINDOW), self.attn_mask)
        x = window_reverse(windows, WINDOW, *size)
        if self.shift_size:
            x = torch.roll(x, (self.shift_size, self.shift_size), (1, 2))
        return x[:, :high, :wide]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class SwinTransformerStage(nn.Module):
    def __init__(self, dim: int, depth: int, heads: int, grid: tuple[int, int], downsample: bool):
        super().__init__()
        self.downsample = PatchMerging(dim // 2) if downsample else nn.Identity()
        self.blocks = nn.Sequential(
            *(SwinTransformerBlock(dim, heads, grid, i % 2 * (WINDOW // 2)) for i in range(depth))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class GlobalPool(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean((1, 2))


class ClassifierHead(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.global_pool, self.fc = GlobalPool(), nn.Linear(dim, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.global_pool(x))


class SwinTransformer(nn.Module):
    """Images [N, 3, 24, 32] -> [N, classes]; the second stage pads its six rows to eight."""

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed(WIDTH)
        self.layers = nn.Sequential(
            *(
                SwinTransformerStage(WIDTH << i, depth, heads, (GRID[0] >> i, GRID[1] >> i), i > 0)
                for i, (depth, heads) in enumerate(zip(DEPTHS, HEADS, strict=True))
            )
        )
        self.norm = nn.LayerNorm(WIDTH << (len(DEPTHS) - 1))
        self.head = ClassifierHead(WIDTH << (len(DEPTHS) - 1))
        self.apply(lively)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.layers(self.patch_embed(x))))


def waves() -> tuple[Tensor, Tensor]:
    """Coloured waves in noise, and which way each of them runs."""
    way = torch.randperm(CLASSES)
    angle, start = way[:, None, None] * (math.pi / CLASSES), 6.0 * torch.rand(len(way), 1, 1)
    down, across = torch.arange(2.0 * GRID[0])[:, None], torch.arange(2.0 * GRID[1])
    wave = torch.sin(0.7 * (angle.cos() * across + angle.sin() * down) + start)
    colour, noise = torch.randn(len(way), 3, 1, 1), torch.randn(len(way), 3, 2 * GRID[0], 2 * GRID[1])
    return wave[:, None] * colour + 0.6 * noise, way


def surprise(output: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(output, target)
