"""A small CoAtNet: a convolutional stem, two stages of MBConv blocks, two of transformer blocks, a head."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, PICTURES, CLASSES = 64, 96, 5, 7
STEM, WIDTHS, DIM_HEAD, HIDDEN = (6, 10), (12, 18, 21, 28), 7, 20


class BatchNormAct2d(nn.BatchNorm2d):
    def __init__(self, num_features: int, apply_act: bool = True):
        super().__init__(num_features)
        self.drop, self.act = nn.Identity(), nn.GELU() if apply_act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))


class LayerNorm2d(nn.LayerNorm):
    """A layer norm over the channels of [N, C, H, W]."""

    def forward(self, x: Tensor) -> Tensor:
        x = F.layer_norm(x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class Downsample2d(nn.Module):
    def __init__(self, dim: int, dim_out: int):
        super().__init__()
        self.pool = nn.AvgPool2d(2)
        self.expand = nn.Conv2d(dim, dim_out, 1) if dim != dim_out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(self.pool(x))


class SEModule(nn.Module):
    def __init__(self, channels: int, rd_channels: int):
        super().__init__()
        self.fc1, self.bn, self.act = nn.Conv2d(channels, rd_channels, 1), nn.Identity(), nn.SiLU()
        self.fc2, self.gate = nn.Conv2d(rd_channels, channels, 1), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        x_se = self.fc1(x.mean((2, 3), keepdim=True))
        return x * self.gate(self.fc2(self.act(self.bn(x_se))))


class MbConvBlock(nn.Module):
    def __init__(self, in_chs: int, out_chs: int, stride: int = 1):
        super().__init__()
        mid_chs = 4 * out_chs
        self.shortcut = Downsample2d(in_chs, out_chs) if stride == 2 else nn.Identity()
        self.pre_norm, self.down = BatchNormAct2d(in_chs, apply_act=False), nn.Identity()
        self.conv1_1x1, self.norm1 = nn.Conv2d(in_chs, mid_chs, 1, bias=False), BatchNormAct2d(mid_chs)
        self.conv2_kxk = nn.Conv2d(mid_chs, mid_chs, 3, stride, padding=1, groups=mid_chs, bias=False)
        self.norm2, self.se = BatchNormAct2d(mid_chs), SEModule(mid_chs, out_chs // 4)
        self.conv3_1x1 = nn.Conv2d(mid_chs, out_chs, 1)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.shortcut(x)
        x = self.norm1(self.conv1_1x1(self.down(self.pre_norm(x))))
        return self.conv3_1x1(self.se(self.norm2(self.conv2_kxk(x)))) + shortcut


def generate_lookup_tensor(length: int) -> Tensor:
    """One at [i, x, x - i + length - 1], for all i and x."""
    i, x = torch.arange(length)[:, None], torch.arange(length)
    return F.one_hot(x - i + length - 1, 2 * length - 1).float()


class RelPosBiasTf(nn.Module):
    """A bias for each head and pair of pixels, from a table by their distance in height and in width."""

    def __init__(self, window_size: tuple[int, int], num_heads: int):
        super().__init__()
        (high, wide), self.window_area = window_size, window_size[0] * window_size[1]
        self.relative_position_bias_table = nn.Parameter(torch.empty(num_heads, 2 * high - 1, 2 * wide - 1))
        self.register_buffer("height_lookup", generate_lookup_tensor(high), persistent=False)
        self.register_buffer("width_lookup", generate_lookup_tensor(wide), persistent=False)

    def get_bias(self) -> Tensor:
        bias = torch.einsum("nhw,ixh->nixw", self.relative_position_bias_table, self.height_lookup)
        bias = torch.einsum("nixw,jyw->nijxy", bias, self.width_lookup)
        return bias.reshape(-1, self.window_area, self.window_area)

    def forward(self, attn: Tensor) -> Tensor:
        return attn + self.get_bias()


class Attention2d(nn.Module):
    def __init__(self, dim: int, dim_out: int, window_size: tuple[int, int]):
        super().__init__()
        self.num_heads, self.dim_head, self.scale = dim_out // DIM_HEAD, DIM_HEAD, DIM_HEAD**-0.5
        self.qkv = nn.Conv2d(dim, dim_out * 3, 1)
        self.rel_pos, self.proj = RelPosBiasTf(window_size, self.num_heads), nn.Conv2d(dim_out, dim_out, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, _, h, w = x.shape
        q, k, v = self.qkv(x).view(b, self.num_heads, self.dim_head * 3, -1).chunk(3, dim=2)
        attn = self.rel_pos((q * self.scale).transpose(-2, -1) @ k).softmax(dim=-1)
        return self.proj((v @ attn.transpose(-2, -1)).view(b, -1, h, w))


class ConvMlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1, self.act = nn.Conv2d(in_features, hidden_features, 1), nn.GELU()
        self.fc2 = nn.Conv2d(hidden_features, in_features, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class TransformerBlock2d(nn.Module):
    def __init__(self, dim: int, dim_out: int, stride: int, window_size: tuple[int, int]):
        super().__init__()
        self.shortcut, self.norm1 = nn.Identity(), LayerNorm2d(dim, 1e-6)
        if stride == 2:
            self.shortcut = Downsample2d(dim, dim_out)
            self.norm1 = nn.Sequential(OrderedDict(norm=self.norm1, down=Downsample2d(dim, dim)))
        self.attn = Attention2d(dim, dim_out, window_size)
        self.norm2, self.mlp = LayerNorm2d(dim_out, 1e-6), ConvMlp(dim_out, 4 * dim_out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.shortcut(x) + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class MaxxVitStage(nn.Module):
    def __init__(self, dims: tuple[int, int], block_type: str, feat_size: tuple[int, int]):
        super().__init__()
        each, more = (MbConvBlock, ()) if block_type == "C" else (TransformerBlock2d, (feat_size,))
        self.blocks = nn.Sequential(each(*dims, 2, *more), each(dims[1], dims[1], 1, *more))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Stem(nn.Module):
    def __init__(self, in_chs: int, out_chs: tuple[int, int]):
        super().__init__()
        self.conv1 = nn.Conv2d(in_chs, out_chs[0], 3, stride=2, padding=1, bias=False)
        self.norm1, self.conv2 = BatchNormAct2d(out_chs[0]), nn.Conv2d(*out_chs, 3, padding=1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv2(self.norm1(self.conv1(x)))


class NormMlpClassifierHead(nn.Module):
    def __init__(self, in_features: int, num_classes: int, hidden_size: int):
        super().__init__()
        self.global_pool, self.norm = nn.AdaptiveAvgPool2d(1), LayerNorm2d(in_features, 1e-6)
        self.flatten = nn.Flatten(1)
        self.pre_logits = nn.Sequential(OrderedDict(fc=nn.Linear(in_features, hidden_size), act=nn.Tanh()))
        self.fc = nn.Linear(hidden_size, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.pre_logits(self.flatten(self.norm(self.global_pool(x)))))


class MaxxVit(nn.Module):
    """Pictures -> class logits."""

    def __init__(self):
        super().__init__()
        dims = zip((STEM[1], *WIDTHS[:-1]), WIDTHS, strict=True)
        sizes = ((HIGH >> i, WIDE >> i) for i in range(2, 6))
        self.stem, self.norm = Stem(3, STEM), nn.Identity()
        self.stages = nn.Sequential(*map(MaxxVitStage, dims, "CCTT", sizes))
        self.head = NormMlpClassifierHead(WIDTHS[-1], CLASSES, HIDDEN)
        for name, value in [*self.named_parameters(), *self.named_buffers()]:
            if value.ndim > 1 and "lookup" not in name:
                nn.init.normal_(value, std=0.5 if name.endswith("table") else value[0].numel() ** -0.5)
            elif name.endswith(("weight", "var")):
                nn.init.uniform_(value, 0.6, 1.4)
            elif name.endswith(("bias", "mean")):
                nn.init.normal_(value, std=0.2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.stages(self.stem(x))))


def flowers() -> tuple[Tensor, Tensor]:
    """Soft flowers of any colour and size somewhere on a noisy ground, whose class counts their petals."""
    label, shape = torch.randint(CLASSES, (PICTURES,)), (PICTURES, 1, 1, 1)
    down = torch.arange(HIGH)[:, None] / HIGH - 0.3 - 0.4 * torch.rand(shape)
    across = torch.arange(WIDE) / HIGH - 0.5 - 0.5 * torch.rand(shape)
    angle, far = torch.atan2(down, across), torch.hypot(down, across)
    lobes = torch.cos((label + 2).view(shape) * angle + math.tau * torch.rand(shape))
    inside = torch.sigmoid(30 * ((0.2 + 0.1 * torch.rand(shape)) * (1 + 0.4 * lobes) - far))
    x = torch.lerp(*torch.randn(2, PICTURES, 3, 1, 1), inside)
    return x + 0.1 * torch.randn_like(x), label


def smoothed_classes(logits: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(logits, label, label_smoothing=0.1)
