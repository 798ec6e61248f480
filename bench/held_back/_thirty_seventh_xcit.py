"""A small XCiT: attention across channels, local patch interaction, and class attention at the end."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PICTURES, CLASSES = 24, 40, 4, 7
DIM, HEADS, HIDDEN, WAVES, DEPTH, CLASS_DEPTH = 24, 3, 60, 10, 3, 2


def conv3x3(in_planes: int, out_planes: int, stride: int = 2) -> nn.Sequential:
    conv = nn.Conv2d(in_planes, out_planes, 3, stride, padding=1, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(out_planes))


class PositionalEncodingFourier(nn.Module):
    """Sines and cosines of the row and the column, projected to the width of a token."""

    def __init__(self, hidden_dim: int, dim: int, temperature: int = 10000):
        super().__init__()
        self.token_projection = nn.Conv2d(hidden_dim * 2, dim, kernel_size=1)
        self.scale, self.temperature, self.hidden_dim, self.eps = 2 * math.pi, temperature, hidden_dim, 1e-6

    def forward(self, b: int, h: int, w: int) -> Tensor:
        weight = self.token_projection.weight
        y_embed = torch.arange(1, h + 1).to(weight).unsqueeze(1).repeat(1, 1, w)
        x_embed = torch.arange(1, w + 1).to(weight).repeat(1, h, 1)
        y_embed = y_embed / (y_embed[:, -1:, :] + self.eps) * self.scale
        x_embed = x_embed / (x_embed[:, :, -1:] + self.eps) * self.scale
        dim_t = torch.arange(self.hidden_dim).to(weight)
        dim_t = self.temperature ** (2 * torch.div(dim_t, 2, rounding_mode="floor") / self.hidden_dim)
        pos_x, pos_y = x_embed[..., None] / dim_t, y_embed[..., None] / dim_t
        pos_x = torch.stack([pos_x[..., 0::2].sin(), pos_x[..., 1::2].cos()], dim=4).flatten(3)
        pos_y = torch.stack([pos_y[..., 0::2].sin(), pos_y[..., 1::2].cos()], dim=4).flatten(3)
        pos = torch.cat((pos_y, pos_x), dim=3).permute(0, 3, 1, 2)
        return self.token_projection(pos).repeat(b, 1, 1, 1)


class ConvPatchEmbed(nn.Module):
    """Patches of 8 by 8, by three convolutions of stride 2."""

    def __init__(self, embed_dim: int):
        super().__init__()
        first, second = conv3x3(3, embed_dim // 4), conv3x3(embed_dim // 4, embed_dim // 2)
        third = conv3x3(embed_dim // 2, embed_dim)
        self.proj = nn.Sequential(first, nn.GELU(), second, nn.GELU(), third)

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(x)
        if x.requires_grad:  # for one picture, torch's batch norm misreads a gradient in another layout
            x.register_hook(Tensor.contiguous)
        hp, wp = x.shape[2:]
        return x.flatten(2).transpose(1, 2), (hp, wp)


class LPI(nn.Module):
    """Local patch interaction: two depthwise convolutions over the grid of tokens."""

    def __init__(self, features: int):
        super().__init__()
        self.conv1 = nn.Conv2d(features, features, 3, padding=1, groups=features)
        self.act = nn.GELU()
        self.bn = nn.BatchNorm2d(features)
        self.conv2 = nn.Conv2d(features, features, 3, padding=1, groups=features)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        b, n, c = x.shape
        x = x.permute(0, 2, 1).reshape(b, c, h, w)
        x = self.conv2(self.bn(self.act(self.conv1(x))))
        return x.reshape(b, c, n).permute(0, 2, 1)


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class XCA(nn.Module):
    """Cross-covariance attention: the channels of a head attend to one another."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.temperature = nn.Parameter(1 + torch.rand(num_heads, 1, 1))
        self.qkv, self.proj = nn.Linear(dim, dim * 3), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 4, 1)
        q, k, v = qkv.unbind(0)
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
        attn = ((q @ k.transpose(-2, -1)) * self.temperature).softmax(dim=-1)
        x = (attn @ v).permute(0, 3, 1, 2).reshape(b, n, c)
        return self.proj(x)


