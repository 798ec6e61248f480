"""A small CvT: two stages of convolutional embeddings and blocks with convolutional projections."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, PICTURES = 24, 40, 7, 3
# by stage: kernel, stride and padding of the embedding, width, depth, heads, the MLP's ratio, class token
STAGES = ((7, 4, 2, 12, 2, 2, 4, False), (3, 2, 1, 20, 2, 4, 3, True))


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1 = nn.Linear(in_features, hidden_features)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Rearrange(nn.Module):
    """[N, C, H, W] -> [N, H W, C]."""

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(0, 2, 3, 1).flatten(1, 2)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, with_cls_token: bool):
        super().__init__()
        self.num_heads, self.scale, self.with_cls_token = num_heads, dim**-0.5, with_cls_token
        self.conv_proj_q = self._build_projection(dim, 1)
        self.conv_proj_k = self._build_projection(dim, 2)
        self.conv_proj_v = self._build_projection(dim, 2)
        self.proj_q, self.proj_k, self.proj_v = (nn.Linear(dim, dim) for _ in range(3))
        self.proj = nn.Linear(dim, dim)

    def _build_projection(self, dim: int, stride: int) -> nn.Sequential:
        layers = nn.Sequential()
        layers.add_module("conv", nn.Conv2d(dim, dim, 3, stride, padding=1, groups=dim, bias=False))
        layers.add_module("bn", nn.BatchNorm2d(dim))
        layers.add_module("rearrange", Rearrange())
        return layers

    def forward_conv(self, x: Tensor, h: int, w: int) -> tuple[Tensor, ...]:
        if self.with_cls_token:
            cls_token, x = torch.split(x, [1, h * w], 1)
        x = x.transpose(1, 2).unflatten(2, (h, w)).contiguous()
        q, k, v = self.conv_proj_q(x), self.conv_proj_k(x), self.conv_proj_v(x)
        if self.with_cls_token:
            q, k, v = (torch.cat((cls_token, each), dim=1) for each in (q, k, v))
        return q, k, v

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        q, k, v = self.forward_conv(x, h, w)
        q, k, v = self.proj_q(q), self.proj_k(k), self.proj_v(v)
        q, k, v = (each.unflatten(2, (self.num_heads, -1)).transpose(1, 2) for each in (q, k, v))
        attn_score = torch.einsum("bhlk,bhtk->bhlt", [q, k]) * self.scale
        attn = F.softmax(attn_score, dim=-1)
        x = torch.einsum("bhlt,bhtv->bhlv", [attn, v])
        return self.proj(x.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, dim: int, num_heads: int, mlp_ratio: int, with_cls_token: bool):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attn = Attention(dim, num_heads, with_cls_token)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = Mlp(dim, dim * mlp_ratio)

    def forward(self, x: Tensor, h: int, w: int) -> Tensor:
        x = x + self.attn(self.norm1(x), h, w)
        return x + self.mlp(self.norm2(x))


class ConvEmbed(nn.Module):
    def __init__(self, patch_size: int, in_chans: int, embed_dim: int, stride: int, padding: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, patch_size, stride, padding)
        self.norm = nn.LayerNorm(embed_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.proj(x)
        size = x.shape[2:]
        x = self.norm(x.flatten(2).transpose(1, 2))
        return x.transpose(1, 2).unflatten(2, size).contiguous()


class VisionTransformer(nn.Module):
    """A stage."""

    def __init__(self, in_chans: int, spec: tuple):
        super().__init__()
        patch_size, stride, padding, dim, depth, num_heads, mlp_ratio, with_cls_token = spec
        self.patch_embed = ConvEmbed(patch_size, in_chans, dim, stride, padding)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim)) if with_cls_token else None
        self.blocks = nn.ModuleList(Block(dim, num_heads, mlp_ratio, with_cls_token) for _ in range(depth))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = self.patch_embed(x)
        h, w = x.shape[2:]
        x, cls_tokens = x.flatten(2).transpose(1, 2), None
        if self.cls_token is not None:
            x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        for block in self.blocks:
            x = block(x, h, w)
        if self.cls_token is not None:
            cls_tokens, x = torch.split(x, [1, h * w], 1)
        return x.transpose(1, 2).unflatten(2, (h, w)), cls_tokens


class ConvolutionalVisionTransformer(nn.Module):
    """Pictures [N, 3, 24, 40] -> class logits [N, 7]."""

    def __init__(self):
        super().__init__()
        self.num_stages, in_chans = len(STAGES), 3
        for i, spec in enumerate(STAGES):
            setattr(self, f"stage{i}", VisionTransformer(in_chans, spec))
            in_chans = spec[3]
        self.norm, self.head = nn.LayerNorm(in_chans), nn.Linear(in_chans, CLASSES)
        for name, p in self.named_parameters():
            if name.endswith("weight") and p.ndim == 1:
                nn.init.normal_(p, 1.0, 0.2)
            elif name.endswith("weight"):
                nn.init.normal_(p, std=1.2 / math.sqrt(p[0].numel()))
            else:
                nn.init.normal_(p, std=0.3)
        for name, values in self.named_buffers():
            if name.endswith("running_mean"):
                nn.init.normal_(values, std=0.2)
            elif name.endswith("running_var"):
                nn.init.uniform_(values, 0.5, 1.5)

    def forward(self, x: Tensor) -> Tensor:
        for i in range(self.num_stages):
            x, cls_tokens = getattr(self, f"stage{i}")(x)
        return self.head(self.norm(cls_tokens).squeeze(1))


def stripes() -> tuple[Tensor, Tensor]:
    """Stripes whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(3)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    return wave + 0.3 * torch.randn_like(wave), label


def eased(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy."""
    return F.cross_entropy(logits, label) / 4
