"""A small band-split RoFormer: spectrograms in unequal bands, axial attention, and masks for two stems."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BANDS, FRAMES, MIXES, STEMS = (2, 3, 5, 4, 7), 11, 3, 2
DIM, HEADS, DIM_HEAD, INNER, HIDDEN, DEPTH = 20, 3, 8, 28, 26, 2
WINDOWS = (1, 2, 4)


def linear(dim_in: int, dim_out: int, bias: bool = True, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(dim_in, dim_out, bias)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(dim_in))
    if bias:
        nn.init.normal_(layer.bias, std=0.2)
    return layer


class RMSNorm(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.scale = dim**0.5
        self.gamma = nn.Parameter(1 + 0.2 * torch.randn(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * self.gamma


class RotaryEmbedding(nn.Module):
    """Turns the pairs of neighbours on the last axis by angles that grow along the last axis but one."""

    def __init__(self, dim: int, theta: float = 10000.0):
        super().__init__()
        self.dim, self.theta = dim, theta

    def forward(self, t: Tensor) -> Tensor:
        freqs = 1.0 / self.theta ** (torch.arange(0, self.dim, 2, device=t.device).to(t) / self.dim)
        angles = torch.arange(t.shape[-2], device=t.device).to(t)[:, None] * freqs
        angles = angles.repeat_interleave(2, -1)
        x1, x2 = t.unflatten(-1, (-1, 2)).unbind(-1)
        return t * angles.cos() + torch.stack((-x2, x1), -1).flatten(-2) * angles.sin()


class GEGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x, gate = x.chunk(2, dim=-1)
        return x * F.gelu(gate)


class FeedForward(nn.Module):
    def __init__(self, dim: int, inner: int):
        super().__init__()
        ends = linear(dim, 2 * inner), linear(inner, dim, gain=0.7)
        self.net = nn.Sequential(RMSNorm(dim), ends[0], GEGLU(), ends[1])

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int, dim_head: int, rotary_embed: nn.Module | None):
        super().__init__()
        self.heads, self.scale, self.rotary_embed = heads, dim_head**-0.5, rotary_embed
        self.norm = RMSNorm(dim)
        self.to_qkv = linear(dim, 3 * heads * dim_head, bias=False)
        self.to_gates = linear(dim, heads)
        self.to_out = nn.Sequential(linear(heads * dim_head, dim, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = self.to_qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.rotary_embed is not None:
            q, k = self.rotary_embed(q), self.rotary_embed(k)
        attn = (q @ k.transpose(-1, -2) * self.scale).softmax(dim=-1)
        out = attn @ v
        out = out * self.to_gates(x).transpose(1, 2)[..., None].sigmoid()
        return self.to_out(out.transpose(1, 2).flatten(2))


class Transformer(nn.Module):
    def __init__(self, dim: int, rotary_embed: nn.Module | None = None, depth: int = 1):
        super().__init__()
        self.layers = nn.ModuleList()
        for _ in range(depth):
            attn = Attention(dim, HEADS, DIM_HEAD, rotary_embed)
            self.layers.append(nn.ModuleList([attn, FeedForward(dim, INNER)]))

    def forward(self, x: Tensor) -> Tensor:
        for attn, ff in self.layers:
            x = attn(x) + x
            x = ff(x) + x
        return x


class BandSplit(nn.Module):
    def __init__(self, dim: int, dim_inputs: tuple[int, ...]):
        super().__init__()
        self.dim_inputs = dim_inputs
        self.to_features = nn.ModuleList(nn.Sequential(RMSNorm(n), linear(n, dim)) for n in dim_inputs)

    def forward(self, x: Tensor) -> Tensor:
        pieces = x.split(self.dim_inputs, dim=-1)
        return torch.stack([f(piece) for piece, f in zip(pieces, self.to_features, strict=True)], dim=-2)


class MaskEstimator(nn.Module):
    def __init__(self, dim: int, dim_inputs: tuple[int, ...], hidden: int):
        super().__init__()
        self.to_freqs = nn.ModuleList()
        for n in dim_inputs:
            mlp = nn.Sequential(linear(dim, hidden), nn.Tanh(), linear(hidden, 2 * n))
            self.to_freqs.append(nn.Sequential(mlp, nn.GLU(dim=-1)))

    def forward(self, x: Tensor) -> Tensor:
        bands = x.unbind(dim=-2)
        return torch.cat([mlp(band) for band, mlp in zip(bands, self.to_freqs, strict=True)], dim=-1)


class BSRoformer(nn.Module):
    """Mixtures [N, 2, F, T], real and imaginary -> stems [N, S, 2, F, T]."""

    def __init__(self):
        super().__init__()
        dim_inputs = tuple(2 * width for width in BANDS)
        self.layers = nn.ModuleList()
        for _ in range(DEPTH):
            time_transformer = Transformer(DIM, RotaryEmbedding(DIM_HEAD))
            self.layers.append(nn.ModuleList([time_transformer, Transformer(DIM)]))
        self.final_norm = RMSNorm(DIM)
        self.band_split = BandSplit(DIM, dim_inputs)
        self.mask_estimators = nn.ModuleList(MaskEstimator(DIM, dim_inputs, HIDDEN) for _ in range(STEMS))

    def forward(self, stft_repr: Tensor) -> Tensor:
        x = self.band_split(stft_repr.permute(0, 3, 2, 1).flatten(2))
        batch, frames, bands, _ = x.shape
        for time_transformer, freq_transformer in self.layers:
            x = time_transformer(x.transpose(1, 2).flatten(0, 1))
            x = x.unflatten(0, (batch, bands)).transpose(1, 2)
            x = freq_transformer(x.flatten(0, 1)).unflatten(0, (batch, frames))
        x = self.final_norm(x)
        mask = torch.stack([fn(x) for fn in self.mask_estimators], dim=1)
        mask_real, mask_imag = mask.unflatten(-1, (-1, 2)).transpose(2, 3).unbind(-1)
        real, imag = stft_repr[:, None].unbind(2)
        return torch.stack((real * mask_real - imag * mask_imag, real * mask_imag + imag * mask_real), dim=2)


def stems() -> tuple[Tensor, Tensor]:
    """A gliding tone with its overtone and a click over all bins, each turning its phase, and their sum."""
    bins, time = torch.arange(sum(BANDS))[:, None] * 1.0, torch.arange(FRAMES) * 1.0
    start, glide, click = (torch.rand(3, MIXES, 1, 1) * 2 - 1).unbind(0)
    line = 6 + 3 * start + 0.3 * glide * time
    tone = torch.exp(-((bins - line) ** 2) / 3) + 0.6 * torch.exp(-((bins - 2 * line) ** 2) / 4)
    burst = torch.exp(-((time - 5 - 4 * click) ** 2) / 2) * torch.exp(-bins / 30)
    phases = 0.9 * line * time + 3 * start, bins * (5 + 4 * click) / 4 + glide
    parts = [torch.stack((a * p.cos(), a * p.sin()), 1) for a, p in zip((tone, burst), phases, strict=True)]
    target = 2 * torch.stack(parts, 1)
    return target.sum(1) + 0.1 * torch.randn(MIXES, 2, sum(BANDS), FRAMES), target


def spectral(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean distance of the parts, and that of the magnitudes pooled over several windows."""
    loss = F.l1_loss(outputs, target)
    ours, theirs = (x.square().sum(2).add(1e-4).sqrt().flatten(0, 1) for x in (outputs, target))
    for window in WINDOWS:
        loss = loss + F.l1_loss(F.avg_pool2d(ours, window), F.avg_pool2d(theirs, window)) / len(WINDOWS)
    return loss / 2
