"""A small SAM 2 on videos: memory attention with rotary positions, a mask decoder, a memory encoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, MEMORY, HEADS, HIGH, WIDE, FRAMES, VIDEOS = 32, 8, 2, 5, 6, 3, 2


def compute_axial_cis(dim: int, end_x: int, end_y: int, theta: float = 100.0) -> Tensor:
    t = torch.arange(end_x * end_y, dtype=torch.float64)
    freqs = 1.0 / theta ** (torch.arange(0, dim, 4)[: dim // 4].double() / dim)
    angles = torch.cat([torch.outer(t % end_x, freqs), torch.outer(t.div(end_x).floor(), freqs)], -1)
    return torch.polar(torch.ones_like(angles), angles)


def apply_rotary(x: Tensor, freqs_cis: Tensor) -> Tensor:
    x_ = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
    return torch.view_as_real(x_ * freqs_cis.to(x_)).flatten(3)


class PositionEmbeddingSine(nn.Module):
    def __init__(self, num_pos_feats: int):
        super().__init__()
        self.num_pos_feats, self.scale, self.temperature = num_pos_feats // 2, 2 * math.pi, 10000.0

    def forward(self, x: Tensor) -> Tensor:
        ones = torch.ones_like(x[:, 0])
        y, x_ = ones.cumsum(1), ones.cumsum(2)
        pos = (y / (HIGH + 1e-6) * self.scale, x_ / (WIDE + 1e-6) * self.scale)
        dim_t = torch.arange(0, self.num_pos_feats, 2).to(x) / self.num_pos_feats
        pos = [p[..., None] / self.temperature**dim_t for p in pos]
        pos = [torch.stack((p.sin(), p.cos()), 4).flatten(3) for p in pos]
        return torch.cat(pos, 3).permute(0, 3, 1, 2)


class LayerNorm2d(nn.Module):
    def __init__(self, num_channels: int):
        super().__init__()
        self.weight, self.bias = (nn.Parameter(torch.empty(num_channels)) for _ in range(2))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        return self.weight[:, None, None] * ((x - u) / torch.sqrt(s + self.eps)) + self.bias[:, None, None]


class RoPEAttention(nn.Module):
    def __init__(self, embedding_dim: int, kv_in_dim: int):
        super().__init__()
        self.freqs_cis = compute_axial_cis(embedding_dim // HEADS, WIDE, HIGH)
        self.q_proj = nn.Linear(embedding_dim, embedding_dim)
        self.k_proj = nn.Linear(kv_in_dim, embedding_dim)
        self.v_proj = nn.Linear(kv_in_dim, embedding_dim)
        self.out_proj = nn.Linear(embedding_dim, embedding_dim)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, num_k_exclude_rope: int = 0) -> Tensor:
        q, k, v = self.q_proj(q), self.k_proj(k), self.v_proj(v)
        q, k, v = (x.unflatten(2, (HEADS, -1)).transpose(1, 2) for x in (q, k, v))
        q, n = apply_rotary(q, self.freqs_cis), k.shape[2] - num_k_exclude_rope
        turned = apply_rotary(k[:, :, :n], self.freqs_cis.repeat(n // len(self.freqs_cis), 1))
        k = torch.cat([turned, k[:, :, n:]], 2)
        return self.out_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class MemoryAttentionLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attn, self.cross_attn_image = RoPEAttention(WIDTH, WIDTH), RoPEAttention(WIDTH, MEMORY)
        self.linear1, self.linear2 = nn.Linear(WIDTH, 44), nn.Linear(44, WIDTH)
        self.norm1, self.norm2, self.norm3 = (nn.LayerNorm(WIDTH) for _ in range(3))

    def forward(self, tgt: Tensor, memory: Tensor, pos: Tensor, num_k_exclude_rope: int) -> Tensor:
        tgt2 = self.norm1(tgt)
        tgt = tgt + self.self_attn(tgt2, tgt2, tgt2)
        tgt = tgt + self.cross_attn_image(self.norm2(tgt), memory + pos, memory, num_k_exclude_rope)
        return tgt + self.linear2(F.relu(self.linear1(self.norm3(tgt))))


class MemoryAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(MemoryAttentionLayer() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, curr: Tensor, curr_pos: Tensor, memory: Tensor, pos: Tensor, num_ptrs: int) -> Tensor:
        output = curr + 0.1 * curr_pos
        for layer in self.layers:
            output = layer(output, memory, pos, num_ptrs)
        return self.norm(output)


class CXBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.dwconv, self.norm = nn.Conv2d(dim, dim, 7, padding=3, groups=dim), LayerNorm2d(dim)
        self.pwconv1, self.act, self.pwconv2 = nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)
        self.gamma = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        y = self.pwconv1(self.norm(self.dwconv(x)).permute(0, 2, 3, 1))
        y = self.gamma * self.pwconv2(self.act(y))
        return x + y.permute(0, 3, 1, 2)


class MemoryEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        down = [nn.Conv2d(1, 4, 3, 2, 1), LayerNorm2d(4), nn.GELU()]
        down += [nn.Conv2d(4, 16, 3, 2, 1), LayerNorm2d(16), nn.GELU()]
        self.mask_downsampler = nn.Sequential(*down, nn.Conv2d(16, WIDTH, 1))
        self.fuser = nn.Sequential(CXBlock(WIDTH), CXBlock(WIDTH))
        self.position_encoding = PositionEmbeddingSine(MEMORY)
        self.pix_feat_proj, self.out_proj = nn.Conv2d(WIDTH, WIDTH, 1), nn.Conv2d(WIDTH, MEMORY, 1)

    def forward(self, pix_feat: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
        x = self.pix_feat_proj(pix_feat) + self.mask_downsampler(masks)
        x = self.out_proj(self.fuser(x))
        return x, self.position_encoding(x)


class MaskDecoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask_tokens, self.norm = nn.Embedding(1, WIDTH), nn.LayerNorm(WIDTH)
        self.output_upscaling = nn.Sequential(nn.ConvTranspose2d(WIDTH, 7, 4, stride=4), nn.GELU())
        self.output_hypernetwork = nn.Linear(WIDTH, 7)

    def forward(self, src: Tensor) -> tuple[Tensor, Tensor]:
        hs = self.norm(self.mask_tokens.weight + src.mean((2, 3)))
        return torch.einsum("nc,nchw->nhw", self.output_hypernetwork(hs), self.output_upscaling(src)), hs


class SAM2(nn.Module):
    """Features [N, T, C, H, W] -> logits [N, T, 4 H, 4 W]."""

    def __init__(self):
        super().__init__()
        self.position, self.memory_attention = PositionEmbeddingSine(WIDTH), MemoryAttention()
        self.memory_encoder, self.sam_mask_decoder = MemoryEncoder(), MaskDecoder()
        self.obj_ptr_proj = nn.Linear(WIDTH, WIDTH)
        self.maskmem_tpos_enc = nn.Parameter(torch.empty(FRAMES - 1, 1, MEMORY))
        self.no_mem_embed = nn.Parameter(torch.empty(1, 1, WIDTH))
        for name, p in self.named_parameters():
            mean = 1.0 if p.ndim == 1 and name.endswith("weight") else 0.4 * name.endswith("gamma")
            nn.init.normal_(p, mean, 0.1 if p.ndim == 1 else 0.3 if p.ndim == 3 else p[0].numel() ** -0.5)

    def remember(self, memories: list, pointers: list) -> tuple[Tensor, Tensor]:
        """The first frame, the last if another, then all pointers, in four tokens each without a place."""
        near = [(memories[0], FRAMES - 2)] + [(memories[-1], 0)] * (len(memories) > 1)
        tokens = [m.flatten(2).transpose(1, 2) for (m, _), _ in near]
        places = [p.flatten(2).transpose(1, 2) + self.maskmem_tpos_enc[i] for (_, p), i in near]
        ptrs = torch.stack(pointers, 1).unflatten(2, (4, MEMORY)).flatten(1, 2)
        return torch.cat([*tokens, ptrs], 1), torch.cat([*places, torch.zeros_like(ptrs)], 1)

    def forward(self, features: Tensor) -> Tensor:
        memories, pointers, logits, pos = [], [], [], self.position(features[:, 0])
        for feat in features.unbind(1):
            x, p = (y.flatten(2).transpose(1, 2) for y in (feat, pos))
            if memories:
                args = self.remember(memories, pointers)
                x = self.memory_attention(x, p, *args, 4 * len(pointers))
            else:
                x = x + self.no_mem_embed
            masks, token = self.sam_mask_decoder(x.transpose(1, 2).unflatten(2, (HIGH, WIDE)))
            logits.append(masks)
            pointers.append(self.obj_ptr_proj(token))
            memories.append(self.memory_encoder(feat, masks.sigmoid()[:, None] * 20 - 10))
        return torch.stack(logits, 1)


def moving_discs() -> tuple[Tensor, Tensor]:
    """Features of a disc that moves over a still scene, and its masks."""
    start, speed = 0.3 + 0.4 * torch.rand(VIDEOS, 1, 2), 0.2 * torch.rand(VIDEOS, 1, 2) - 0.1
    at = start + speed * torch.arange(FRAMES)[:, None]
    y, x = torch.arange(4 * HIGH)[:, None] / (4 * HIGH), torch.arange(4 * WIDE) / (4 * WIDE)
    masks = ((x - at[..., :1, None]) ** 2 + (y - at[..., 1:, None]) ** 2 < 0.06).float()
    color, scene = torch.randn(VIDEOS, 1, WIDTH, 1, 1), torch.randn(VIDEOS, 1, WIDTH, HIGH, WIDE)
    small = F.avg_pool2d(masks, 4)[:, :, None]
    return 0.5 * scene + color * small + 0.1 * torch.randn(small.shape), masks


def mask_loss(logits: Tensor, masks: Tensor) -> Tensor:
    p = logits.sigmoid()
    dice = 1 - (2 * (p * masks).sum((2, 3)) + 1) / (p.sum((2, 3)) + masks.sum((2, 3)) + 1)
    return (F.binary_cross_entropy_with_logits(logits, masks) + dice.mean()) / 4
