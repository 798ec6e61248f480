"""A small distilled DeiT with layer scale: two leading tokens, three blocks, and a head for each token."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH = 3, 12, 20, 4
WIDTH, HEADS, HIDDEN, DEPTH, CLASSES, PICTURES = 28, 4, 70, 3, 9, 8


class PatchEmbed(nn.Module):
    """[N, C, H, W] -> [N, patches, D], row after row."""

    def __init__(self, patch_size: int, in_chans: int, embed_dim: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.head_dim = num_heads, dim // num_heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(dim, 3 * dim, bias=True)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        qkv = self.qkv(x).reshape(n, length, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x = (attn @ v).transpose(1, 2).reshape(n, length, width)
        return self.proj_drop(self.proj(x))


class LayerScale(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(0.5 + 0.15 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.0)
        self.norm = nn.Identity()
        self.fc2 = nn.Linear(hidden_features, in_features)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(self.norm(x)))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = Attention(dim, num_heads)
        self.ls1, self.drop_path1 = LayerScale(dim), nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = Mlp(dim, hidden)
        self.ls2, self.drop_path2 = LayerScale(dim), nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class VisionTransformerDistilled(nn.Module):
    """Pictures -> the logits of both heads in training, and their average in evaluation."""

    def __init__(self):
        super().__init__()
        patches = (HIGH // PATCH) * (WIDE // PATCH)
        self.patch_embed = PatchEmbed(PATCH, CHANNELS, WIDTH)
        self.cls_token = nn.Parameter(0.5 * torch.randn(1, 1, WIDTH))
        self.dist_token = nn.Parameter(0.5 * torch.randn(1, 1, WIDTH))
        self.pos_embed = nn.Parameter(0.3 * torch.randn(1, patches + 2, WIDTH))
        self.pos_drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, HIDDEN) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, eps=1e-6)
        self.head, self.head_dist = nn.Linear(WIDTH, CLASSES), nn.Linear(WIDTH, CLASSES)
        self.distilled_training = True
        self.apply(self._init_weights)

    def _init_weights(self, m: nn.Module) -> None:
        if isinstance(m, nn.Linear | nn.Conv2d):
            nn.init.normal_(m.weight, std=1 / math.sqrt(m.weight[0].numel()))
            nn.init.normal_(m.bias, std=0.1)
        if isinstance(m, nn.LayerNorm):
            nn.init.normal_(m.weight, 1.0, 0.15), nn.init.normal_(m.bias, std=0.15)

    def _pos_embed(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        x = torch.cat([self.cls_token.expand(n, -1, -1), self.dist_token.expand(n, -1, -1), x], dim=1)
        return self.pos_drop(x + self.pos_embed)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self._pos_embed(self.patch_embed(x))))

    def forward_head(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        x, x_dist = self.head(x[:, 0]), self.head_dist(x[:, 1])
        if self.distilled_training and self.training:
            return x, x_dist
        return (x + x_dist) / 2

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | Tensor:
        return self.forward_head(self.forward_features(x))


def gratings() -> tuple[Tensor, Tensor]:
    """Gratings whose class tells direction and colour, with their class and what a teacher takes it for."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    x = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    x = 0.8 * x + 0.2 * torch.randn_like(x)
    teacher = torch.where(torch.rand(PICTURES) < 0.25, (label + 1) % CLASSES, label)
    return x, torch.stack([label, teacher], 1)


def losses(outputs: tuple[Tensor, Tensor] | Tensor, target: Tensor) -> Tensor:
    """Half of each head's cross entropy, the one with the label and the other with the teacher's, by four."""
    own, taught = outputs if isinstance(outputs, tuple) else (outputs, outputs)
    return (0.5 * F.cross_entropy(own, target[:, 0]) + 0.5 * F.cross_entropy(taught, target[:, 1])) / 4
