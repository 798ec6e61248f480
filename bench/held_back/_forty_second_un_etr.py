"""A small UNETR in two dimensions: a vision transformer's hidden states in a decoder of convolutions."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, CLASSES, HIGH, WIDE, PATCH = 2, 4, 24, 40, 8
HIDDEN, HEADS, MLP, LAYERS, FEATURES, PICTURES = 24, 4, 44, 3, 5, 3
GRID = HIGH // PATCH, WIDE // PATCH


class Patches(nn.Module):
    """b c (h p1) (w p2) -> b (h w) (p1 p2 c)."""

    def forward(self, x: Tensor) -> Tensor:
        x = x.unflatten(3, (-1, PATCH)).unflatten(2, (-1, PATCH))
        return x.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)


class PatchEmbeddingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embeddings = nn.Sequential(Patches(), nn.Linear(CHANNELS * PATCH**2, HIDDEN))
        self.position_embeddings = nn.Parameter(torch.zeros(1, GRID[0] * GRID[1], HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        return self.patch_embeddings(x) + self.position_embeddings


class SABlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out_proj = nn.Linear(HIDDEN, HIDDEN)
        self.scale = (HIDDEN // HEADS) ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(2, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        att = (torch.einsum("blxd,blyd->blxy", q, k) * self.scale).softmax(-1)
        return self.out_proj(torch.einsum("bhxy,bhyd->bhxd", att, v).transpose(1, 2).flatten(2))


class MLPBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear1 = nn.Linear(HIDDEN, MLP)
        self.fn = nn.GELU()
        self.linear2 = nn.Linear(MLP, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear2(self.fn(self.linear1(x)))


class TransformerBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(HIDDEN)
        self.attn = SABlock()
        self.norm2 = nn.LayerNorm(HIDDEN)
        self.mlp = MLPBlock()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embedding = PatchEmbeddingBlock()
        self.blocks = nn.ModuleList(TransformerBlock() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(HIDDEN)

    def forward(self, x: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, hidden_states_out = self.patch_embedding(x), []
        for block in self.blocks:
            x = block(x)
            hidden_states_out.append(x)
        return self.norm(x), hidden_states_out


class Convolution(nn.Sequential):
    """A convolution that keeps the size, or a transposed one that doubles it."""

    def __init__(self, into: int, out: int, size: int = 3, up: bool = False, bias: bool = False):
        conv = nn.Conv2d(into, out, size, padding=size // 2, bias=bias)
        if up:
            conv = nn.ConvTranspose2d(into, out, 2, stride=2, bias=bias)
        super().__init__(OrderedDict(conv=conv))


class UnetResBlock(nn.Module):
    def __init__(self, into: int, out: int):
        super().__init__()
        self.conv1, self.conv2 = Convolution(into, out), Convolution(out, out)
        self.lrelu = nn.LeakyReLU(0.01)
        self.norm1, self.norm2 = (nn.InstanceNorm2d(out, affine=True) for _ in range(2))
        self.downsample = into != out
        if self.downsample:
            self.conv3, self.norm3 = Convolution(into, out, 1), nn.InstanceNorm2d(out, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        out = self.lrelu(self.norm1(self.conv1(x)))
        out = self.norm2(self.conv2(out))
        residual = self.norm3(self.conv3(x)) if self.downsample else x
        return self.lrelu(out + residual)


class UnetrBasicBlock(nn.Module):
    def __init__(self, into: int, out: int):
        super().__init__()
        self.layer = UnetResBlock(into, out)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class UnetrPrUpBlock(nn.Module):
    def __init__(self, into: int, out: int, layers: int):
        super().__init__()
        self.transp_conv_init = Convolution(into, out, up=True)
        blocks = (
            nn.Sequential(Convolution(out, out, up=True), UnetResBlock(out, out)) for _ in range(layers)
        )
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.transp_conv_init(x)
        for block in self.blocks:
            x = block(x)
        return x


class UnetrUpBlock(nn.Module):
    def __init__(self, into: int, out: int):
        super().__init__()
        self.transp_conv = Convolution(into, out, up=True)
        self.conv_block = UnetResBlock(2 * out, out)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        return self.conv_block(torch.cat((self.transp_conv(x), skip), 1))


class UnetOutBlock(nn.Sequential):
    def __init__(self):
        super().__init__(OrderedDict(conv=Convolution(FEATURES, CLASSES, 1, bias=True)))


class UNETR(nn.Module):
    """Pictures [N, 2, 24, 40] -> logits [N, 4, 24, 40]."""

    def __init__(self):
        super().__init__()
        self.vit = ViT()
        self.encoder1 = UnetrBasicBlock(CHANNELS, FEATURES)
        self.encoder2 = UnetrPrUpBlock(HIDDEN, 2 * FEATURES, 1)
        self.encoder3 = UnetrPrUpBlock(HIDDEN, 4 * FEATURES, 0)
        self.decoder4 = UnetrUpBlock(HIDDEN, 4 * FEATURES)
        self.decoder3 = UnetrUpBlock(4 * FEATURES, 2 * FEATURES)
        self.decoder2 = UnetrUpBlock(2 * FEATURES, FEATURES)
        self.out = UnetOutBlock()
        for name, weight in self.named_parameters():
            if weight.ndim == 1 or "position" in name:
                nn.init.normal_(weight, float("norm" in name and "weight" in name), 0.2)

    def proj_feat(self, x: Tensor) -> Tensor:
        return x.unflatten(1, GRID).permute(0, 3, 1, 2).contiguous()

    def forward(self, x_in: Tensor) -> Tensor:
        x, hidden_states_out = self.vit(x_in)
        enc1 = self.encoder1(x_in)
        enc2 = self.encoder2(self.proj_feat(hidden_states_out[0]))
        enc3 = self.encoder3(self.proj_feat(hidden_states_out[1]))
        dec3 = self.decoder4(self.proj_feat(x), enc3)
        dec2 = self.decoder3(dec3, enc2)
        return self.out(self.decoder2(dec2, enc1))


def organs() -> tuple[Tensor, Tensor]:
    """Noisy scans with an ellipse of each class but the background, each of its own brightness."""
    y, x = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    target = torch.zeros(PICTURES, HIGH, WIDE, dtype=torch.long)
    for picture in target:
        for organ in range(1, CLASSES):
            top, left, radius = HIGH * torch.rand(()), WIDE * torch.rand(()), 4 + 5 * torch.rand(())
            picture[((y - top) / radius) ** 2 + ((x - left) / (radius + organ)) ** 2 < 1] = organ
    bright = torch.tensor([[0.0, 1.2, -0.9, 0.5], [0.3, -0.4, 0.8, 1.5]])[:, target].movedim(1, 0)
    return bright + 0.3 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE), target


def dice_and_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The Dice loss without the background, smoothed, and the cross entropy, by four."""
    guess = logits.softmax(1)[:, 1:].flatten(2)
    truth = F.one_hot(target, CLASSES).movedim(3, 1)[:, 1:].flatten(2).to(guess)
    overlap, total = (guess * truth).sum(2), guess.sum(2) + truth.sum(2)
    dice = 1 - (2 * overlap + 1e-5) / (total + 1e-5)
    return (dice.mean() + F.cross_entropy(logits, target)) / 4
