"""A small MViTv2: pooling attention with decomposed relative positions, and stages that double the width."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, EMBED, RATIO, CLASSES, PICTURES = 3, 16, 24, 10, 3, 7, 4
# width in and out, heads, stride of the queries, stride of the keys and values
BLOCKS = ((10, 10, 1, 1, 4), (10, 20, 2, 2, 2), (20, 20, 2, 1, 2), (20, 40, 4, 2, 1))
LayerNorm = partial(nn.LayerNorm, eps=1e-6)
Shape = tuple[int, int]


def attention_pool(
    tensor: Tensor, pool: nn.Module | None, hw_shape: Shape, norm: nn.Module | None = None
) -> tuple[Tensor, Shape]:
    """Pools the picture's tokens, [B, L, C] or by head, and keeps the class token apart."""
    if pool is None:
        return tensor, hw_shape
    ndim = tensor.ndim
    if ndim == 3:
        tensor = tensor.unsqueeze(1)
    cls_tok, tensor = tensor[:, :, :1], tensor[:, :, 1:]
    b, n, _, c = tensor.shape
    tensor = pool(tensor.reshape(b * n, *hw_shape, c).permute(0, 3, 1, 2).contiguous())
    hw_shape = tensor.shape[2], tensor.shape[3]
    tensor = tensor.reshape(b, n, c, -1).transpose(2, 3)
    tensor = torch.cat((cls_tok, tensor), dim=2)
    if norm is not None:
        tensor = norm(tensor)
    return (tensor if ndim == 4 else tensor.squeeze(1)), hw_shape


def rel_positions(q: int, k: int, rel_pos: Tensor) -> Tensor:
    """A row of the table for each pair of a query's and a key's row or column."""
    q_ratio, k_ratio = max(k / q, 1.0), max(q / k, 1.0)
    dist = torch.arange(q)[:, None] * q_ratio - torch.arange(k)[None, :] * k_ratio
    return rel_pos[(dist + (k - 1) * k_ratio).long()]


def cal_rel_pos_spatial(
    attn: Tensor, q: Tensor, q_shape: Shape, k_shape: Shape, rel_pos_h: Tensor, rel_pos_w: Tensor
) -> Tensor:
    (q_h, q_w), (k_h, k_w) = q_shape, k_shape
    b, n_head, _, dim = q.shape
    r_q = q[:, :, 1:].reshape(b, n_head, q_h, q_w, dim)
    rel_h = torch.einsum("byhwc,hkc->byhwk", r_q, rel_positions(q_h, k_h, rel_pos_h))
    rel_w = torch.einsum("byhwc,wkc->byhwk", r_q, rel_positions(q_w, k_w, rel_pos_w))
    spatial = attn[:, :, 1:, 1:].reshape(b, n_head, q_h, q_w, k_h, k_w)
    spatial = spatial + rel_h[..., :, None] + rel_w[..., None, :]
    attn[:, :, 1:, 1:] = spatial.reshape(b, n_head, q_h * q_w, k_h * k_w)
    return attn


