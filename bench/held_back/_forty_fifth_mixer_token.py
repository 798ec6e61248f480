"""A small mixer of three kinds: MLP-Mixer blocks, ResMLP blocks and ConvMixer blocks, as timm has them."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PATCH, KERNEL = 3, 12, 20, 4, 3
DIM, TOKEN_HIDDEN, CHANNEL_HIDDEN, CLASSES, PICTURES = 24, 10, 44, 7, 6
GRID = HIGH // PATCH, WIDE // PATCH
MIXERS, RESIDUALS, CONVS = 3, 2, 2


class PatchEmbed(nn.Module):
    """[N, C, H, W] -> [N, tokens, dim]."""

    def __init__(self, in_chans: int, embed_dim: int):
        super().__init__()
        self.proj = nn.Conv2d(in_chans, embed_dim, PATCH, PATCH)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(x).flatten(2).transpose(1, 2)


class Mlp(nn.Module):
    def __init__(self, in_features: int, hidden_features: int):
        super().__init__()
        self.fc1, self.act = nn.Linear(in_features, hidden_features), nn.GELU()
        self.fc2 = nn.Linear(hidden_features, in_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class MixerBlock(nn.Module):
    def __init__(self, dim: int, seq_len: int):
        super().__init__()
        self.norm1, self.mlp_tokens = nn.LayerNorm(dim, eps=1e-6), Mlp(seq_len, TOKEN_HIDDEN)
        self.norm2, self.mlp_channels = nn.LayerNorm(dim, eps=1e-6), Mlp(dim, CHANNEL_HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mlp_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.mlp_channels(self.norm2(x))


class Affine(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        self.alpha, self.beta = nn.Parameter(torch.ones(1, 1, dim)), nn.Parameter(torch.zeros(1, 1, dim))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.beta, self.alpha, x)


class ResBlock(nn.Module):
    """A ResMLP block: linear over the tokens, then an MLP over the channels, each by a layer scale."""

    def __init__(self, dim: int, seq_len: int):
        super().__init__()
        self.norm1, self.linear_tokens = Affine(dim), nn.Linear(seq_len, seq_len)
        self.norm2, self.mlp_channels = Affine(dim), Mlp(dim, CHANNEL_HIDDEN)
        self.ls1, self.ls2 = nn.Parameter(torch.ones(dim)), nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1 * self.linear_tokens(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.ls2 * self.mlp_channels(self.norm2(x))


class Residual(nn.Module):
    def __init__(self, fn: nn.Module):
        super().__init__()
        self.fn = fn

    def forward(self, x: Tensor) -> Tensor:
        return self.fn(x) + x


def conv_block(dim: int) -> nn.Sequential:
    """A ConvMixer block: a depthwise convolution with a skip, then a pointwise one."""
    depthwise = nn.Conv2d(dim, dim, KERNEL, groups=dim, padding="same")
    inner = nn.Sequential(depthwise, nn.GELU(), nn.BatchNorm2d(dim))
    return nn.Sequential(Residual(inner), nn.Conv2d(dim, dim, 1), nn.GELU(), nn.BatchNorm2d(dim))


class Mixer(nn.Module):
    """Pictures -> class logits."""

    def __init__(self):
        super().__init__()
        self.stem, tokens = PatchEmbed(CHANNELS, DIM), GRID[0] * GRID[1]
        kinds = [MixerBlock] * MIXERS + [ResBlock] * RESIDUALS
        self.blocks = nn.Sequential(*(kind(DIM, tokens) for kind in kinds))
        self.convs = nn.Sequential(*(conv_block(DIM) for _ in range(CONVS)))
        self.norm, self.head = nn.LayerNorm(DIM, eps=1e-6), nn.Linear(DIM, CLASSES)
        self.apply(scatter)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.stem(x))
        x = self.convs(x.transpose(1, 2).unflatten(2, GRID))
        # token by token: the slope comes back contiguous, as batch norm of one picture needs it
        x = self.norm(torch.stack(x.flatten(2).unbind(2), 1))
        return self.head(x.mean(dim=1))


@torch.no_grad()
def scatter(module: nn.Module) -> None:
    """Draws a module's own weights and statistics."""
    for name, weight in module.named_parameters(recurse=False):
        if isinstance(module, nn.Linear | nn.Conv2d) and name == "weight":
            weight.normal_(std=0.9 / math.sqrt(weight[0].numel()))
        elif name in ("weight", "alpha"):
            weight.normal_(1, 0.2)
        elif name in ("ls1", "ls2"):
            weight.normal_(0.5, 0.15)
        else:
            weight.normal_(std=0.2)
    if isinstance(module, nn.BatchNorm2d):
        module.running_mean.normal_(std=0.2), module.running_var.uniform_(0.5, 1.5)


def waves() -> tuple[Tensor, Tensor]:
    """Coloured waves, whose class tells their direction."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    return wave + 0.1 * torch.randn_like(wave), label


def smoothed(logits: Tensor, label: Tensor) -> Tensor:
    """A quarter of the cross entropy with smoothed labels."""
    return F.cross_entropy(logits, label, label_smoothing=0.1) / 4
