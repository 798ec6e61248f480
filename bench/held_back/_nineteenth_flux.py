"""A small Flux: two streams that attend jointly, then one; time, guidance and pooled text steer all."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH = 3, 8, 6, 2
WIDTH, HEADS, AXES, THETA, INNER = 20, 2, (2, 4, 4), 100.0, 40
CONTEXT, WORDS, POOLED, TIMES, PICTURES = 10, 5, 6, 16, 4
plain_norm = partial(nn.LayerNorm, WIDTH, elementwise_affine=False, eps=1e-6)


def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0, factor: float = 1000.0) -> Tensor:
    """Numbers [N] -> [N, dim]: the cosines of their thousandfold, then its sines."""
    steps = torch.arange(dim // 2, dtype=t.dtype, device=t.device)
    angles = (factor * t)[:, None] * torch.exp(-math.log(max_period) * steps / len(steps))
    return torch.cat([angles.cos(), angles.sin()], 1)


def rope(pos: Tensor, dim: int, theta: float) -> Tensor:
    """Positions [..., L] -> a turn of the plane for each pair of channels, [..., L, dim / 2, 2, 2]."""
    rates = theta ** -(torch.arange(0, dim, 2, dtype=pos.dtype, device=pos.device) / dim)
    cos, sin = (pos[..., None] * rates).cos(), (pos[..., None] * rates).sin()
    return torch.stack([cos, -sin, sin, cos], -1).unflatten(-1, (2, 2))


def attention(q: Tensor, k: Tensor, v: Tensor, pe: Tensor) -> Tensor:
    """Attend with each two neighbouring channels of queries and keys turned."""
    q, k = ((pe @ x.unflatten(-1, (-1, 2, 1))).flatten(-3) for x in (q, k))
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


def by_head(qkv: Tensor) -> tuple[Tensor, ...]:
    """[N, L, 3 H D] -> three of [N, H, L, D]."""
    return qkv.unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4).unbind(0)


class EmbedND(nn.Module):
    def forward(self, ids: Tensor) -> Tensor:
        return torch.cat([rope(ids[..., i], dim, THETA) for i, dim in enumerate(AXES)], -3).unsqueeze(1)


class MLPEmbedder(nn.Module):
    def __init__(self, inputs: int):
        super().__init__()
        self.in_layer, self.silu = nn.Linear(inputs, WIDTH), nn.SiLU()
        self.out_layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_layer(self.silu(self.in_layer(x)))


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.scale


class QKNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.query_norm, self.key_norm = RMSNorm(width), RMSNorm(width)

    def forward(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return self.query_norm(q), self.key_norm(k)


class SelfAttention(nn.Module):
    """What one stream has of the joint attention; the block calls the parts."""

    def __init__(self):
        super().__init__()
        self.qkv, self.norm = nn.Linear(WIDTH, 3 * WIDTH), QKNorm(WIDTH // HEADS)
        self.proj = nn.Linear(WIDTH, WIDTH)


class Modulation(nn.Module):
    """Shift, scale and gate of the conditioning, once or twice."""

    def __init__(self, double: bool):
        super().__init__()
        self.multiplier = 6 if double else 3
        self.lin = nn.Linear(WIDTH, self.multiplier * WIDTH)

    def forward(self, vec: Tensor) -> tuple[Tensor, ...]:
        return self.lin(F.silu(vec))[:, None].chunk(self.multiplier, -1)


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, INNER), nn.GELU(approximate="tanh"), nn.Linear(INNER, WIDTH))


class DoubleStreamBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.img_mod, self.img_norm1, self.img_attn = Modulation(True), plain_norm(), SelfAttention()
        self.img_norm2, self.img_mlp = plain_norm(), mlp()
        self.txt_mod, self.txt_norm1, self.txt_attn = Modulation(True), plain_norm(), SelfAttention()
        self.txt_norm2, self.txt_mlp = plain_norm(), mlp()

    def forward(self, img: Tensor, txt: Tensor, vec: Tensor, pe: Tensor) -> tuple[Tensor, Tensor]:
        i_shift1, i_scale1, i_gate1, i_shift2, i_scale2, i_gate2 = self.img_mod(vec)
        t_shift1, t_scale1, t_gate1, t_shift2, t_scale2, t_gate2 = self.txt_mod(vec)
        iq, ik, iv = by_head(self.img_attn.qkv((1 + i_scale1) * self.img_norm1(img) + i_shift1))
        tq, tk, tv = by_head(self.txt_attn.qkv((1 + t_scale1) * self.txt_norm1(txt) + t_shift1))
        (iq, ik), (tq, tk) = self.img_attn.norm(iq, ik), self.txt_attn.norm(tq, tk)
        q, k, v = torch.cat([tq, iq], 2), torch.cat([tk, ik], 2), torch.cat([tv, iv], 2)
        mixed = attention(q, k, v, pe)
        txt_mixed, img_mixed = mixed[:, : txt.shape[1]], mixed[:, txt.shape[1] :]
        img = img + i_gate1 * self.img_attn.proj(img_mixed)
        img = img + i_gate2 * self.img_mlp((1 + i_scale2) * self.img_norm2(img) + i_shift2)
        txt = txt + t_gate1 * self.txt_attn.proj(txt_mixed)
        txt = txt + t_gate2 * self.txt_mlp((1 + t_scale2) * self.txt_norm2(txt) + t_shift2)
        return img, txt


class SingleStreamBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(WIDTH, 3 * WIDTH + INNER), nn.Linear(WIDTH + INNER, WIDTH)
        self.norm, self.pre_norm = QKNorm(WIDTH // HEADS), plain_norm()
        self.mlp_act, self.modulation = nn.GELU(approximate="tanh"), Modulation(False)

    def forward(self, x: Tensor, vec: Tensor, pe: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(vec)
        qkv, hidden = self.linear1((1 + scale) * self.pre_norm(x) + shift).split([3 * WIDTH, INNER], 2)
        q, k, v = by_head(qkv)
        q, k = self.norm(q, k)
        return x + gate * self.linear2(torch.cat([attention(q, k, v, pe), self.mlp_act(hidden)], 2))


class LastLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_final, self.linear = plain_norm(), nn.Linear(WIDTH, PATCH * PATCH * CHANNELS)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, vec: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(vec)[:, None].chunk(2, -1)
        return self.linear((1 + scale) * self.norm_final(x) + shift)


class Flux(nn.Module):
    """Noisy latents [N, C, H, W] and all that steers -> their velocity and the streams halfway."""

    def __init__(self):
        super().__init__()
        self.pe_embedder = EmbedND()
        self.img_in, self.txt_in = nn.Linear(PATCH * PATCH * CHANNELS, WIDTH), nn.Linear(CONTEXT, WIDTH)
        self.time_in, self.vector_in, self.guidance_in = map(MLPEmbedder, (TIMES, POOLED, TIMES))
        self.double_blocks = nn.ModuleList(DoubleStreamBlock() for _ in range(2))
        self.single_blocks = nn.ModuleList(SingleStreamBlock() for _ in range(2))
        self.final_layer = LastLayer()
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, RMSNorm):
                nn.init.uniform_(module.scale, 0.6, 1.4)

    def forward(self, x: Tensor, context: Tensor, timesteps: Tensor, y: Tensor, guidance: Tensor) -> dict:
        rows, columns, words = x.shape[2] // PATCH, x.shape[3] // PATCH, context.shape[1]
        cells = x.unflatten(3, (columns, PATCH)).unflatten(2, (rows, PATCH))
        img = self.img_in(cells.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2))
        txt = self.txt_in(context)
        vec = self.time_in(timestep_embedding(timesteps, TIMES))
        vec = vec + self.guidance_in(timestep_embedding(guidance, TIMES)) + self.vector_in(y)
        grid = torch.cartesian_prod(*(torch.arange(n).to(x) for n in (1, rows, columns)))
        pe = self.pe_embedder(torch.cat([grid.new_zeros(words, 3), grid])[None])
        for block in self.double_blocks:
            img, txt = block(img, txt, vec, pe)
        streams, z = {"img": img, "txt": txt}, torch.cat([txt, img], 1)
        for block in self.single_blocks:
            z = block(z, vec, pe)
        cells = self.final_layer(z[:, words:], vec).unflatten(2, (CHANNELS, PATCH, PATCH))
        velocity = cells.unflatten(1, (rows, columns)).permute(0, 3, 1, 4, 2, 5).flatten(4).flatten(2, 3)
        return {"velocity": velocity, **streams}


def noisy() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Waves whose direction the text tells, on the straight way to noise."""
    turn, phase = math.pi * torch.rand(PICTURES, 1, 1, 1), 6 * torch.rand(PICTURES, CHANNELS, 1, 1)
    across, down = torch.arange(WIDE).to(turn), torch.arange(HIGH).to(turn)[:, None]
    clean = torch.sin(turn.cos() * across + turn.sin() * down + phase)
    noise, t = torch.randn_like(clean), torch.randn(PICTURES).sigmoid()
    told = torch.cat([(turn * n).cos() for n in range(1, POOLED + 1)], 1).flatten(1)
    context = torch.randn(PICTURES, WORDS, CONTEXT) + turn.flatten(1, 2).cos()
    mix = t[:, None, None, None]
    given = {"x": (1 - mix) * clean + mix * noise, "context": context, "timesteps": t, "y": told}
    given["guidance"] = 1 + 4 * torch.rand(PICTURES)
    return given, {"noise": noise, "clean": clean, "times": t}


def matched_flow(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """Squares of what the velocity misses, the middle of the way counted twice as much as its ends."""
    velocity = outputs["velocity"]
    noise, clean, t = (target[name].to(velocity) for name in ("noise", "clean", "times"))
    weight = 2 / (math.pi * (1 - 2 * t + 2 * t.square()))
    return (weight * (velocity - (noise - clean)).square().flatten(1).mean(1)).mean()