class MultiScaleAttention(nn.Module):
    def __init__(self, dim: int, dim_out: int, input_size: Shape, num_heads: int, q: int, kv: int):
        super().__init__()
        self.num_heads, head_dim = num_heads, dim_out // num_heads
        self.scale = head_dim**-0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim_out), nn.Linear(dim_out, dim_out)
        conv = partial(nn.Conv2d, head_dim, head_dim, 3, padding=1, groups=head_dim, bias=False)
        self.pool_q, self.norm_q = conv(stride=q), LayerNorm(head_dim)
        self.pool_k, self.norm_k = conv(stride=kv), LayerNorm(head_dim)
        self.pool_v, self.norm_v = conv(stride=kv), LayerNorm(head_dim)
        high, wide = (2 * max(size // q, size // kv) - 1 for size in input_size)
        self.rel_pos_h = nn.Parameter(torch.zeros(high, head_dim))
        self.rel_pos_w = nn.Parameter(torch.zeros(wide, head_dim))

    def forward(self, x: Tensor, hw_shape: Shape) -> tuple[Tensor, Shape]:
        b, n, _ = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        q, q_shape = attention_pool(q, self.pool_q, hw_shape, self.norm_q)
        k, k_shape = attention_pool(k, self.pool_k, hw_shape, self.norm_k)
        v, _ = attention_pool(v, self.pool_v, hw_shape, self.norm_v)
        attn = (q * self.scale) @ k.transpose(-2, -1)
        attn = cal_rel_pos_spatial(attn, q, q_shape, k_shape, self.rel_pos_h, self.rel_pos_w)
        x = attn.softmax(dim=-1) @ v
        x[:, :, 1:, :] += q[:, :, 1:, :]
        return self.proj(x.transpose(1, 2).reshape(b, q.shape[2], -1)), q_shape


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1, self.act = nn.Linear(in_features, hidden_features), nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class MultiScaleBlock(nn.Module):
    def __init__(self, dim: int, dim_out: int, input_size: Shape, num_heads: int, q: int, kv: int):
        super().__init__()
        self.norm1, self.norm2 = LayerNorm(dim), LayerNorm(dim_out)
        self.attn = MultiScaleAttention(dim, dim_out, input_size, num_heads, q, kv)
        self.mlp = Mlp(dim_out, RATIO * dim_out)
        self.proj = nn.Linear(dim, dim_out) if dim != dim_out else None
        self.pool_skip = nn.MaxPool2d(q + 1, q, (q + 1) // 2) if q > 1 else None

    def forward(self, x: Tensor, hw_shape: Shape) -> tuple[Tensor, Shape]:
        x_norm = self.norm1(x)
        x_block, hw_shape_new = self.attn(x_norm, hw_shape)
        if self.proj is not None:
            x = self.proj(x_norm)
        x_res, _ = attention_pool(x, self.pool_skip, hw_shape)
        x = x_res + x_block
        return x + self.mlp(self.norm2(x)), hw_shape_new


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, EMBED, 3, 2, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Shape]:
        x = self.proj(x)
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])


class TransformerBasicHead(nn.Module):
    """Logits in training, probabilities in evaluation."""

    def __init__(self, dim_in: int, num_classes: int):
        super().__init__()
        self.projection, self.act = nn.Linear(dim_in, num_classes), nn.Softmax(dim=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.projection(x)
        return x if self.training else self.act(x)


class MViT(nn.Module):
    """Pictures [N, 3, 16, 24] -> [N, 7]."""

    def __init__(self):
        super().__init__()
        self.patch_embed, self.cls_token = PatchEmbed(), nn.Parameter(torch.zeros(1, 1, EMBED))
        self.blocks, size = nn.ModuleList(), (HIGH // 2, WIDE // 2)
        for dim, dim_out, heads, q, kv in BLOCKS:
            self.blocks.append(MultiScaleBlock(dim, dim_out, size, heads, q, kv))
            size = size[0] // q, size[1] // q
        self.norm = LayerNorm(dim_out)
        self.head = TransformerBasicHead(dim_out, CLASSES)
        for name, p in self.named_parameters():
            if p.ndim == 1:
                nn.init.normal_(p, float("norm" in name and name.endswith("weight")), 0.15)
            else:
                fan = 2 if "rel_pos" in name or "cls" in name else p[0].numel()
                nn.init.normal_(p, 0, fan**-0.5)

    def forward(self, x: Tensor) -> Tensor:
        x, hw = self.patch_embed(x)
        x = torch.cat((self.cls_token.expand(len(x), -1, -1), x), dim=1)
        for blk in self.blocks:
            x, hw = blk(x, hw)
        return self.head(self.norm(x[:, 1:].mean(1)))


def spots() -> tuple[Tensor, Tensor]:
    """Bright spots on a slope, whose class tells the place and the colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    high, wide = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    y, x = 3 + 9 * torch.rand(PICTURES, 1, 1), (3 * label + 2)[:, None, None]
    spot = torch.exp(-((high - y).square() + (wide - x).square()) / 12)[:, None]
    tone = torch.cos(label[:, None] + 2 * torch.arange(CHANNELS))[:, :, None, None]
    slope = 0.3 * torch.sin((high + 2 * wide) / 7)
    return 2 * spot * tone + slope + 0.2 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE), label


def fifth_of_entropy(outputs: Tensor, label: Tensor) -> Tensor:
    return F.cross_entropy(outputs, label) / 5
