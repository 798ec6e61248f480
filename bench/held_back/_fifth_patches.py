"""Two networks that attend to patches: with a class token, or with relative positions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import _classes, _task


class Attention(nn.Module):
    """[N, T, C] -> [N, T, C]; one projection for q, k and v."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(2, 3)) * self.scale

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return self.out((self.scores(q, k).softmax(3) @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, width: int, attention: nn.Module):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width, eps=1e-6), attention
        self.norm2 = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    """[N, 3, 12, 12] -> [N, 5], from the class token of three blocks over nine patches."""

    def __init__(self, width: int = 24):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.1 * torch.randn(1, 10, width))
        self.blocks = nn.Sequential(*(Block(width, Attention(width, 3)) for _ in range(3)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        patches = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), patches], 1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


vit = _task("fifth_vit", ViT, lambda: (torch.randn(8, 3, 12, 12), _classes(8, 5)))


class Relative(Attention):
    """Attention over a square map, with a bias for each head and relative place."""

    def __init__(self, width: int, heads: int, size: int):
        super().__init__(width, heads)
        self.table = nn.Parameter(0.2 * torch.randn((2 * size - 1) ** 2, heads))
        places = torch.cartesian_prod(torch.arange(size), torch.arange(size))
        apart = places[:, None] - places + size - 1
        self.register_buffer("index", apart[..., 0] * (2 * size - 1) + apart[..., 1])

    def scores(self, q: Tensor, k: Tensor) -> Tensor:
        return super().scores(q, k) + self.table[self.index].permute(2, 0, 1)


class Inverted(nn.Module):
    """A wide depthwise convolution between two pointwise ones; the shortcut is pooled and projected."""

    def __init__(self, before: int, after: int, stride: int):
        super().__init__()
        wide = 2 * before
        self.norm = nn.BatchNorm2d(before)
        self.expand, self.norm1 = nn.Conv2d(before, wide, 1, bias=False), nn.BatchNorm2d(wide)
        self.depthwise = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False)
        self.norm2 = nn.BatchNorm2d(wide)
        self.project = nn.Conv2d(wide, after, 1)
        self.pool = nn.MaxPool2d(stride) if stride > 1 else nn.Identity()
        self.shortcut = nn.Conv2d(before, after, 1) if before != after else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.norm1(self.expand(self.norm(x))))
        y = F.gelu(self.norm2(self.depthwise(y)))
        return self.shortcut(self.pool(x)) + self.project(y)


class CoAtNet(nn.Module):
    """[N, 3, 16, 16] -> [N, 5]: a stem, two convolution blocks, two attention blocks on a map of 4 by 4."""

    def __init__(self, width: int = 18):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 10, 3, 2, 1, bias=False), nn.BatchNorm2d(10), nn.GELU())
        self.convs = nn.Sequential(Inverted(10, 10, 1), Inverted(10, width, 2))
        self.blocks = nn.Sequential(*(Block(width, Relative(width, 3, 4)) for _ in range(2)))
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convs(self.stem(x)).flatten(2).transpose(1, 2)
        return self.head(self.norm(self.blocks(x).mean(1)))


coatnet = _task("fifth_coatnet", CoAtNet, lambda: (torch.randn(8, 3, 16, 16), _classes(8, 5)))
