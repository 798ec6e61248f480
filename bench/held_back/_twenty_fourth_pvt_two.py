"""A small Pyramid Vision Transformer v2: four stages, of which one has the linear attention."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 80, 56, 5, 6
EMBED_DIMS, DEPTHS, NUM_HEADS = (8, 12, 24, 28), (2, 2, 2, 2), (1, 2, 3, 4)
SR_RATIOS, MLP_RATIOS, LINEAR, POOL_SIZE = (4, 2, 2, 1), (4, 4, 3, 2), (False, False, True, False), 3
norm_layer = partial(nn.LayerNorm, eps=1e-6)


class MlpWithDepthwiseConv(nn.Module):
    def __init__(self, in_features: int, hidden_features: int, extra_relu: bool):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.relu = nn.ReLU() if extra_relu else nn.Identity()
        self.dwconv = nn.Conv2d(hidden_features, hidden_features, 3, 1, 1, groups=hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = self.fc1(x)
        b, _, c = x.shape
        x = x.transpose(1, 2).reshape(b, c, *feat_size)
        x = self.relu(x)
        x = self.dwconv(x)
        x = x.flatten(2).transpose(1, 2)
        x = self.drop(self.act(x))
        return self.drop(self.fc2(x))


class Attention(nn.Module):
    """Keys and values come from a reduced map: by a strided convolution, or by pooling to a fixed size."""

    def __init__(self, dim: int, num_heads: int, sr_ratio: int, linear_attn: bool):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.q = nn.Linear(dim, dim)
        self.kv = nn.Linear(dim, 2 * dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)
        self.pool = self.sr = self.norm = self.act = None
        if linear_attn:
            self.pool = nn.AdaptiveAvgPool2d(POOL_SIZE)
            self.sr = nn.Conv2d(dim, dim, kernel_size=1, stride=1)
            self.norm = nn.LayerNorm(dim)
            self.act = nn.GELU()
        elif sr_ratio > 1:
            self.sr = nn.Conv2d(dim, dim, kernel_size=sr_ratio, stride=sr_ratio)
            self.norm = nn.LayerNorm(dim)

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        b, n, c = x.shape
        q = self.q(x).reshape(b, n, self.num_heads, -1).permute(0, 2, 1, 3)
        if self.pool is not None:
            x = x.permute(0, 2, 1).reshape(b, c, *feat_size)
            x = self.sr(self.pool(x)).reshape(b, c, -1).permute(0, 2, 1)
            x = self.act(self.norm(x))
        elif self.sr is not None:
            x = x.permute(0, 2, 1).reshape(b, c, *feat_size)
            x = self.sr(x).reshape(b, c, -1).permute(0, 2, 1)
            x = self.norm(x)
        kv = self.kv(x).reshape(b, -1, 2, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        k, v = kv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(b, n, c)
        return self.proj_drop(self.proj(x))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp_ratio: int, sr_ratio: int, linear_attn: bool):
        super().__init__()
        self.norm1 = norm_layer(dim)
        self.attn = Attention(dim, num_heads, sr_ratio, linear_attn)
        self.drop_path1 = nn.Identity()
        self.norm2 = norm_layer(dim)
        self.mlp = MlpWithDepthwiseConv(dim, dim * mlp_ratio, extra_relu=linear_attn)
        self.drop_path2 = nn.Identity()

    def forward(self, x: Tensor, feat_size: tuple[int, int]) -> Tensor:
        x = x + self.drop_path1(self.attn(self.norm1(x), feat_size))
        return x + self.drop_path2(self.mlp(self.norm2(x), feat_size))


class OverlapPatchEmbed(nn.Module):
    """[N, C, H, W] -> [N, H / stride, W / stride, D]; the patches overlap."""

    def __init__(self, patch_size: int, stride: int, in_chans: int, embed_dim: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride, padding=patch_size // 2)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).permute(0, 2, 3, 1))


class PyramidVisionTransformerStage(nn.Module):
    def __init__(self, dim: int, dim_out: int, depth: int, downsample: bool, **options: int):
        super().__init__()
        self.downsample = OverlapPatchEmbed(3, 2, dim, dim_out) if downsample else None
        self.blocks = nn.ModuleList(Block(dim_out, **options) for _ in range(depth))
        self.norm = norm_layer(dim_out)

    def forward(self, x: Tensor) -> Tensor:
        if self.downsample is not None:
            x = self.downsample(x)
        b, h, w, c = x.shape
        x = x.reshape(b, -1, c)
        for block in self.blocks:
            x = block(x, (h, w))
        x = self.norm(x)
        return x.reshape(b, h, w, -1).permute(0, 3, 1, 2).contiguous()


class PyramidVisionTransformerV2(nn.Module):
    """Pictures -> class logits."""

    def __init__(self):
        super().__init__()
        self.patch_embed = OverlapPatchEmbed(7, 4, CHANNELS, EMBED_DIMS[0])
        stages, before = [], EMBED_DIMS[0]
        for i, dim in enumerate(EMBED_DIMS):
            options = {"num_heads": NUM_HEADS[i], "mlp_ratio": MLP_RATIOS[i], "sr_ratio": SR_RATIOS[i]}
            stages.append(
                PyramidVisionTransformerStage(before, dim, DEPTHS[i], i > 0, linear_attn=LINEAR[i], **options)
            )
            before = dim
        self.stages = nn.Sequential(*stages)
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(before, CLASSES)
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear | nn.Conv2d):
            nn.init.normal_(m.weight, std=0.7 / math.sqrt(m.weight[0].numel()))
            nn.init.normal_(m.bias, std=0.1)
        elif isinstance(m, nn.LayerNorm):
            nn.init.normal_(m.weight, mean=1.0, std=0.2)
            nn.init.normal_(m.bias, std=0.1)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.stages(self.patch_embed(x))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.head_drop(x.mean(dim=(-1, -2))))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def discs() -> tuple[Tensor, Tensor]:
    """A striped disc in each picture; the class tells the direction and the colour of the stripes."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    down, across = torch.arange(HIGH)[:, None] / 10 - 4, torch.arange(WIDE) / 10 - 2.8
    y, x = 3 * torch.rand(2, PICTURES, 1, 1, 1) - 1.5
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    stripes = torch.sin(4 * (turn.cos() * across + turn.sin() * down) + phase) + torch.cos(2 * turn + tone)
    disc = torch.sigmoid(4 * (2 - torch.sqrt((down - y) ** 2 + (across - x) ** 2)))
    ground = 0.3 * torch.cos(0.5 * down + across + phase)
    return disc * stripes + (1 - disc) * ground + 0.1 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE), label


def smoothed(logits: Tensor, label: Tensor) -> Tensor:
    """The cross entropy with smoothed labels."""
    return F.cross_entropy(logits, label, label_smoothing=0.1)
