"""A small vision transformer with registers, resampled positions, and normed queries and keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, HIDDEN, DEPTH, REGISTERS = 24, 3, 40, 3, 4
PATCH, GRID, PICTURE, CLASSES, EPS = 4, (5, 5), (16, 24), 5, 1e-6


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.LayerNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Linear | nn.Conv2d):
        nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, LayerScale):
        nn.init.uniform_(module.gamma, 0.2, 0.7)


class PatchEmbed(nn.Module):
    """[N, 3, H, W] -> [N, L, C] and how many rows and columns the L patches make."""

    def __init__(self, channels: int, width: int, patch: int):
        super().__init__()
        self.proj = nn.Conv2d(channels, width, patch, stride=patch)
        self.norm = nn.Identity()

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.proj(x)
        return self.norm(x.flatten(2).transpose(1, 2)), (x.shape[2], x.shape[3])


class Attention(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.num_heads, self.head_dim = heads, width // heads
        self.scale = self.head_dim**-0.5
        self.qkv = nn.Linear(width, 3 * width)
        self.q_norm, self.k_norm = nn.LayerNorm(self.head_dim, EPS), nn.LayerNorm(self.head_dim, EPS)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        count, length, width = x.shape
        qkv = self.qkv(x).reshape(count, length, 3, self.num_heads, self.head_dim)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        weights = (q * self.scale @ k.transpose(-2, -1)).softmax(-1)
        return self.proj((weights @ v).transpose(1, 2).reshape(count, length, width))


class LayerScale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class SwiGLU(nn.Module):
    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.fc1_g, self.fc1_x = nn.Linear(width, hidden), nn.Linear(width, hidden)
        self.act = nn.SiLU()
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1_g(x)) * self.fc1_x(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int):
        super().__init__()
        self.norm1 = nn.LayerNorm(width, EPS)
        self.attn, self.ls1 = Attention(width, heads), LayerScale(width)
        self.norm2 = nn.LayerNorm(width, EPS)
        self.mlp, self.ls2 = SwiGLU(width, hidden), LayerScale(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.ls1(self.attn(self.norm1(x)))
        return x + self.ls2(self.mlp(self.norm2(x)))


class VisionTransformer(nn.Module):
    """Images [N, 3, H, W] -> scores of the classes [N, K] and features of the patches [N, L, C]."""

    def __init__(self):
        super().__init__()
        self.num_prefix_tokens = 1 + REGISTERS
        self.patch_embed = PatchEmbed(3, WIDTH, PATCH)
        self.cls_token = nn.Parameter(0.6 * torch.randn(1, 1, WIDTH))
        self.reg_token = nn.Parameter(0.6 * torch.randn(1, REGISTERS, WIDTH))
        self.pos_embed = nn.Parameter(0.6 * torch.randn(1, GRID[0] * GRID[1], WIDTH))
        self.blocks = nn.Sequential(*(Block(WIDTH, HEADS, HIDDEN) for _ in range(DEPTH)))
        self.norm = nn.LayerNorm(WIDTH, EPS)
        self.fc_norm = nn.LayerNorm(2 * WIDTH, EPS)
        self.head = nn.Linear(2 * WIDTH, CLASSES)
        self.apply(varied)

    def _pos_embed(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        """Positions for the patches alone; then the class token and the registers go before them."""
        grid = self.pos_embed.reshape(1, *GRID, -1).permute(0, 3, 1, 2)
        grid = F.interpolate(grid, size, mode="bicubic", align_corners=False, antialias=True)
        x = x + grid.flatten(2).transpose(1, 2)
        prefix = [token.expand(len(x), -1, -1) for token in (self.cls_token, self.reg_token)]
        return torch.cat([*prefix, x], 1)

    def forward_features(self, x: Tensor) -> Tensor:
        return self.norm(self.blocks(self._pos_embed(*self.patch_embed(x))))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.forward_features(x)
        patches = x[:, self.num_prefix_tokens :]
        pooled = torch.cat([x[:, 0], patches.mean(1)], -1)
        return self.head(self.fc_norm(pooled)), patches


def pictures() -> tuple[Tensor, Tensor]:
    """Waves whose direction and colour tell the class, under a smooth light and noise."""
    labels = torch.randint(CLASSES, (4,))
    rows, columns = torch.meshgrid(*(torch.arange(float(size)) for size in PICTURE), indexing="ij")
    angle = labels[:, None, None] * torch.pi / CLASSES
    wave = torch.sin(0.9 * (rows * angle.sin() + columns * angle.cos()) + 6 * torch.rand(4, 1, 1))
    colour = torch.stack([(labels + 1.0) / CLASSES, torch.ones(4), 1 - labels / CLASSES], 1)
    light = F.interpolate(torch.randn(4, 3, 2, 3), PICTURE, mode="bilinear", align_corners=True)
    images = wave[:, None] * colour[:, :, None, None] + 0.5 * light
    return images + 0.3 * torch.randn(images.shape), labels


def image_and_patches(outputs: tuple[Tensor, Tensor], labels: Tensor) -> Tensor:
    """The class of the picture, which the first channels of each patch shall tell too."""
    logits, patches = outputs
    own = patches[..., :CLASSES].flatten(0, 1)
    spread = patches[..., CLASSES:].mean(1).square().mean()
    local = F.cross_entropy(own, labels.repeat_interleave(patches.shape[1]))
    return 0.4 * F.cross_entropy(logits, labels) + 0.3 * local + 0.1 * spread
