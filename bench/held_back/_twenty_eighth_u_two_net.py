"""A small U^2-Net: a U of residual U-blocks, whose side outputs are fused, finds salient objects."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, HIGH, WIDE, PICTURES = 3, 38, 46, 3


class REBNCONV(nn.Module):
    def __init__(self, in_ch: int, out_ch: int, dirate: int = 1):
        super().__init__()
        self.conv_s1 = nn.Conv2d(in_ch, out_ch, 3, padding=dirate, dilation=dirate)
        self.bn_s1 = nn.BatchNorm2d(out_ch)
        self.relu_s1 = nn.ReLU()
        nn.init.normal_(self.bn_s1.weight, 1, 0.2)
        nn.init.normal_(self.bn_s1.bias, 0.1, 0.2)
        nn.init.normal_(self.bn_s1.running_mean, 0, 0.2)
        nn.init.uniform_(self.bn_s1.running_var, 0.2, 0.6)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu_s1(self.bn_s1(self.conv_s1(x)))


def _upsample_like(src: Tensor, tar: Tensor) -> Tensor:
    return F.interpolate(src, size=tar.shape[2:], mode="bilinear", align_corners=False)


def halving() -> nn.MaxPool2d:
    return nn.MaxPool2d(2, stride=2, ceil_mode=True)


class RSU5(nn.Module):
    def __init__(self, in_ch: int, mid_ch: int, out_ch: int):
        super().__init__()
        self.rebnconvin = REBNCONV(in_ch, out_ch)
        self.rebnconv1 = REBNCONV(out_ch, mid_ch)
        self.pool1 = halving()
        self.rebnconv2 = REBNCONV(mid_ch, mid_ch)
        self.pool2 = halving()
        self.rebnconv3 = REBNCONV(mid_ch, mid_ch)
        self.pool3 = halving()
        self.rebnconv4 = REBNCONV(mid_ch, mid_ch)
        self.rebnconv5 = REBNCONV(mid_ch, mid_ch, dirate=2)
        self.rebnconv4d = REBNCONV(mid_ch * 2, mid_ch)
        self.rebnconv3d = REBNCONV(mid_ch * 2, mid_ch)
        self.rebnconv2d = REBNCONV(mid_ch * 2, mid_ch)
        self.rebnconv1d = REBNCONV(mid_ch * 2, out_ch)

    def forward(self, x: Tensor) -> Tensor:
        hxin = self.rebnconvin(x)
        hx1 = self.rebnconv1(hxin)
        hx2 = self.rebnconv2(self.pool1(hx1))
        hx3 = self.rebnconv3(self.pool2(hx2))
        hx4 = self.rebnconv4(self.pool3(hx3))
        hx5 = self.rebnconv5(hx4)
        hx4d = self.rebnconv4d(torch.cat((hx5, hx4), 1))
        hx4dup = _upsample_like(hx4d, hx3)
        hx3d = self.rebnconv3d(torch.cat((hx4dup, hx3), 1))
        hx3dup = _upsample_like(hx3d, hx2)
        hx2d = self.rebnconv2d(torch.cat((hx3dup, hx2), 1))
        hx2dup = _upsample_like(hx2d, hx1)
        hx1d = self.rebnconv1d(torch.cat((hx2dup, hx1), 1))
        return hx1d + hxin


class RSU4(nn.Module):
    def __init__(self, in_ch: int, mid_ch: int, out_ch: int):
        super().__init__()
        self.rebnconvin = REBNCONV(in_ch, out_ch)
        self.rebnconv1 = REBNCONV(out_ch, mid_ch)
        self.pool1 = halving()
        self.rebnconv2 = REBNCONV(mid_ch, mid_ch)
        self.pool2 = halving()
        self.rebnconv3 = REBNCONV(mid_ch, mid_ch)
        self.rebnconv4 = REBNCONV(mid_ch, mid_ch, dirate=2)
        self.rebnconv3d = REBNCONV(mid_ch * 2, mid_ch)
        self.rebnconv2d = REBNCONV(mid_ch * 2, mid_ch)
        self.rebnconv1d = REBNCONV(mid_ch * 2, out_ch)

    def forward(self, x: Tensor) -> Tensor:
        hxin = self.rebnconvin(x)
        hx1 = self.rebnconv1(hxin)
        hx2 = self.rebnconv2(self.pool1(hx1))
        hx3 = self.rebnconv3(self.pool2(hx2))
        hx4 = self.rebnconv4(hx3)
        hx3d = self.rebnconv3d(torch.cat((hx4, hx3), 1))
        hx3dup = _upsample_like(hx3d, hx2)
        hx2d = self.rebnconv2d(torch.cat((hx3dup, hx2), 1))
        hx2dup = _upsample_like(hx2d, hx1)
        hx1d = self.rebnconv1d(torch.cat((hx2dup, hx1), 1))
        return hx1d + hxin


class RSU4F(nn.Module):
    def __init__(self, in_ch: int, mid_ch: int, out_ch: int):
        super().__init__()
        self.rebnconvin = REBNCONV(in_ch, out_ch)
        self.rebnconv1 = REBNCONV(out_ch, mid_ch)
        self.rebnconv2 = REBNCONV(mid_ch, mid_ch, dirate=2)
        self.rebnconv3 = REBNCONV(mid_ch, mid_ch, dirate=4)
        self.rebnconv4 = REBNCONV(mid_ch, mid_ch, dirate=8)
        self.rebnconv3d = REBNCONV(mid_ch * 2, mid_ch, dirate=4)
        self.rebnconv2d = REBNCONV(mid_ch * 2, mid_ch, dirate=2)
        self.rebnconv1d = REBNCONV(mid_ch * 2, out_ch)

    def forward(self, x: Tensor) -> Tensor:
        hxin = self.rebnconvin(x)
        hx1 = self.rebnconv1(hxin)
        hx2 = self.rebnconv2(hx1)
        hx3 = self.rebnconv3(hx2)
        hx4 = self.rebnconv4(hx3)
        hx3d = self.rebnconv3d(torch.cat((hx4, hx3), 1))
        hx2d = self.rebnconv2d(torch.cat((hx3d, hx2), 1))
        hx1d = self.rebnconv1d(torch.cat((hx2d, hx1), 1))
        return hx1d + hxin


class U2NET(nn.Module):
    """Pictures -> the fused saliency and that of each side, as probabilities [N, 1, H, W]."""

    def __init__(self, in_ch: int = COLOURS, out_ch: int = 1):
        super().__init__()
        self.stage1 = RSU5(in_ch, 4, 8)
        self.pool12 = halving()
        self.stage2 = RSU4(8, 5, 12)
        self.pool23 = halving()
        self.stage3 = RSU4F(12, 6, 14)
        self.pool34 = halving()
        self.stage4 = RSU4F(14, 7, 13)
        self.stage3d = RSU4F(27, 10, 11)
        self.stage2d = RSU4(23, 5, 9)
        self.stage1d = RSU5(17, 4, 7)
        self.side1 = nn.Conv2d(7, out_ch, 3, padding=1)
        self.side2 = nn.Conv2d(9, out_ch, 3, padding=1)
        self.side3 = nn.Conv2d(11, out_ch, 3, padding=1)
        self.side4 = nn.Conv2d(13, out_ch, 3, padding=1)
        self.outconv = nn.Conv2d(4 * out_ch, out_ch, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        hx1 = self.stage1(x)
        hx2 = self.stage2(self.pool12(hx1))
        hx3 = self.stage3(self.pool23(hx2))
        hx4 = self.stage4(self.pool34(hx3))
        hx4up = _upsample_like(hx4, hx3)
        hx3d = self.stage3d(torch.cat((hx4up, hx3), 1))
        hx3dup = _upsample_like(hx3d, hx2)
        hx2d = self.stage2d(torch.cat((hx3dup, hx2), 1))
        hx2dup = _upsample_like(hx2d, hx1)
        hx1d = self.stage1d(torch.cat((hx2dup, hx1), 1))
        d1 = self.side1(hx1d)
        d2 = _upsample_like(self.side2(hx2d), d1)
        d3 = _upsample_like(self.side3(hx3d), d1)
        d4 = _upsample_like(self.side4(hx4), d1)
        d0 = self.outconv(torch.cat((d1, d2, d3, d4), 1))
        return tuple(torch.sigmoid(d) for d in (d0, d1, d2, d3, d4))


def blots() -> tuple[Tensor, Tensor]:
    """Pictures of a tilted ellipse before waves, and the mask of the ellipse."""
    down, across = torch.arange(HIGH)[:, None] / HIGH - 0.5, torch.arange(WIDE) / WIDE - 0.5
    place, turn = 0.4 * torch.rand(2, PICTURES, 1, 1) - 0.2, math.pi * torch.rand(PICTURES, 1, 1)
    y, x = down - place[0], across - place[1]
    radii = 0.12 + 0.2 * torch.rand(2, PICTURES, 1, 1)
    one, two = turn.cos() * x + turn.sin() * y, turn.cos() * y - turn.sin() * x
    mask = ((one / radii[0]).square() + (two / radii[1]).square() < 1).float()[:, None]
    tone, ground = torch.randn(2, PICTURES, COLOURS, 1, 1)
    wave = torch.sin(12 * turn.cos() * across + 9 * down)[:, None]
    picture = mask * tone + (1 - mask) * (ground + 0.5 * wave)
    return picture + 0.1 * torch.randn_like(picture), mask


def all_sides(outputs: tuple[Tensor, ...], mask: Tensor) -> Tensor:
    """The sum of the cross entropies of all sides, by five."""
    return sum(F.binary_cross_entropy(d, mask) for d in outputs) / 5
