"""A small Attention U-Net: three gated skips, and heads at two scales."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, CLASSES, PICTURES = 3, 16, 24, 4, 3
WIDTHS, SMOOTH = (6, 10, 14, 20), 1.0


def conv(ch_in: int, ch_out: int, size: int = 3) -> nn.Conv2d:
    layer = nn.Conv2d(ch_in, ch_out, size, padding=size // 2)
    nn.init.normal_(layer.weight, std=math.sqrt(1.5 / (ch_in * size**2)))
    nn.init.normal_(layer.bias, std=0.1)
    return layer


def norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels)
    nn.init.normal_(layer.weight, 1.0, 0.2), nn.init.normal_(layer.bias, std=0.2)
    layer.running_mean.normal_(std=0.1), layer.running_var.uniform_(0.8, 1.2)
    return layer


class ConvBlock(nn.Module):
    def __init__(self, ch_in: int, ch_out: int):
        super().__init__()
        first = conv(ch_in, ch_out), norm(ch_out), nn.ReLU(inplace=True)
        self.conv = nn.Sequential(*first, conv(ch_out, ch_out), norm(ch_out), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


class UpConv(nn.Module):
    def __init__(self, ch_in: int, ch_out: int):
        super().__init__()
        rise = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=False)
        self.up = nn.Sequential(rise, conv(ch_in, ch_out), norm(ch_out), nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x)


class AttentionBlock(nn.Module):
    """The skip, each pixel by a coefficient that the gating signal and the skip give together."""

    def __init__(self, f_g: int, f_l: int, f_int: int):
        super().__init__()
        self.W_g = nn.Sequential(conv(f_g, f_int, 1), norm(f_int))
        self.W_x = nn.Sequential(conv(f_l, f_int, 1), norm(f_int))
        self.psi = nn.Sequential(conv(f_int, 1, 1), norm(1), nn.Sigmoid())
        self.relu = nn.ReLU(inplace=True)

    def forward(self, g: Tensor, x: Tensor) -> Tensor:
        psi = self.relu(self.W_g(g) + self.W_x(x))
        return x * self.psi(psi)


class UnetDsv(nn.Module):
    """A head of a coarser scale, upsampled to the picture's."""

    def __init__(self, in_size: int, out_size: int, scale_factor: int):
        super().__init__()
        rise = nn.Upsample(scale_factor=scale_factor, mode="bilinear", align_corners=False)
        self.dsv = nn.Sequential(conv(in_size, out_size, 1), rise)

    def forward(self, x: Tensor) -> Tensor:
        return self.dsv(x)


class AttentionUNet(nn.Module):
    """[N, 3, H, W] -> two [N, classes, H, W] of logits: of the finest scale, and of the next."""

    def __init__(self):
        super().__init__()
        one, two, three, four = WIDTHS
        self.Maxpool1, self.Maxpool2, self.Maxpool3 = (nn.MaxPool2d(2, 2) for _ in range(3))
        self.Conv1, self.Conv2 = ConvBlock(CHANNELS, one), ConvBlock(one, two)
        self.Conv3, self.Conv4 = ConvBlock(two, three), ConvBlock(three, four)
        self.Up4, self.Att4 = UpConv(four, three), AttentionBlock(three, three, 8)
        self.Up_conv4 = ConvBlock(2 * three, three)
        self.Up3, self.Att3 = UpConv(three, two), AttentionBlock(two, two, 5)
        self.Up_conv3 = ConvBlock(2 * two, two)
        self.Up2, self.Att2 = UpConv(two, one), AttentionBlock(one, one, 4)
        self.Up_conv2 = ConvBlock(2 * one, one)
        self.dsv3, self.Conv_1x1 = UnetDsv(two, CLASSES, 2), conv(one, CLASSES, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x1 = self.Conv1(x)
        x2 = self.Conv2(self.Maxpool1(x1))
        x3 = self.Conv3(self.Maxpool2(x2))
        x4 = self.Conv4(self.Maxpool3(x3))

        d4 = self.Up4(x4)
        x3 = self.Att4(g=d4, x=x3)
        d4 = self.Up_conv4(torch.cat((x3, d4), dim=1))

        d3 = self.Up3(d4)
        x2 = self.Att3(g=d3, x=x2)
        d3 = self.Up_conv3(torch.cat((x2, d3), dim=1))

        d2 = self.Up2(d3)
        x1 = self.Att2(g=d2, x=x1)
        d2 = self.Up_conv2(torch.cat((x1, d2), dim=1))
        return self.Conv_1x1(d2), self.dsv3(d3)


def organs() -> tuple[Tensor, Tensor]:
    """Ellipses of the classes on a background that brightens to one side, under noise."""
    down, across = torch.arange(HIGH)[:, None] / HIGH, torch.arange(WIDE) / WIDE
    label = torch.zeros(PICTURES, HIGH, WIDE, dtype=torch.long)
    for kind in range(1, CLASSES):
        top, left = (0.15 + 0.7 * torch.rand(PICTURES, 1, 1) for _ in range(2))
        high, wide = (0.15 + 0.15 * torch.rand(PICTURES, 1, 1) for _ in range(2))
        label[((down - top) / high) ** 2 + ((across - left) / wide) ** 2 < 1] = kind
    tone = torch.sin(1.7 * torch.arange(CLASSES)[:, None] + torch.arange(CHANNELS))
    x = tone[label].permute(0, 3, 1, 2) + 0.5 * across + 0.3 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE)
    return x, label


def dice_loss(logits: Tensor, label: Tensor) -> Tensor:
    p, wanted = logits.softmax(1), F.one_hot(label, CLASSES).permute(0, 3, 1, 2).to(logits)
    both, total = (p * wanted).sum((2, 3)), p.sum((2, 3)) + wanted.sum((2, 3))
    return 1 - ((2 * both + SMOOTH) / (total + SMOOTH)).mean()


def supervised(outputs: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    """Cross entropy and Dice loss of the finest scale, and half of the next scale's, by four."""
    fine, coarse = (F.cross_entropy(y, label) + dice_loss(y, label) for y in outputs)
    return (fine + 0.5 * coarse) / 4
