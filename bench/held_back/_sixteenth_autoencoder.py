"""A small autoencoder of latent diffusion: residual stages, attention in the middle, a Gaussian latent."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, LATENT, GROUPS, EPS = (4, 8, 12), 4, 2, 1e-6
SCALE, BOUNDS, SHAPE = 0.18215, (-1.2, 0.8), (16, 24)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.GroupNorm):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.3)
    elif isinstance(module, nn.Conv2d | nn.Linear):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        nn.init.normal_(module.bias, std=0.2)


class ResnetBlock2D(nn.Module):
    """Twice normalise, activate and convolve; a projection around it where the width changes."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(GROUPS, inputs, eps=EPS)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2 = nn.GroupNorm(GROUPS, outputs, eps=EPS)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.nonlinearity = nn.SiLU()
        self.conv_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv1(self.nonlinearity(self.norm1(x)))
        y = self.conv2(self.nonlinearity(self.norm2(y)))
        return y + (x if self.conv_shortcut is None else self.conv_shortcut(x))


class Attention(nn.Module):
    """One head over all pixels, with a residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.scale = width**-0.5
        self.group_norm = nn.GroupNorm(GROUPS, width, eps=EPS)
        self.to_q, self.to_k, self.to_v = (nn.Linear(width, width) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(width, width)])

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.group_norm(x).flatten(2).transpose(1, 2)
        q, k, v = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        weights = (self.scale * q @ k.transpose(1, 2)).softmax(-1)
        return self.to_out[0](weights @ v).transpose(1, 2).reshape(x.shape) + x


class Downsample2D(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample2D(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


class DownEncoderBlock2D(nn.Module):
    def __init__(self, inputs: int, outputs: int, last: bool):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock2D(inputs, outputs)])
        self.downsamplers = None if last else nn.ModuleList([Downsample2D(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.resnets, *(self.downsamplers or ())):
            x = module(x)
        return x


class UpDecoderBlock2D(nn.Module):
    def __init__(self, inputs: int, outputs: int, last: bool):
        super().__init__()
        self.resnets = nn.ModuleList([ResnetBlock2D(inputs, outputs), ResnetBlock2D(outputs, outputs)])
        self.upsamplers = None if last else nn.ModuleList([Upsample2D(outputs)])

    def forward(self, x: Tensor) -> Tensor:
        for module in (*self.resnets, *(self.upsamplers or ())):
            x = module(x)
        return x


class UNetMidBlock2D(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.attentions = nn.ModuleList([Attention(width)])
        self.resnets = nn.ModuleList(ResnetBlock2D(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, WIDTHS[0], 3, padding=1)
        pairs = list(zip((WIDTHS[0], *WIDTHS), WIDTHS, strict=False))
        self.down_blocks = nn.ModuleList(
            DownEncoderBlock2D(*pair, last=i == len(pairs) - 1) for i, pair in enumerate(pairs)
        )
        self.mid_block = UNetMidBlock2D(WIDTHS[-1])
        self.conv_norm_out = nn.GroupNorm(GROUPS, WIDTHS[-1], eps=EPS)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(WIDTHS[-1], 2 * LATENT, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        x = self.mid_block(x)
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        widths = WIDTHS[::-1]
        self.conv_in = nn.Conv2d(LATENT, widths[0], 3, padding=1)
        self.mid_block = UNetMidBlock2D(widths[0])
        pairs = list(zip((widths[0], *widths), widths, strict=False))
        self.up_blocks = nn.ModuleList(
            UpDecoderBlock2D(*pair, last=i == len(pairs) - 1) for i, pair in enumerate(pairs)
        )
        self.conv_norm_out = nn.GroupNorm(GROUPS, widths[-1], eps=EPS)
        self.conv_act = nn.SiLU()
        self.conv_out = nn.Conv2d(widths[-1], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        x = self.mid_block(self.conv_in(z))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(self.conv_act(self.conv_norm_out(x)))


class AutoencoderKL(nn.Module):
    """Images [N, 3, H, W] and noise [N, 4, H / 4, W / 4] -> the images again, and the latent's moments."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.quant_conv = nn.Conv2d(2 * LATENT, 2 * LATENT, 1)
        self.post_quant_conv = nn.Conv2d(LATENT, LATENT, 1)
        self.apply(varied)

    def encode(self, sample: Tensor) -> tuple[Tensor, Tensor]:
        mean, logvar = self.quant_conv(self.encoder(sample)).chunk(2, 1)
        return mean, logvar.clamp(*BOUNDS)

    def decode(self, latents: Tensor) -> Tensor:
        return self.decoder(self.post_quant_conv(latents / SCALE))

    def forward(self, sample: Tensor, noise: Tensor) -> dict[str, Tensor]:
        mean, logvar = self.encode(sample)
        latents = SCALE * (mean + (0.5 * logvar).exp() * noise)
        return {"sample": self.decode(latents), "mean": mean, "logvar": logvar}


def images() -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Smooth fields of colour with a little grain, and the noise of their latents."""
    field = F.interpolate(torch.randn(2, 3, 4, 5), SHAPE, mode="bilinear", align_corners=True)
    sample = (field + 0.2 * torch.randn(2, 3, *SHAPE)).tanh()
    return (sample, torch.randn(2, LATENT, SHAPE[0] // 4, SHAPE[1] // 4)), sample.clone()


def evidence(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The error of the images, and the divergence of the latents from a standard normal."""
    mean, logvar = outputs["mean"], outputs["logvar"]
    divergence = 0.5 * (mean.square() + logvar.exp() - 1 - logvar)
    return 0.5 * F.mse_loss(outputs["sample"], target) + 0.05 * divergence.mean()
