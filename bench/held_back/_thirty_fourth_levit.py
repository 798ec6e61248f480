"""A small LeViT of three stages, of three crops a picture, with a distilled head."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, CROPS, PICTURES = 40, 56, 7, 3, 3
DIMS, HEADS, DEPTHS, KEY, RATIO, DOWN_RATIO = (24, 36, 44), (3, 4, 5), (2, 2, 1), 6, 2, 3


class ConvNorm(nn.Module):
    def __init__(self, in_chs: int, out_chs: int):
        super().__init__()
        self.linear = nn.Conv2d(in_chs, out_chs, 3, 2, 1, bias=False)
        self.bn = nn.BatchNorm2d(out_chs)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.linear(x))


class LinearNorm(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.linear = nn.Linear(in_features, out_features, bias=False)
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return self.bn(x.flatten(0, 1)).reshape_as(x)


class NormLinear(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.bn = nn.BatchNorm1d(in_features)
        self.linear = nn.Linear(in_features, out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.bn(x))


class Stem8(nn.Sequential):
    def __init__(self, in_chs: int, out_chs: int):
        super().__init__()
        self.add_module("conv1", ConvNorm(in_chs, out_chs // 4))
        self.add_module("act1", nn.Hardswish())
        self.add_module("conv2", ConvNorm(out_chs // 4, out_chs // 2))
        self.add_module("act2", nn.Hardswish())
        self.add_module("conv3", ConvNorm(out_chs // 2, out_chs))


class Downsample(nn.Module):
    def __init__(self, stride: int, resolution: tuple[int, int]):
        super().__init__()
        self.stride, self.resolution = stride, resolution

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, self.resolution)
        return x[:, :: self.stride, :: self.stride].flatten(1, 2)


def attention_bias_idxs(resolution: tuple[int, int], stride: int = 1) -> Tensor:
    """The number of the offset, without signs, of each key from each query."""
    ks, qs = (
        torch.cartesian_prod(*(torch.arange(0, length, step) for length in resolution))
        for step in (1, stride)
    )
    rel_pos = (qs[:, None] - ks).abs()
    return rel_pos[..., 0] * resolution[1] + rel_pos[..., 1]


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int, resolution: tuple[int, int]):
        super().__init__()
        self.num_heads, self.key_dim, self.val_dim, self.scale = num_heads, KEY, RATIO * KEY, KEY**-0.5
        self.qkv = LinearNorm(dim, num_heads * (2 * KEY + self.val_dim))
        ln = LinearNorm(num_heads * self.val_dim, dim)
        self.proj = nn.Sequential(OrderedDict(act=nn.Hardswish(), ln=ln))
        self.attention_biases = nn.Parameter(torch.empty(num_heads, math.prod(resolution)))
        self.register_buffer("attention_bias_idxs", attention_bias_idxs(resolution), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).unflatten(2, (self.num_heads, -1))
        q, k, v = qkv.split([self.key_dim, self.key_dim, self.val_dim], dim=3)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        attn = q @ k * self.scale + self.attention_biases[:, self.attention_bias_idxs]
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class AttentionDownsample(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, num_heads: int, resolution: tuple[int, int]):
        super().__init__()
        self.stride, self.num_heads, self.scale = 2, num_heads, KEY**-0.5
        self.key_dim, self.val_dim = KEY, DOWN_RATIO * KEY
        self.kv = LinearNorm(in_dim, num_heads * (KEY + self.val_dim))
        down, ln = Downsample(self.stride, resolution), LinearNorm(in_dim, num_heads * KEY)
        self.q = nn.Sequential(OrderedDict(down=down, ln=ln))
        ln = LinearNorm(num_heads * self.val_dim, out_dim)
        self.proj = nn.Sequential(OrderedDict(act=nn.Hardswish(), ln=ln))
        self.attention_biases = nn.Parameter(torch.empty(num_heads, math.prod(resolution)))
        idxs = attention_bias_idxs(resolution, self.stride)
        self.register_buffer("attention_bias_idxs", idxs, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        k, v = self.kv(x).unflatten(2, (self.num_heads, -1)).split([self.key_dim, self.val_dim], dim=3)
        k, v = k.permute(0, 2, 3, 1), v.permute(0, 2, 1, 3)
        q = self.q(x).unflatten(2, (self.num_heads, -1)).permute(0, 2, 1, 3)
        attn = q @ k * self.scale + self.attention_biases[:, self.attention_bias_idxs]
        return self.proj((attn.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class LevitMlp(nn.Module):
    def __init__(self, in_features: int):
        super().__init__()
        self.ln1 = LinearNorm(in_features, 2 * in_features)
        self.act = nn.Hardswish()
        self.ln2 = LinearNorm(2 * in_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.ln2(self.act(self.ln1(x)))


class LevitDownsample(nn.Module):
    def __init__(self, in_dim: int, out_dim: int, resolution: tuple[int, int]):
        super().__init__()
        self.attn_downsample = AttentionDownsample(in_dim, out_dim, in_dim // KEY, resolution)
        self.mlp = LevitMlp(out_dim)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attn_downsample(x)
        return x + self.mlp(x)


class LevitBlock(nn.Module):
    def __init__(self, dim: int, num_heads: int, resolution: tuple[int, int]):
        super().__init__()
        self.attn, self.mlp = Attention(dim, num_heads, resolution), LevitMlp(dim)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(x)
        return x + self.mlp(x)


class LevitStage(nn.Module):
    def __init__(self, in_dim: int, dim: int, depth: int, num_heads: int, resolution: tuple[int, int]):
        super().__init__()
        self.downsample = nn.Identity()
        if in_dim != dim:
            self.downsample = LevitDownsample(in_dim, dim, resolution)
            resolution = tuple((length + 1) // 2 for length in resolution)
        self.resolution = resolution
        self.blocks = nn.Sequential(*(LevitBlock(dim, num_heads, resolution) for _ in range(depth)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.downsample(x))


class LevitDistilled(nn.Module):
    """[N, crops, 3, H, W] -> logits of each crop: a pair of them in training, their mean in evaluation."""

    def __init__(self):
        super().__init__()
        self.stem, stages = Stem8(3, DIMS[0]), []
        resolution, in_dim = (HIGH // 8, WIDE // 8), DIMS[0]
        for dim, depth, heads in zip(DIMS, DEPTHS, HEADS, strict=True):
            stages.append(LevitStage(in_dim, dim, depth, heads, resolution))
            resolution, in_dim = stages[-1].resolution, dim
        self.stages = nn.Sequential(*stages)
        self.head, self.head_dist = NormLinear(in_dim, CLASSES), NormLinear(in_dim, CLASSES)
        for name, values in (*self.named_parameters(), *self.named_buffers()):
            if name.endswith(("bn.weight", "running_var")):
                nn.init.uniform_(values, 0.5, 1.4)
            elif name.endswith(("bias", "biases", "running_mean")):
                nn.init.normal_(values, std=0.6 if "biases" in name else 0.2)

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        count = x.shape[:2]
        x = self.stages(self.stem(x.flatten(0, 1)).flatten(2).transpose(1, 2)).mean(dim=1)
        x, x_dist = self.head(x).unflatten(0, count), self.head_dist(x).unflatten(0, count)
        return (x, x_dist) if self.training else (x + x_dist) / 2


def gratings() -> tuple[Tensor, Tensor]:
    """Crops of noisy gratings, whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES).view(-1, 1, 1, 1, 1)
    across, down = torch.arange(WIDE) / 3, torch.arange(HIGH)[:, None] / 3
    phase, tone = 6 * torch.rand(PICTURES, CROPS, 1, 1, 1), 2 * torch.arange(3)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    return wave + 0.4 * torch.randn_like(wave), label[:, None].expand(-1, CROPS).clone()


def both_heads(outputs: Tensor | tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    """A fourth of the mean cross entropy, the teacher's label being the same."""
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(F.cross_entropy(x.flatten(0, 1), label.flatten()) for x in heads) / len(heads) / 4
