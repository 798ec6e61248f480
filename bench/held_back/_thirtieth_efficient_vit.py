"""A small EfficientViT of MIT: convolutions, then blocks of ReLU linear attention over several scales."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, HIGH, WIDE, PICTURES, CLASSES = 3, 24, 32, 3, 7
STEM, WIDTHS, DIM, SCALES, HEAD = 8, (12, 20), 6, (3, 5), (30, 38)


class ConvNormAct(nn.Module):
    def __init__(
        self, ins: int, outs: int, size: int = 3, stride=1, groups=1, bias=False, norm=True, act=True
    ):
        super().__init__()
        self.conv = nn.Conv2d(ins, outs, size, stride, size // 2, groups=groups, bias=bias)
        self.norm = nn.BatchNorm2d(outs) if norm else nn.Identity()
        self.act = nn.Hardswish() if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class DSConv(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.depth_conv = ConvNormAct(in_channels, in_channels, groups=in_channels)
        self.point_conv = ConvNormAct(in_channels, out_channels, 1, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.point_conv(self.depth_conv(x))


class MBConv(nn.Module):
    """Fewer norms: biases in their place, but for the last."""

    def __init__(self, ins: int, outs: int, stride: int = 1, expand_ratio: int = 4, fewer_norm: bool = False):
        super().__init__()
        mid, kind = ins * expand_ratio, {"bias": fewer_norm, "norm": not fewer_norm}
        self.inverted_conv = ConvNormAct(ins, mid, 1, **kind)
        self.depth_conv = ConvNormAct(mid, mid, 3, stride, mid, **kind)
        self.point_conv = ConvNormAct(mid, outs, 1, act=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.point_conv(self.depth_conv(self.inverted_conv(x)))


class LiteMLA(nn.Module):
    """Lightweight multi-scale linear attention."""

    def __init__(
        self, in_channels: int, out_channels: int, dim: int, scales: tuple[int, ...], eps: float = 1e-5
    ):
        super().__init__()
        self.eps, self.dim, heads = eps, dim, in_channels // dim
        total = heads * dim
        self.qkv = ConvNormAct(in_channels, 3 * total, 1, norm=False, act=False)
        self.aggreg = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(3 * total, 3 * total, scale, padding=scale // 2, groups=3 * total, bias=False),
                nn.Conv2d(3 * total, 3 * total, 1, groups=3 * heads, bias=False),
            )
            for scale in scales
        )
        self.kernel_func = nn.ReLU()
        self.proj = ConvNormAct(total * (1 + len(scales)), out_channels, 1, act=False)

    def _attn(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q @ (k.transpose(-1, -2) @ v)
        return out[..., :-1] / (out[..., -1:] + self.eps)

    def forward(self, x: Tensor) -> Tensor:
        n, _, high, wide = x.shape
        qkv = self.qkv(x)
        multi_scale_qkv = torch.cat([qkv, *(op(qkv) for op in self.aggreg)], 1)
        multi_scale_qkv = multi_scale_qkv.reshape(n, -1, 3 * self.dim, high * wide).transpose(-1, -2)
        q, k, v = multi_scale_qkv.chunk(3, dim=-1)
        q, k = self.kernel_func(q), self.kernel_func(k)
        out = self._attn(q, k, F.pad(v, (0, 1), value=1.0))
        return self.proj(out.transpose(-1, -2).reshape(n, -1, high, wide))


class ResidualBlock(nn.Module):
    def __init__(self, main: nn.Module, shortcut: nn.Module | None = None):
        super().__init__()
        self.main, self.shortcut = main, shortcut

    def forward(self, x: Tensor) -> Tensor:
        res = self.main(x)
        return res if self.shortcut is None else res + self.shortcut(x)


class EfficientVitBlock(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.context_module = ResidualBlock(LiteMLA(width, width, DIM, SCALES), nn.Identity())
        self.local_module = ResidualBlock(MBConv(width, width, fewer_norm=True), nn.Identity())

    def forward(self, x: Tensor) -> Tensor:
        return self.local_module(self.context_module(x))


class Stem(nn.Sequential):
    def __init__(self):
        super().__init__()
        self.add_module("in_conv", ConvNormAct(COLOURS, STEM, 3, 2))
        self.add_module("res0", ResidualBlock(DSConv(STEM, STEM), nn.Identity()))


class EfficientVitStage(nn.Module):
    def __init__(self, ins: int, outs: int, vit: bool):
        super().__init__()
        blocks = [ResidualBlock(MBConv(ins, outs, 2, fewer_norm=vit))]
        if vit:
            blocks += [EfficientVitBlock(outs) for _ in range(2)]
        else:
            blocks.append(ResidualBlock(MBConv(outs, outs), nn.Identity()))
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class ClassifierHead(nn.Module):
    def __init__(self, in_channels: int, widths: tuple[int, int]):
        super().__init__()
        self.in_conv = ConvNormAct(in_channels, widths[0], 1)
        self.global_pool = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(1))
        first, last = nn.Linear(*widths, bias=False), nn.Linear(widths[1], CLASSES)
        self.classifier = nn.Sequential(first, nn.LayerNorm(widths[1]), nn.Hardswish(), last)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.global_pool(self.in_conv(x)))


class EfficientVit(nn.Module):
    """[N, 3, H, W] -> class logits."""

    def __init__(self):
        super().__init__()
        self.stem = Stem()
        widths = STEM, *WIDTHS
        self.stages = nn.Sequential(*(EfficientVitStage(*widths[i : i + 2], i == 1) for i in range(2)))
        self.head = ClassifierHead(WIDTHS[-1], HEAD)
        self.apply(draw)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)))


def draw(module: nn.Module) -> None:
    """All weights of a layer, and the statistics of a norm, at random."""
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(module, (nn.BatchNorm2d, nn.LayerNorm)):
        nn.init.normal_(weight, 1.0, 0.2)
    elif weight is not None:
        nn.init.normal_(weight, std=1.2 / math.sqrt(weight[0].numel()))
    if bias is not None:
        nn.init.normal_(bias, std=0.2)
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean.normal_(std=0.2), module.running_var.uniform_(0.5, 1.5)


def stripes() -> tuple[Tensor, Tensor]:
    """Coloured stripes, whose class tells their direction, under a bright disc."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    tone = torch.arange(COLOURS)[:, None, None] + 6 * torch.rand(PICTURES, 1, 1, 1)
    wave = torch.sin(turn.cos() * across + turn.sin() * down + tone)
    left, top = (2 + 6 * torch.rand(2, PICTURES, 1, 1, 1)).unbind()
    disc = torch.exp(-((across - left) ** 2 + (down - top) ** 2) / 2)
    return wave + disc + 0.1 * torch.randn_like(wave), label


def quarter_entropy(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label) / 4
