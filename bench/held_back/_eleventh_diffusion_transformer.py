"""A diffusion transformer: patches, adaptive layer norms that time and label steer, learned variances."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, SIZE, PATCH = 2, 8, 2
WIDTH, HEADS, DEPTH, TIMES, LABELS, STEPS, PICTURES = 16, 4, 3, 12, 4, 100, 8


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, WIDTH, PATCH, stride=PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class PosEmbed(nn.Module):
    """Fixed sines and cosines: one half of the channels for the column, the other for the row."""

    def forward(self, x: Tensor) -> Tensor:
        side, count = math.isqrt(x.shape[1]), x.shape[2] // 4
        omega = 1 / 10000 ** (torch.arange(count, dtype=x.dtype, device=x.device) / count)
        angles = torch.arange(side, dtype=x.dtype, device=x.device)[:, None] * omega
        axis = torch.cat([angles.sin(), angles.cos()], 1)
        return x + torch.cat([axis.repeat(side, 1), axis.repeat_interleave(side, 0)], 1)


class TimestepEmbedder(nn.Module):
    def __init__(self):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(TIMES, WIDTH), nn.SiLU(), nn.Linear(WIDTH, WIDTH))

    @staticmethod
    def timestep_embedding(t: Tensor, dim: int, max_period: float = 10000.0) -> Tensor:
        half = dim // 2
        freqs = torch.exp(-math.log(max_period) * torch.arange(half).to(t) / half)
        args = t[:, None] * freqs
        return torch.cat([args.cos(), args.sin()], -1)

    def forward(self, t: Tensor) -> Tensor:
        return self.mlp(self.timestep_embedding(t.to(self.mlp[0].weight), TIMES))


class LabelEmbedder(nn.Module):
    """One row for each label, and a last one for none."""

    def __init__(self):
        super().__init__()
        self.embedding_table = nn.Embedding(LABELS + 1, WIDTH)

    def forward(self, y: Tensor) -> Tensor:
        return self.embedding_table(y)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n, count, width = x.shape
        q, k, v = self.qkv(x).reshape(n, count, 3, HEADS, width // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        x = F.scaled_dot_product_attention(q, k, v)
        return self.proj(x.transpose(1, 2).reshape(n, count, width))


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1, self.act = nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(approximate="tanh")
        self.fc2 = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class DiTBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.attn = Attention()
        self.norm2 = nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.mlp = Mlp()
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = self.adaLN_modulation(c).chunk(6, 1)
        x = x + gate_msa.unsqueeze(1) * self.attn(modulate(self.norm1(x), shift_msa, scale_msa))
        return x + gate_mlp.unsqueeze(1) * self.mlp(modulate(self.norm2(x), shift_mlp, scale_mlp))


class FinalLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_final = nn.LayerNorm(WIDTH, eps=1e-6, elementwise_affine=False)
        self.linear = nn.Linear(WIDTH, PATCH * PATCH * 2 * CHANNELS)
        self.adaLN_modulation = nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.adaLN_modulation(c).chunk(2, 1)
        return self.linear(modulate(self.norm_final(x), shift, scale))


class DiT(nn.Module):
    """Pictures [N, C, S, S], steps [N] and labels [N] -> noise and variance channels [N, 2C, S, S]."""

    def __init__(self):
        super().__init__()
        self.x_embedder, self.pos_embed = PatchEmbed(), PosEmbed()
        self.t_embedder, self.y_embedder = TimestepEmbedder(), LabelEmbedder()
        self.blocks = nn.ModuleList(DiTBlock() for _ in range(DEPTH))
        self.final_layer = FinalLayer()
        self.initialize_weights()

    def initialize_weights(self) -> None:
        """Start with modulations and attention that differ from picture to picture."""
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                gain = 2.0 if name.endswith(("qkv", "adaLN_modulation.1")) else 1.0
                nn.init.xavier_uniform_(module.weight.data.flatten(1), gain=gain)
                nn.init.normal_(module.bias, std=0.2)
        nn.init.normal_(self.y_embedder.embedding_table.weight, std=0.6)

    def unpatchify(self, x: Tensor) -> Tensor:
        side = math.isqrt(x.shape[1])
        x = x.reshape(len(x), side, side, PATCH, PATCH, 2 * CHANNELS)
        x = torch.einsum("nhwpqc->nchpwq", x)
        return x.reshape(len(x), 2 * CHANNELS, side * PATCH, side * PATCH)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        x = self.pos_embed(self.x_embedder(x))
        c = self.t_embedder(t) + self.y_embedder(y)
        for block in self.blocks:
            x = block(x, c)
        return self.unpatchify(self.final_layer(x, c))


def noised() -> tuple[dict[str, Tensor], Tensor]:
    """Waves, whose direction is the label, under noise of random steps; the first two labels say none."""
    kinds, t = torch.randint(LABELS, (PICTURES,)), torch.randint(STEPS, (PICTURES,))
    turn = kinds[:, None, None, None] * math.pi / LABELS
    spots = torch.arange(SIZE, dtype=turn.dtype)
    phase = 2 * math.pi * torch.rand(PICTURES, CHANNELS, 1, 1)
    clean = torch.sin(turn.cos() * spots + turn.sin() * spots[:, None] + phase)
    keep = torch.cos((t + 0.5) / STEPS * math.pi / 2)[:, None, None, None]
    noise = torch.randn_like(clean)
    y = kinds.clone()
    y[:2] = LABELS
    return {"x": keep * clean + (1 - keep**2).sqrt() * noise, "t": t, "y": y}, noise


def noise_and_spread(output: Tensor, target: Tensor) -> Tensor:
    """The noise by squares; the other channels are its error's log variance, with a small part."""
    noise, spread = output.chunk(2, 1)
    error = (noise - target.to(noise)).square()
    return error.mean() + 0.05 * (spread + error.detach() * torch.exp(-spread)).mean()