class XCABlock(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), XCA(dim, num_heads)
        self.norm3, self.local_mp = nn.LayerNorm(dim, eps=1e-6), LPI(dim)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, HIDDEN)
        self.gamma1, self.gamma3, self.gamma2 = (nn.Parameter(0.3 + 0.4 * torch.rand(dim)) for _ in range(3))

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x + self.gamma1 * self.attn(self.norm1(x))
        x = x + self.gamma3 * self.local_mp(self.norm3(x), h, w)
        return x + self.gamma2 * self.mlp(self.norm2(x))


class ClassAttn(nn.Module):
    """The class token asks all the tokens."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.q, self.k, self.v, self.proj = (nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q = self.q(x[:, 0]).reshape(b, 1, self.num_heads, c // self.num_heads).permute(0, 2, 1, 3)
        k = self.k(x).reshape(b, n, self.num_heads, c // self.num_heads).permute(0, 2, 1, 3)
        v = self.v(x).reshape(b, n, self.num_heads, c // self.num_heads).permute(0, 2, 1, 3)
        attn = (q * self.scale @ k.transpose(-2, -1)).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, 1, c))


class ClassAttentionBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, tokens_norm: bool = True):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(dim, eps=1e-6), ClassAttn(dim, num_heads)
        self.norm2, self.mlp = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, HIDDEN)
        self.gamma1, self.gamma2 = (nn.Parameter(0.3 + 0.4 * torch.rand(dim)) for _ in range(2))
        self.tokens_norm = tokens_norm

    def forward(self, x: Tensor) -> Tensor:
        x_norm1 = self.norm1(x)
        x_attn = torch.cat([self.attn(x_norm1), x_norm1[:, 1:]], dim=1)
        x = x + self.gamma1 * x_attn
        x = self.norm2(x) if self.tokens_norm else torch.cat([self.norm2(x[:, 0:1]), x[:, 1:]], dim=1)
        x_res, cls_token = x, x[:, 0:1]
        cls_token = self.gamma2 * self.mlp(cls_token)
        return x_res + torch.cat([cls_token, x[:, 1:]], dim=1)


class XCiT(nn.Module):
    """[N, 3, H, W] -> [N, CLASSES]."""

    def __init__(self):
        super().__init__()
        self.patch_embed = ConvPatchEmbed(DIM)
        self.cls_token = nn.Parameter(0.5 * torch.randn(1, 1, DIM))
        self.pos_embed = PositionalEncodingFourier(WAVES, DIM)
        self.blocks = nn.ModuleList(XCABlock(DIM, HEADS) for _ in range(DEPTH))
        self.cls_attn_blocks = nn.ModuleList(ClassAttentionBlock(DIM, HEADS) for _ in range(CLASS_DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM, eps=1e-6), nn.Linear(DIM, CLASSES)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.BatchNorm2d):
                nn.init.uniform_(module.weight, 0.7, 1.3), nn.init.normal_(module.bias, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        x, (hp, wp) = self.patch_embed(x)
        b, n, _ = x.shape
        x = x + self.pos_embed(b, hp, wp).reshape(b, -1, n).permute(0, 2, 1)
        for block in self.blocks:
            x = block(x, hp, wp)
        x = torch.cat((self.cls_token.expand(b, -1, -1), x), dim=1)
        for block in self.cls_attn_blocks:
            x = block(x)
        return self.head(self.norm(x)[:, 0])


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes whose class tells their direction, with a bright spot somewhere."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(3)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase + tone)
    x0, y0 = WIDE / 3 * torch.rand(PICTURES, 1, 1, 1), HIGH / 3 * torch.rand(PICTURES, 1, 1, 1)
    spot = torch.exp(-((across - x0) ** 2 + (down - y0) ** 2) / 4)
    return wave + 1.5 * spot + 0.1 * torch.randn_like(wave), label


def smoothed(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy with labels smoothed."""
    return F.cross_entropy(logits, label, label_smoothing=0.1) / 4
