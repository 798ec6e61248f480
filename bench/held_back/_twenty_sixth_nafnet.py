"""A small NAFNet: a U of blocks without activations, which takes noise and blur off pictures."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PICTURES = 3, 13, 19, 2
WIDTH, ENCODERS, MIDDLE, DECODERS = 9, (1, 2), 2, (2, 1)


class LayerNormFunction(torch.autograd.Function):
    """A norm over the channels of [N, C, H, W], with its gradient by hand."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        mu = x.mean(1, keepdim=True)
        var = (x - mu).pow(2).mean(1, keepdim=True)
        y = (x - mu) / (var + eps).sqrt()
        ctx.save_for_backward(y, var, weight)
        return weight.view(1, -1, 1, 1) * y + bias.view(1, -1, 1, 1)

    @staticmethod
    def backward(ctx, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        y, var, weight = ctx.saved_tensors
        g = grad_output * weight.view(1, -1, 1, 1)
        mean_g = g.mean(dim=1, keepdim=True)
        mean_gy = (g * y).mean(dim=1, keepdim=True)
        gx = 1.0 / torch.sqrt(var + ctx.eps) * (g - y * mean_gy - mean_g)
        return gx, (grad_output * y).sum((0, 2, 3)), grad_output.sum((0, 2, 3)), None


class LayerNorm2d(nn.Module):
    def __init__(self, channels: int, eps: float = 1e-6):
        super().__init__()
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(channels))
        self.bias = nn.Parameter(0.2 * torch.randn(channels))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return LayerNormFunction.apply(x, self.weight, self.bias, self.eps)


class SimpleGate(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        x1, x2 = x.chunk(2, dim=1)
        return x1 * x2


class NAFBlock(nn.Module):
    def __init__(self, c: int, dw_expand: int = 2, ffn_expand: int = 2):
        super().__init__()
        dw_channel, ffn_channel = c * dw_expand, c * ffn_expand
        self.conv1 = nn.Conv2d(c, dw_channel, 1)
        self.conv2 = nn.Conv2d(dw_channel, dw_channel, 3, padding=1, groups=dw_channel)
        self.conv3 = nn.Conv2d(dw_channel // 2, c, 1)
        self.sca = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(dw_channel // 2, dw_channel // 2, 1),
        )
        nn.init.normal_(self.sca[1].bias, mean=0.8, std=0.3)
        self.sg = SimpleGate()
        self.conv4 = nn.Conv2d(c, ffn_channel, 1)
        self.conv5 = nn.Conv2d(ffn_channel // 2, c, 1)
        self.norm1, self.norm2 = LayerNorm2d(c), LayerNorm2d(c)
        self.dropout1, self.dropout2 = nn.Identity(), nn.Identity()
        self.beta = nn.Parameter(0.6 + 0.2 * torch.randn(1, c, 1, 1))
        self.gamma = nn.Parameter(0.6 + 0.2 * torch.randn(1, c, 1, 1))

    def forward(self, inp: Tensor) -> Tensor:
        x = self.norm1(inp)
        x = self.conv2(self.conv1(x))
        x = self.sg(x)
        x = x * self.sca(x)
        x = self.dropout1(self.conv3(x))
        y = inp + x * self.beta
        x = self.conv4(self.norm2(y))
        x = self.sg(x)
        x = self.dropout2(self.conv5(x))
        return y + x * self.gamma


def blocks(chan: int, num: int) -> nn.Sequential:
    return nn.Sequential(*(NAFBlock(chan) for _ in range(num)))


class NAFNet(nn.Module):
    """[N, 3, H, W] -> [N, 3, H, W], of any height and width."""

    def __init__(self):
        super().__init__()
        self.intro = nn.Conv2d(CHANNELS, WIDTH, 3, padding=1)
        self.ending = nn.Conv2d(WIDTH, CHANNELS, 3, padding=1)
        self.encoders, self.decoders = nn.ModuleList(), nn.ModuleList()
        self.ups, self.downs = nn.ModuleList(), nn.ModuleList()
        chan = WIDTH
        for num in ENCODERS:
            self.encoders.append(blocks(chan, num))
            self.downs.append(nn.Conv2d(chan, 2 * chan, 2, 2))
            chan = chan * 2
        self.middle_blks = blocks(chan, MIDDLE)
        for num in DECODERS:
            self.ups.append(nn.Sequential(nn.Conv2d(chan, chan * 2, 1, bias=False), nn.PixelShuffle(2)))
            chan = chan // 2
            self.decoders.append(blocks(chan, num))
        self.padder_size = 2 ** len(self.encoders)

    def forward(self, inp: Tensor) -> Tensor:
        high, wide = inp.shape[2:]
        inp = self.check_image_size(inp)
        x, encs = self.intro(inp), []
        for encoder, down in zip(self.encoders, self.downs, strict=True):
            x = encoder(x)
            encs.append(x)
            x = down(x)
        x = self.middle_blks(x)
        for decoder, up, enc_skip in zip(self.decoders, self.ups, encs[::-1], strict=True):
            x = up(x)
            x = x + enc_skip
            x = decoder(x)
        x = self.ending(x)
        x = x + inp
        return x[:, :, :high, :wide]

    def check_image_size(self, x: Tensor) -> Tensor:
        size, (h, w) = self.padder_size, x.shape[2:]
        return F.pad(x, (0, (size - w % size) % size, 0, (size - h % size) % size))


def blurred() -> tuple[Tensor, Tensor]:
    """Striped squares on a slope of colours, clean; and the same moved by a blur along rows, with noise."""
    turn, phase = math.pi * torch.rand(PICTURES, 1, 1, 1), 6 * torch.rand(PICTURES, 1, 1, 1)
    across, down = torch.arange(WIDE) + 0.0, torch.arange(HIGH)[:, None] + 0.0
    tone = torch.arange(CHANNELS)[:, None, None]
    stripes = torch.sin(turn.cos() * across + turn.sin() * down + phase + tone)
    left, top = (torch.randint(1, 6, (PICTURES, 1, 1, 1)) for _ in range(2))
    inside = (across >= left) & (across < left + 9) & (down >= top) & (down < top + 6)
    clean = 0.5 + torch.where(inside, 0.4 * stripes, 0.3 * torch.cos(across / 9 + down / 7 + tone))
    spoilt = F.avg_pool2d(F.pad(clean, (2, 2, 0, 0), mode="replicate"), (1, 5), stride=1)
    return spoilt + 0.1 * torch.randn_like(spoilt), clean


def charbonnier(outputs: Tensor, clean: Tensor) -> Tensor:
    """The mean of a smooth absolute difference."""
    return ((outputs - clean).square() + 1e-3).sqrt().mean()
