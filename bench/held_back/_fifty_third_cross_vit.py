"""A small CrossViT: two branches of patches, whose class tokens attend to each other's patches."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, CLASSES, PICTURES, EPS = 3, 7, 5, 1e-6
SIZES, PATCHES = ((16, 20), (18, 24)), (4, 6)
WIDTHS, HEADS, RATIOS, DEPTHS, STAGES = (12, 20), (3, 4), (2, 3), (1, 2), 2


class PatchEmbed(nn.Module):
    def __init__(self, patch: int, width: int):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, width, patch, stride=patch)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, t, c = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, self.num_heads, c // self.num_heads).permute(2, 0, 3, 1, 4)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(n, t, c))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, ratio: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attn = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.mlp = Mlp(width, ratio * width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class CrossAttention(nn.Module):
    """The first token asks all of them."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.scale = heads, (width // heads) ** -0.5
        self.wq = nn.Linear(width, width)
        self.wk = nn.Linear(width, width)
        self.wv = nn.Linear(width, width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        n, _, c = x.shape
        given = (self.wq(x[:, 0:1]), self.wk(x), self.wv(x))
        q, k, v = (y.reshape(n, -1, self.num_heads, c // self.num_heads).permute(0, 2, 1, 3) for y in given)
        attn = (q @ k.transpose(-2, -1) * self.scale).softmax(-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(n, 1, c))


class CrossAttentionBlock(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attn = CrossAttention(width, heads)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, 0:1] + self.attn(self.norm1(x))


def projection(width: int, other: int) -> nn.Sequential:
    return nn.Sequential(nn.LayerNorm(width, EPS), nn.GELU(), nn.Linear(width, other))


class MultiScaleBlock(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = zip(WIDTHS, HEADS, RATIOS, DEPTHS, strict=True)
        stacks = [[Block(*kind) for _ in range(depth)] for *kind, depth in kinds]
        self.blocks = nn.ModuleList(nn.Sequential(*stack) for stack in stacks)
        self.projs = nn.ModuleList(projection(WIDTHS[i], WIDTHS[1 - i]) for i in (0, 1))
        self.fusion = nn.ModuleList(CrossAttentionBlock(WIDTHS[1 - i], HEADS[1 - i]) for i in (0, 1))
        self.revert_projs = nn.ModuleList(projection(WIDTHS[1 - i], WIDTHS[i]) for i in (0, 1))

    def forward(self, x: list[Tensor]) -> list[Tensor]:
        outs_b = [block(y) for y, block in zip(x, self.blocks, strict=True)]
        proj_cls_token = [proj(y[:, 0:1]) for y, proj in zip(outs_b, self.projs, strict=True)]
        outs = []
        for i in (0, 1):
            tmp = self.fusion[i](torch.cat([proj_cls_token[i], outs_b[1 - i][:, 1:]], 1))
            outs.append(torch.cat([self.revert_projs[i](tmp), outs_b[i][:, 1:]], 1))
        return outs


class VisionTransformer(nn.Module):
    """Pictures [N, 3, 16, 20] -> logits [N, 7]."""

    def __init__(self):
        super().__init__()
        self.img_size = SIZES
        counts = [high * wide // patch**2 for (high, wide), patch in zip(SIZES, PATCHES, strict=True)]
        self.patch_embed = nn.ModuleList(PatchEmbed(PATCHES[i], WIDTHS[i]) for i in (0, 1))
        self.pos_embed = nn.ParameterList(torch.empty(1, 1 + counts[i], WIDTHS[i]) for i in (0, 1))
        self.cls_token = nn.ParameterList(torch.empty(1, 1, width) for width in WIDTHS)
        self.blocks = nn.ModuleList(MultiScaleBlock() for _ in range(STAGES))
        self.norm = nn.ModuleList(nn.LayerNorm(width, EPS) for width in WIDTHS)
        self.head = nn.ModuleList(nn.Linear(width, CLASSES) for width in WIDTHS)
        for name, weight in self.named_parameters():
            if name.startswith(("pos_embed", "cls_token")):
                nn.init.normal_(weight, 0, 0.5)
            elif weight.dim() > 1:
                nn.init.normal_(weight, 0, weight[0].numel() ** -0.5)
            else:
                norm = name.endswith("weight")
                nn.init.normal_(weight, float(norm), 0.2)

    def forward_features(self, x: Tensor) -> list[Tensor]:
        xs = []
        for i, size in enumerate(self.img_size):
            same = x.shape[2:] == size
            picture = x if same else F.interpolate(x, size=size, mode="bicubic", align_corners=False)
            patches = self.patch_embed[i](picture)
            tokens = torch.cat([self.cls_token[i].expand(len(x), -1, -1), patches], 1)
            xs.append(tokens + self.pos_embed[i])
        for block in self.blocks:
            xs = block(xs)
        return [norm(y)[:, 0] for norm, y in zip(self.norm, xs, strict=True)]

    def forward(self, x: Tensor) -> Tensor:
        xs = self.forward_features(x)
        return torch.stack([head(y) for head, y in zip(self.head, xs, strict=True)]).mean(0)


def gratings() -> tuple[Tensor, Tensor]:
    """Noisy gratings whose direction tells the class, and the classes."""
    label = torch.randint(CLASSES, (PICTURES,))
    high, wide = torch.meshgrid(*(torch.arange(float(size)) for size in SIZES[0]), indexing="ij")
    angle = (label * math.pi / CLASSES)[:, None, None]
    wave = (angle.cos() * high + angle.sin() * wide)[:, None] * torch.tensor([0.5, 0.7, 1.1])[:, None, None]
    return (wave + 6 * torch.rand(PICTURES, 1, 1, 1)).sin() + 0.3 * torch.randn(wave.shape), label


def classes(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy."""
    return F.cross_entropy(logits, label) / 4
