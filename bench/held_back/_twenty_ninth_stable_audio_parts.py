"""The diffusion transformer of a small Stable Audio, over the latents of its autoencoder."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LATENT, TOKEN, GLOBAL = 5, 11, 7
WIDTH, HEAD, CONTEXT, INNER, DEPTH, FOURIER = 48, 12, 24, 40, 2, 16


class FourierFeatures(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(out_features // 2, in_features))

    def forward(self, x: Tensor) -> Tensor:
        f = 2 * math.pi * x @ self.weight.T
        return torch.cat([f.cos(), f.sin()], dim=-1)


class RotaryEmbedding(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / (10000 ** (torch.arange(0, dim, 2).float() / dim)))

    def forward(self, length: int) -> Tensor:
        freqs = torch.arange(length).to(self.inv_freq)[:, None] * self.inv_freq
        return torch.cat((freqs, freqs), dim=-1)


def apply_rotary_pos_emb(t: Tensor, freqs: Tensor) -> Tensor:
    """The first numbers of each head are turned, the others left."""
    t, rest = t[..., : freqs.shape[-1]], t[..., freqs.shape[-1] :]
    t1, t2 = t.chunk(2, -1)
    return torch.cat((t * freqs.cos() + torch.cat((-t2, t1), dim=-1) * freqs.sin(), rest), dim=-1)


class LayerNorm(nn.Module):
    """Its offset is kept, but not learnt."""

    def __init__(self, dim: int):
        super().__init__()
        self.gamma = nn.Parameter(1 + 0.2 * torch.randn(dim))
        self.register_buffer("beta", 0.1 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], weight=self.gamma, bias=self.beta)


class Attention(nn.Module):
    """Of the tokens among themselves, or to a context of fewer heads, each of which serves several."""

    def __init__(self, dim: int, dim_context: int | None = None):
        super().__init__()
        self.num_heads, self.kv_heads = dim // HEAD, (dim_context or dim) // HEAD
        if dim_context:
            self.to_q = nn.Linear(dim, dim, bias=False)
            self.to_kv = nn.Linear(dim_context, 2 * dim_context, bias=False)
        else:
            self.to_qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.to_out = nn.Linear(dim, dim, bias=False)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD, eps=1e-6), nn.LayerNorm(HEAD, eps=1e-6)

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        mask: Tensor | None = None,
        freqs: Tensor | None = None,
    ) -> Tensor:
        if context is None:
            q, k, v = self.to_qkv(x).chunk(3, dim=-1)
        else:
            q, (k, v) = self.to_q(x), self.to_kv(context).chunk(2, dim=-1)
        q, k, v = (t.unflatten(2, (-1, HEAD)).transpose(1, 2) for t in (q, k, v))
        q, k = self.q_norm(q), self.k_norm(k)
        if freqs is not None:
            q, k = apply_rotary_pos_emb(q, freqs), apply_rotary_pos_emb(k, freqs)
        if self.kv_heads != self.num_heads:
            k, v = (t.repeat_interleave(self.num_heads // self.kv_heads, dim=1) for t in (k, v))
        dots = q @ k.transpose(2, 3) * HEAD**-0.5
        if mask is not None:
            dots = dots.masked_fill(~mask[:, None, None], -torch.finfo(dots.dtype).max)
        return self.to_out((dots.softmax(dim=-1) @ v).transpose(1, 2).flatten(2))


class GLU(nn.Module):
    def __init__(self, dim_in: int, dim_out: int):
        super().__init__()
        self.act, self.proj = nn.SiLU(), nn.Linear(dim_in, 2 * dim_out)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.proj(x).chunk(2, dim=-1)
        return x * self.act(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        self.ff = nn.Sequential(GLU(dim, inner), nn.Linear(inner, dim))

    def forward(self, x: Tensor) -> Tensor:
        return self.ff(x)


class TransformerBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.pre_norm, self.self_attn = LayerNorm(dim), Attention(dim)
        self.cross_attend_norm, self.cross_attn = LayerNorm(dim), Attention(dim, CONTEXT)
        self.ff_norm, self.ff = LayerNorm(dim), FeedForward(dim, INNER)

    def forward(self, x: Tensor, context: Tensor, mask: Tensor, freqs: Tensor) -> Tensor:
        x = x + self.self_attn(self.pre_norm(x), freqs=freqs)
        x = x + self.cross_attn(self.cross_attend_norm(x), context, mask)
        return x + self.ff(self.ff_norm(x))


class ContinuousTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.project_in = nn.Linear(LATENT, WIDTH, bias=False)
        self.project_out = nn.Linear(WIDTH, LATENT, bias=False)
        self.rotary_pos_emb = RotaryEmbedding(HEAD // 2)
        self.layers = nn.ModuleList(TransformerBlock(WIDTH) for _ in range(DEPTH))

    def forward(self, x: Tensor, prepend: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        x = torch.cat((prepend, self.project_in(x)), dim=1)
        freqs = self.rotary_pos_emb(x.shape[1])
        for layer in self.layers:
            x = layer(x, context, mask, freqs)
        return self.project_out(x)


def embed(ins: int, outs: int, bias: bool = False) -> nn.Sequential:
    return nn.Sequential(nn.Linear(ins, outs, bias=bias), nn.SiLU(), nn.Linear(outs, outs, bias=bias))


class DiffusionTransformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.timestep_features = FourierFeatures(1, FOURIER)
        self.to_timestep_embed = embed(FOURIER, WIDTH, bias=True)
        self.to_cond_embed, self.to_global_embed = embed(TOKEN, CONTEXT), embed(GLOBAL, WIDTH)
        self.transformer = ContinuousTransformer()
        self.preprocess_conv, self.postprocess_conv = (nn.Conv1d(LATENT, LATENT, 1, bias=False) for _ in "io")

    def forward(self, x: Tensor, t: Tensor, prompt: Tensor, mask: Tensor, overall: Tensor) -> Tensor:
        timestep = self.to_timestep_embed(self.timestep_features(t[:, None]))
        prepend = (self.to_global_embed(overall) + timestep).unsqueeze(1)
        x = (self.preprocess_conv(x) + x).transpose(1, 2)
        y = self.transformer(x, prepend, self.to_cond_embed(prompt), mask).transpose(1, 2)[:, :, 1:]
        return self.postprocess_conv(y) + y
