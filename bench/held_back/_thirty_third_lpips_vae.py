"""A small first stage of latent diffusion: a convolutional VAE under LPIPS and a patch discriminator."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PICTURES = 3, 16, 20, 2
WIDTHS, GROUPS, LATENT, EMBEDDED = (8, 12), 4, 4, 5
FEATURES, PATCHES = (6, 10, 14), (7, 9, 11)
PERCEPTUAL, KL, DISCRIMINATOR = 0.8, 0.05, 100.0


class ResnetBlock(nn.Module):
    def __init__(self, i: int, o: int):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(GROUPS, i, eps=1e-6), nn.Conv2d(i, o, 3, padding=1)
        self.norm2, self.conv2 = nn.GroupNorm(GROUPS, o, eps=1e-6), nn.Conv2d(o, o, 3, padding=1)
        if i != o:
            self.nin_shortcut = nn.Conv2d(i, o, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv2(F.silu(self.norm2(self.conv1(F.silu(self.norm1(x))))))
        return (self.nin_shortcut(x) if hasattr(self, "nin_shortcut") else x) + h


class AttnBlock(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        self.norm = nn.GroupNorm(GROUPS, in_channels, eps=1e-6)
        self.q, self.k = nn.Conv2d(in_channels, in_channels, 1), nn.Conv2d(in_channels, in_channels, 1)
        self.v, self.proj_out = nn.Conv2d(in_channels, in_channels, 1), nn.Conv2d(in_channels, in_channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = self.q(h).flatten(2), self.k(h).flatten(2), self.v(h).flatten(2)
        weights = torch.bmm(q.transpose(1, 2), k) * q.shape[1] ** -0.5
        h = torch.bmm(v, F.softmax(weights, dim=2).transpose(1, 2))
        return x + self.proj_out(h.view_as(x))


class Downsample(nn.Module):
    def __init__(self, channels: int):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


def middle(c: int) -> nn.Module:
    mid = nn.Module()
    mid.block_1, mid.attn_1, mid.block_2 = ResnetBlock(c, c), AttnBlock(c), ResnetBlock(c, c)
    return mid


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        one, two = WIDTHS
        self.conv_in = nn.Conv2d(CHANNELS, one, 3, padding=1)
        self.down = nn.ModuleList([nn.Module(), nn.Module()])
        self.down[0].block, self.down[0].downsample = nn.ModuleList([ResnetBlock(one, one)]), Downsample(one)
        self.down[1].block, self.mid = nn.ModuleList([ResnetBlock(one, two)]), middle(two)
        self.norm_out, self.conv_out = (
            nn.GroupNorm(GROUPS, two, eps=1e-6),
            nn.Conv2d(two, 2 * LATENT, 3, padding=1),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.down[0].downsample(self.down[0].block[0](self.conv_in(x)))
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(self.down[1].block[0](h))))
        return self.conv_out(F.silu(self.norm_out(h)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        one, two = WIDTHS
        self.conv_in, self.mid = nn.Conv2d(LATENT, two, 3, padding=1), middle(two)
        self.up = nn.ModuleList([nn.Module(), nn.Module()])
        self.up[1].block = nn.ModuleList([ResnetBlock(two, two), ResnetBlock(two, two)])
        self.up[1].upsample = nn.Sequential(nn.Upsample(scale_factor=2), nn.Conv2d(two, two, 3, padding=1))
        self.up[0].block = nn.ModuleList([ResnetBlock(two, one), ResnetBlock(one, one)])
        self.norm_out = nn.GroupNorm(GROUPS, one, eps=1e-6)
        self.conv_out = nn.Conv2d(one, CHANNELS, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(self.conv_in(z))))
        h = self.up[1].upsample(self.up[1].block[1](self.up[1].block[0](h)))
        h = self.up[0].block[1](self.up[0].block[0](h))
        return self.conv_out(F.silu(self.norm_out(h)))


class ScalingLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor([-0.030, -0.088, -0.188])[None, :, None, None])
        self.register_buffer("scale", torch.tensor([0.458, 0.448, 0.450])[None, :, None, None])

    def forward(self, inp: Tensor) -> Tensor:
        return (inp - self.shift) / self.scale


class VGG(nn.Module):
    def __init__(self):
        super().__init__()
        one, two, three = FEATURES
        self.slice1 = nn.Sequential(nn.Conv2d(CHANNELS, one, 3, padding=1), nn.ReLU())
        self.slice2 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(one, two, 3, padding=1), nn.ReLU())
        self.slice3 = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(two, three, 3, padding=1), nn.ReLU())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one = self.slice1(x)
        two = self.slice2(one)
        return one, two, self.slice3(two)


def normalize_tensor(x: Tensor, eps: float = 1e-10) -> Tensor:
    return x / torch.sqrt(torch.sum(x**2, dim=1, keepdim=True) + eps)


class LPIPS(nn.Module):
    def __init__(self):
        super().__init__()
        self.scaling_layer, self.net = ScalingLayer(), VGG()
        self.lins = nn.ModuleList(nn.Conv2d(width, 1, 1, bias=False) for width in FEATURES)

    def forward(self, inp: Tensor, target: Tensor) -> Tensor:
        outs0, outs1 = self.net(self.scaling_layer(inp)), self.net(self.scaling_layer(target))
        val = 0
        for lin, out0, out1 in zip(self.lins, outs0, outs1, strict=True):
            diff = (normalize_tensor(out0) - normalize_tensor(out1)) ** 2
            val = val + lin(diff).mean([2, 3], keepdim=True)
        return val


class NLayerDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        one, two, three = PATCHES
        layers = [nn.Conv2d(CHANNELS, one, 4, 2, 1), nn.LeakyReLU(0.2)]
        for i, o, stride in ((one, two, 2), (two, three, 1)):
            layers += [nn.Conv2d(i, o, 4, stride, 1, bias=False), nn.BatchNorm2d(o), nn.LeakyReLU(0.2)]
        self.main = nn.Sequential(*layers, nn.Conv2d(three, 1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class LPIPSWithDiscriminator(nn.Module):
    def __init__(self):
        super().__init__()
        self.perceptual_loss, self.discriminator = LPIPS(), NLayerDiscriminator()
        self.logvar = nn.Parameter(torch.tensor(0.3))

    def forward(self, inputs: Tensor, reconstructions: Tensor, mean: Tensor, logvar: Tensor) -> Tensor:
        p_loss = self.perceptual_loss(inputs, reconstructions)
        rec_loss = torch.abs(inputs - reconstructions) + PERCEPTUAL * p_loss
        nll_loss = torch.sum(rec_loss / torch.exp(self.logvar) + self.logvar) / len(inputs)
        kl_loss = 0.5 * torch.sum(mean**2 + torch.exp(logvar) - 1.0 - logvar) / len(inputs)
        g_loss = -torch.mean(self.discriminator(reconstructions))
        return nll_loss + KL * kl_loss + DISCRIMINATOR * g_loss


class AutoencoderKL(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.loss = Encoder(), Decoder(), LPIPSWithDiscriminator()
        self.quant_conv = nn.Conv2d(2 * LATENT, 2 * EMBEDDED, 1)
        self.post_quant_conv = nn.Conv2d(EMBEDDED, LATENT, 1)
        draw(self)
        self.loss.perceptual_loss.requires_grad_(False), self.loss.discriminator.requires_grad_(False)

    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = torch.chunk(self.quant_conv(self.encoder(x)), 2, dim=1)
        xrec = self.decoder(self.post_quant_conv(mean + torch.exp(0.5 * logvar) * noise))
        return xrec, self.loss(x, xrec, mean, logvar)


def draw(module: nn.Module) -> None:
    for name, x in module.state_dict().items():
        if name.endswith(("bias", "mean")):
            nn.init.normal_(x, 0.1, 0.2)
        elif x.ndim == 1 or ".lins." in name:
            nn.init.uniform_(x, 0.6, 1.4)
        elif x.ndim:
            nn.init.normal_(x, std=x[0].numel() ** -0.5)


def ripples() -> tuple[dict[str, Tensor], Tensor]:
    (y, x), at = (torch.arange(HIGH)[:, None], torch.arange(WIDE)), 16 * torch.rand(2, PICTURES, 1, 1, 1)
    tone = 2 * torch.arange(CHANNELS)[:, None, None] + torch.pi * torch.rand(PICTURES, 1, 1, 1)
    x = 0.8 * torch.sin(((y - at[0]) ** 2 + (x - at[1]) ** 2).sqrt() / 2 + tone)
    x = (x + 0.05 * torch.randn_like(x)).clamp(-1, 1)
    return {"x": x, "noise": torch.randn(PICTURES, EMBEDDED, HIGH // 2, WIDE // 2)}, x


def by_value(outputs: tuple[Tensor, Tensor], _: Tensor) -> Tensor:
    return outputs[1] / (4 * CHANNELS * HIGH * WIDE)
