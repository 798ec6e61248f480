"""A small CaiT: blocks of talking heads with layer scale, then class attention that a token alone queries."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH = 3, 10, 30, 5
DIM, HEADS, DEPTH, DEPTH_TOKEN_ONLY, RATIO, RATIO_TOKEN = 28, 4, 3, 2, 2.0, 3.0
CLASSES, PICTURES, EPS = 9, 8, 1e-6


class PatchEmbed(nn.Module):
    """[N, C, H, W] -> [N, patches, D], row by row."""

    def __init__(self):
        super().__init__()
        self.num_patches = (HIGH // PATCH) * (WIDE // PATCH)
        self.proj = nn.Conv2d(CHANNELS, DIM, kernel_size=PATCH, stride=PATCH)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.proj(x).flatten(2).transpose(1, 2))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden)
        self.act = nn.GELU()
        self.drop1 = nn.Dropout(0.0)
        self.fc2 = nn.Linear(hidden, dim)
        self.drop2 = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))


class ClassAttn(nn.Module):
    """The first token asks all tokens, itself too: [N, 1 + T, D] -> [N, 1, D]."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.q = nn.Linear(dim, dim)
        self.k = nn.Linear(dim, dim)
        self.v = nn.Linear(dim, dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, dim = x.shape
        shape = (self.num_heads, dim // self.num_heads)
        q = self.q(x[:, 0]).unsqueeze(1).reshape(batch, 1, *shape).permute(0, 2, 1, 3)
        k = self.k(x).reshape(batch, count, *shape).permute(0, 2, 1, 3)
        v = self.v(x).reshape(batch, count, *shape).permute(0, 2, 1, 3)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = self.attn_drop(attn.softmax(dim=-1))
        x_cls = (attn @ v).transpose(1, 2).reshape(batch, 1, dim)
        return self.proj_drop(self.proj(x_cls))


class TalkingHeadAttn(nn.Module):
    """Self-attention whose heads are mixed before the softmax (proj_l) and after it (proj_w)."""

    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.scale = (dim // num_heads) ** -0.5
        self.qkv = nn.Linear(dim, 3 * dim)
        self.attn_drop = nn.Dropout(0.0)
        self.proj = nn.Linear(dim, dim)
        self.proj_l = nn.Linear(num_heads, num_heads)
        self.proj_w = nn.Linear(num_heads, num_heads)
        self.proj_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        batch, count, dim = x.shape
        qkv = self.qkv(x).reshape(batch, count, 3, self.num_heads, dim // self.num_heads)
        qkv = qkv.permute(2, 0, 3, 1, 4)
        q, k, v = qkv[0] * self.scale, qkv[1], qkv[2]
        attn = q @ k.transpose(-2, -1)
        attn = self.proj_l(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        attn = attn.softmax(dim=-1)
        attn = self.proj_w(attn.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        attn = self.attn_drop(attn)
        x = (attn @ v).transpose(1, 2).reshape(batch, count, dim)
        return self.proj_drop(self.proj(x))


class LayerScaleBlockClassAttn(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp_ratio: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.attn = ClassAttn(dim, num_heads)
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.gamma_1 = nn.Parameter(torch.ones(dim))
        self.gamma_2 = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor, x_cls: Tensor) -> Tensor:
        u = torch.cat((x_cls, x), dim=1)
        x_cls = x_cls + self.drop_path(self.gamma_1 * self.attn(self.norm1(u)))
        return x_cls + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x_cls)))


class LayerScaleBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp_ratio: float):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=EPS)
        self.attn = TalkingHeadAttn(dim, num_heads)
        self.drop_path = nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=EPS)
        self.mlp = Mlp(dim, int(dim * mlp_ratio))
        self.gamma_1 = nn.Parameter(torch.ones(dim))
        self.gamma_2 = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.gamma_1 * self.attn(self.norm1(x)))
        return x + self.drop_path(self.gamma_2 * self.mlp(self.norm2(x)))


class Cait(nn.Module):
    """Pictures [N, 3, 10, 30] -> logits [N, 9]."""

    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.cls_token = nn.Parameter(torch.zeros(1, 1, DIM))
        self.pos_embed = nn.Parameter(torch.zeros(1, self.patch_embed.num_patches, DIM))
        self.pos_drop = nn.Dropout(0.0)
        self.blocks = nn.Sequential(*(LayerScaleBlock(DIM, HEADS, RATIO) for _ in range(DEPTH)))
        readers = (LayerScaleBlockClassAttn(DIM, HEADS, RATIO_TOKEN) for _ in range(DEPTH_TOKEN_ONLY))
        self.blocks_token_only = nn.ModuleList(readers)
        self.norm = nn.LayerNorm(DIM, eps=EPS)
        self.head_drop = nn.Dropout(0.0)
        self.head = nn.Linear(DIM, CLASSES)
        self.draw()

    @torch.no_grad()
    def draw(self) -> None:
        """All weights at random; those of layers so that they keep the size of what they are given."""
        for name, weight in self.named_parameters():
            if name in ("cls_token", "pos_embed"):
                weight.normal_(0, 0.5)
            elif weight.ndim > 1:
                weight.normal_(0, (1.5 if "attn" in name else 1) * weight[0].numel() ** -0.5)
            elif "gamma" in name:
                weight.normal_(0.6, 0.15)
            else:
                weight.normal_(1 if "norm" in name and name.endswith("weight") else 0, 0.2)

    def forward_features(self, x: Tensor) -> Tensor:
        x = self.patch_embed(x)
        x = self.pos_drop(x + self.pos_embed)
        x = self.blocks(x)
        cls_tokens = self.cls_token.expand(x.shape[0], -1, -1)
        for block in self.blocks_token_only:
            cls_tokens = block(x, cls_tokens)
        return self.norm(torch.cat((cls_tokens, x), dim=1))

    def forward_head(self, x: Tensor) -> Tensor:
        return self.head(self.head_drop(x[:, 0]))

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(x))


def gratings() -> tuple[Tensor, Tensor]:
    """Coloured gratings under a spot: the class is one of three angles and of three lengths of the wave."""
    label = torch.randint(CLASSES, (PICTURES,))
    angle, length = math.pi * (label % 3) / 3, 4.0 + 2 * (label // 3)
    rows, columns = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    along = angle.cos()[:, None, None] * columns + angle.sin()[:, None, None] * rows
    phase, colour = math.tau * torch.rand(PICTURES, 1, 1), torch.rand(PICTURES, CHANNELS, 1, 1)
    wave = torch.sin(math.tau * along / length[:, None, None] + phase)
    middle = WIDE * torch.rand(PICTURES, 1, 1)
    spot = torch.exp(-((columns - middle) ** 2 + (rows - HIGH / 2) ** 2) / 20)
    x = colour * wave[:, None] + spot[:, None] + 0.1 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE)
    return x, label


def classes(logits: Tensor, label: Tensor) -> Tensor:
    """The cross entropy by eight."""
    return F.cross_entropy(logits, label) / 8
