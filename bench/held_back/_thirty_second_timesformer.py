"""A small TimeSformer: attention over time, then over space with a class token for each frame."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, FRAMES, HIGH, WIDE, PATCH = 3, 5, 6, 8, 2
WIDTH, HEADS, HIDDEN, DEPTH, CLASSES, CLIPS = 28, 2, 44, 3, 9, 2


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, dim * 3)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = ((q @ k.transpose(-2, -1)) * self.scale).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(b, n, c))


class Block(nn.Module):
    """Tokens [B, 1 + H W T, C]: the class token, then the patches, of which time runs fastest."""

    def __init__(self, dim: int, num_heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.temporal_norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.temporal_attn = Attention(dim, num_heads)
        self.temporal_fc = nn.Linear(dim, dim)
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden)

    def forward(self, x: Tensor, b: int, t: int, w: int) -> Tensor:
        m, n = x.shape[2], (x.shape[1] - 1) // t
        xt = x[:, 1:].reshape(b * n, t, m)
        res_temporal = self.drop_path(self.temporal_attn(self.temporal_norm1(xt)))
        xt = x[:, 1:] + self.temporal_fc(res_temporal.reshape(b, n * t, m))

        init_cls_token = x[:, :1]
        cls_token = init_cls_token.repeat(1, t, 1).reshape(b * t, 1, m)
        xs = xt.reshape(b, n // w, w, t, m).permute(0, 3, 1, 2, 4).reshape(b * t, n, m)
        res_spatial = self.drop_path(self.attn(self.norm1(torch.cat([cls_token, xs], 1))))
        cls_token = res_spatial[:, 0].reshape(b, t, m).mean(1, True)
        res = res_spatial[:, 1:].reshape(b, t, n, m).transpose(1, 2).reshape(b, n * t, m)

        x = torch.cat([init_cls_token, xt], 1) + torch.cat([cls_token, res], 1)
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PatchEmbed(nn.Module):
    def __init__(self, patch_size: int, in_chans: int, embed_dim: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> tuple[Tensor, int, int]:
        t = x.shape[2]
        x = self.proj(x.transpose(1, 2).flatten(0, 1))
        return x.flatten(2).transpose(1, 2), t, x.shape[3]


class VisionTransformer(nn.Module):
    """Clips [B, 3, T, H, W] -> scores [B, classes]."""

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed(PATCH, CHANNELS, WIDTH)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(torch.zeros(1, 1 + HIGH * WIDE // PATCH**2, WIDTH))
        self.time_embed = nn.Parameter(torch.zeros(1, FRAMES, WIDTH))
        self.blocks = nn.ModuleList(Block(WIDTH, HEADS, HIDDEN) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head = nn.Linear(WIDTH, CLASSES)
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.normal_(p, float("norm" in name and name.endswith("weight")), 0.2)
            else:
                nn.init.normal_(p, 0, 0.5 if p.shape[0] == 1 else p[0].numel() ** -0.5)

    def forward_features(self, x: Tensor) -> Tensor:
        b = len(x)
        x, t, w = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1) + self.pos_embed
        cls_tokens, x = x[:b, :1], x[:, 1:]
        n, m = x.shape[1:]
        x = x.reshape(b, t, n, m).transpose(1, 2).reshape(b * n, t, m) + self.time_embed
        x = torch.cat([cls_tokens, x.reshape(b, n * t, m)], 1)
        for blk in self.blocks:
            x = blk(x, b, t, w)
        return self.norm(x)[:, 0]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.forward_features(x))


def clips() -> tuple[Tensor, Tensor]:
    """Waves that move in a direction by class, with some noise."""
    label = torch.randint(CLASSES, (CLIPS,))
    angle = (math.tau * label / CLASSES)[:, None, None, None, None]
    t, y, x = (torch.arange(float(n)) for n in (FRAMES, HIGH, WIDE))
    along = angle.cos() * x + angle.sin() * y[:, None] - 0.6 * t[:, None, None]
    phase = math.tau * torch.rand(CLIPS, 1, 1, 1, 1) + torch.arange(float(CHANNELS))[:, None, None, None]
    wave = torch.sin(1.1 * along + phase)
    return wave + 0.3 * torch.randn_like(wave), label


def third_of_cross_entropy(scores: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(scores, label) / 3
