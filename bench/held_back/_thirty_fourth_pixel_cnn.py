"""A small Gated PixelCNN of two colours, told the class of each picture."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, LEVELS, HIGH, WIDE, CLASSES, PICTURES = 2, 5, 7, 9, 4, 3
HIDDEN, SKIP, OUT, BLOCKS, FIRST, SIZE = 12, 16, 18, 3, 5, 3


class CroppedConv2d(nn.Conv2d):
    """A convolution that sees no row below its own, and the same one row further up."""

    def __init__(self, in_channels: int, out_channels: int, size: int):
        high, edge = size // 2 + 1, size // 2
        super().__init__(in_channels, out_channels, (high, size), padding=(high, edge))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = super().forward(x)
        kernel_height, _ = self.kernel_size
        return x[:, :, 1:-kernel_height, :], x[:, :, : -kernel_height - 1, :]


class MaskedConv2d(nn.Conv2d):
    """Sees the pixels to the left, and of its own pixel the colours before (A), or its own as well (B)."""

    def __init__(self, in_channels: int, out_channels: int, size: int, mask_type: str):
        super().__init__(in_channels, out_channels, (1, size), padding=(0, size // 2))
        mask, centre = torch.zeros_like(self.weight), size // 2
        mask[..., :centre] = 1
        to, of = torch.arange(out_channels)[:, None] % COLOURS, torch.arange(in_channels) % COLOURS
        mask[..., 0, centre] = (of < to if mask_type == "A" else of <= to).float()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight * self.mask, self.bias, padding=self.padding)


class CausalBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, size: int):
        super().__init__()
        self.split_size = out_channels
        self.v_conv = CroppedConv2d(in_channels, 2 * out_channels, size)
        self.v_fc = nn.Conv2d(in_channels, 2 * out_channels, 1)
        self.v_to_h = nn.Conv2d(2 * out_channels, 2 * out_channels, 1)
        self.h_conv = MaskedConv2d(in_channels, 2 * out_channels, size, "A")
        self.h_fc = MaskedConv2d(out_channels, out_channels, 1, "B")

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        v_out, v_shifted = self.v_conv(image)
        v_out = v_out + self.v_fc(image)
        v_out_tanh, v_out_sigmoid = torch.split(v_out, self.split_size, dim=1)
        v_out = torch.tanh(v_out_tanh) * torch.sigmoid(v_out_sigmoid)
        h_out = self.h_conv(image) + self.v_to_h(v_shifted)
        h_out_tanh, h_out_sigmoid = torch.split(h_out, self.split_size, dim=1)
        h_out = torch.tanh(h_out_tanh) * torch.sigmoid(h_out_sigmoid)
        return v_out, self.h_fc(h_out)


class GatedBlock(nn.Module):
    def __init__(self, channels: int, size: int):
        super().__init__()
        self.split_size = channels
        self.v_conv = CroppedConv2d(channels, 2 * channels, size)
        self.v_fc = nn.Conv2d(channels, 2 * channels, 1)
        self.v_to_h = nn.Conv2d(2 * channels, 2 * channels, 1)
        self.h_conv = MaskedConv2d(channels, 2 * channels, size, "B")
        self.h_fc = MaskedConv2d(channels, channels, 1, "B")
        self.h_skip = MaskedConv2d(channels, SKIP, 1, "B")
        self.label_embedding = nn.Embedding(CLASSES, 2 * channels)
        nn.init.normal_(self.label_embedding.weight, std=0.5)

    def forward(self, x: dict[str, Tensor]) -> dict[str, Tensor]:
        v_in, h_in, skip, label = x["v"], x["h"], x["skip"], x["label"]
        label_embedded = self.label_embedding(label)[:, :, None, None]
        v_out, v_shifted = self.v_conv(v_in)
        v_out = v_out + self.v_fc(v_in) + label_embedded
        v_out_tanh, v_out_sigmoid = torch.split(v_out, self.split_size, dim=1)
        v_out = torch.tanh(v_out_tanh) * torch.sigmoid(v_out_sigmoid)
        h_out = self.h_conv(h_in) + self.v_to_h(v_shifted) + label_embedded
        h_out_tanh, h_out_sigmoid = torch.split(h_out, self.split_size, dim=1)
        h_out = torch.tanh(h_out_tanh) * torch.sigmoid(h_out_sigmoid)
        skip = skip + self.h_skip(h_out)
        return {"v": v_out, "h": self.h_fc(h_out) + h_in, "skip": skip, "label": label}


class PixelCNN(nn.Module):
    """Pictures and their classes -> logits [N, levels, colours, H, W]."""

    def __init__(self):
        super().__init__()
        self.causal_block = CausalBlock(COLOURS, HIDDEN, FIRST)
        self.hidden_conv = nn.Sequential(*(GatedBlock(HIDDEN, SIZE) for _ in range(BLOCKS)))
        self.out_hidden_conv = MaskedConv2d(SKIP, OUT, 1, "B")
        self.out_conv = MaskedConv2d(OUT, LEVELS * COLOURS, 1, "B")
        for conv in (x for x in self.modules() if isinstance(x, nn.Conv2d)):
            nn.init.normal_(conv.weight, std=1.3 / math.sqrt(conv.weight[0].numel()))
            nn.init.normal_(conv.bias, std=0.2)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        n, _, high, wide = image.shape
        v, h = self.causal_block(image)
        skip = image.new_zeros(n, SKIP, high, wide)
        out = self.hidden_conv({"v": v, "h": h, "skip": skip, "label": label})["skip"]
        out = self.out_hidden_conv(F.relu(out))
        out = self.out_conv(F.relu(out))
        return out.view(n, LEVELS, COLOURS, high, wide)


def ripples() -> tuple[dict[str, Tensor], Tensor]:
    """Waves of few levels, whose class tells their direction and how the colours differ."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), torch.arange(COLOURS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase + (1 + turn) * tone)
    bright = (wave + 0.1 * torch.randn_like(wave) + 1) / 2
    target = (bright * LEVELS).floor().clamp(0, LEVELS - 1).long()
    return {"image": 2 * target / (LEVELS - 1) - 1, "label": label}, target


def nats(logits: Tensor, target: Tensor) -> Tensor:
    """Half the cross entropy of the levels."""
    return F.cross_entropy(logits, target) / 2
