"""A small U-ViT: a transformer of patches with long skips, which predicts the noise of noisy pictures."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH, CLASSES, PICTURES = 3, 8, 10, 2, 7, 4
DIM, HEADS, HIDDEN, DEPTH, TIMES, EXTRAS = 24, 3, 40, 5, 50, 2


def timestep_embedding(timesteps: Tensor, dim: int, max_period: int = 10000) -> Tensor:
    """[N] -> [N, dim]: cosines, then sines, of falling frequencies."""
    half = dim // 2
    freqs = torch.exp(-math.log(max_period) * torch.arange(half).to(timesteps) / half)
    args = timesteps[:, None] * freqs
    return torch.cat([torch.cos(args), torch.sin(args)], dim=-1)


def unpatchify(x: Tensor) -> Tensor:
    """B (h w) (p1 p2 C) -> B C (h p1) (w p2)."""
    x = x.view(len(x), HIGH // PATCH, WIDE // PATCH, PATCH, PATCH, CHANNELS)
    return x.permute(0, 5, 1, 3, 2, 4).reshape(len(x), CHANNELS, HIGH, WIDE)


class PatchEmbed(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Conv2d(CHANNELS, DIM, PATCH, stride=PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, dim: int, num_heads: int):
        super().__init__()
        self.num_heads, self.scale = num_heads, (dim // num_heads) ** -0.5
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        n, length, dim = x.shape
        qkv = self.qkv(x).view(n, length, 3, self.num_heads, -1)  # B L (K H D)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attn = ((q @ k.transpose(-2, -1)) * self.scale).softmax(dim=-1)
        return self.proj((attn @ v).transpose(1, 2).reshape(n, length, dim))


class Mlp(nn.Module):
    def __init__(self, dim: int, hidden: int):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(dim, hidden), nn.GELU(), nn.Linear(hidden, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    def __init__(self, skip: bool = False):
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(DIM), Attention(DIM, HEADS)
        self.norm2, self.mlp = nn.LayerNorm(DIM), Mlp(DIM, HIDDEN)
        self.skip_linear = nn.Linear(2 * DIM, DIM) if skip else None

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        if self.skip_linear is not None:
            x = self.skip_linear(torch.cat([x, skip], dim=-1))
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class UViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = PatchEmbed()
        self.time_embed = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.SiLU(), nn.Linear(4 * DIM, DIM))
        self.label_emb = nn.Embedding(CLASSES + 1, DIM)
        tokens = EXTRAS + HIGH * WIDE // PATCH**2
        self.pos_embed = nn.Parameter(0.4 * torch.randn(1, tokens, DIM))
        self.in_blocks = nn.ModuleList(Block() for _ in range(DEPTH // 2))
        self.mid_block = Block()
        self.out_blocks = nn.ModuleList(Block(skip=True) for _ in range(DEPTH // 2))
        self.norm = nn.LayerNorm(DIM)
        self.decoder_pred = nn.Linear(DIM, PATCH**2 * CHANNELS)
        self.final_layer = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1)

    def forward(self, x: Tensor, timesteps: Tensor, y: Tensor) -> Tensor:
        x = self.patch_embed(x)
        time_token = self.time_embed(timestep_embedding(timesteps, DIM)).unsqueeze(1)
        x = torch.cat((time_token, x), dim=1)
        x = torch.cat((self.label_emb(y).unsqueeze(1), x), dim=1)
        x = x + self.pos_embed
        skips = []
        for block in self.in_blocks:
            x = block(x)
            skips.append(x)
        x = self.mid_block(x)
        for block in self.out_blocks:
            x = block(x, skips.pop())
        x = self.decoder_pred(self.norm(x))
        return self.final_layer(unpatchify(x[:, EXTRAS:]))


def cosine_alphas(times: int, s: float = 0.008) -> Tensor:
    """What is left of the picture's variance after each time."""
    t = torch.arange(times + 1, dtype=torch.float64) / times
    level = torch.cos((t + s) / (1 + s) * math.pi / 2) ** 2
    betas = (1 - level[1:] / level[:-1]).clamp(max=0.999)
    return (1 - betas).cumprod(0).float()


class Diffusion(nn.Module):
    """Pictures, noise, times, labels and which of these are dropped -> the noise that is predicted."""

    def __init__(self):
        super().__init__()
        self.nnet = UViT()
        self.register_buffer("alphas_cumprod", cosine_alphas(TIMES))
        self.apply(draw)

    def forward(self, x: Tensor, noise: Tensor, n: Tensor, y: Tensor, drop: Tensor) -> Tensor:
        alpha = self.alphas_cumprod[n][:, None, None, None]
        xn = alpha.sqrt() * x + (1 - alpha).sqrt() * noise
        y = torch.where(drop, CLASSES, y)
        return self.nnet(xn, n.to(xn), y)


def draw(layer: nn.Module) -> None:
    """Random weights, norms and biases."""
    if isinstance(layer, nn.LayerNorm):
        nn.init.normal_(layer.weight, 1.0, 0.2), nn.init.normal_(layer.bias, std=0.2)
    elif isinstance(layer, nn.Embedding):
        nn.init.normal_(layer.weight, std=0.6)
    elif isinstance(layer, nn.Linear | nn.Conv2d):
        nn.init.normal_(layer.weight, std=0.9 / math.sqrt(layer.weight[0].numel()))
        if layer.bias is not None:
            nn.init.normal_(layer.bias, std=0.1)


def noisy_waves() -> tuple[dict[str, Tensor], Tensor]:
    """Waves whose class tells their direction, and noise; the first label is always dropped."""
    y, n = torch.randint(CLASSES, (PICTURES,)), torch.randint(TIMES, (PICTURES,))
    turn = (math.pi * y / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase = 6 * torch.rand(PICTURES, 1, 1, 1) + torch.arange(CHANNELS)[:, None, None]
    x = torch.sin(turn.cos() * across + turn.sin() * down + phase)
    noise, drop = torch.randn_like(x), torch.rand(PICTURES) < 0.25
    drop[0] = True
    return {"x": x, "noise": noise, "n": n, "y": y, "drop": drop}, noise.clone()


def noise_loss(predicted: Tensor, noise: Tensor) -> Tensor:
    """A quarter of the mean square of what is wrong in the noise."""
    return F.mse_loss(predicted, noise) / 4
