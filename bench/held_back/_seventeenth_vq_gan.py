"""A small VQ-GAN: residual stages with attention, a codebook, and a discriminator of patches."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BASE, WIDTHS, GROUPS, EPS = 4, (8, 12), 2, 1e-6
LATENT, CODE, CODES, BETA, SPREAD = 6, 3, 8, 0.25, 0.92
SLOPE, SHAPE = 0.2, (12, 16)
OUTPUTS = ("reconstruction", "codebook_loss", "logits_generated", "logits_real", "logits_fake")


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.GroupNorm | nn.BatchNorm2d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.3)
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.3)
            nn.init.uniform_(module.running_var, 0.6, 1.5)
    elif isinstance(module, nn.Conv2d):
        nn.init.kaiming_normal_(module.weight, nonlinearity="linear")
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Embedding):
        nn.init.normal_(module.weight, std=SPREAD)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def normalize(width: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS, width, eps=EPS, affine=True)


class ResnetBlock(nn.Module):
    """Twice normalise, activate and convolve; a projection around it where the width changes."""

    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.norm1, self.conv1 = normalize(inputs), nn.Conv2d(inputs, outputs, 3, padding=1)
        self.norm2, self.conv2 = normalize(outputs), nn.Conv2d(outputs, outputs, 3, padding=1)
        self.nin_shortcut = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(swish(self.norm1(x)))
        h = self.conv2(swish(self.norm2(h)))
        return h + (x if self.nin_shortcut is None else self.nin_shortcut(x))


class AttnBlock(nn.Module):
    """One head over all pixels, with a residual connection."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = normalize(width)
        self.q, self.k, self.v, self.proj_out = (nn.Conv2d(width, width, 1) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (project(h).flatten(2) for project in (self.q, self.k, self.v))
        weights = (torch.bmm(q.transpose(1, 2), k) * q.shape[1] ** -0.5).softmax(2)
        return x + self.proj_out(torch.bmm(v, weights.transpose(1, 2)).view_as(x))


class Downsample(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.pad(x, (0, 1, 0, 1)))


class Upsample(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(F.interpolate(x, scale_factor=2.0, mode="nearest"))


def level(inputs: int, outputs: int, blocks: int, attend: bool) -> nn.Module:
    holder = nn.Module()
    holder.block = nn.ModuleList(ResnetBlock(outputs if i else inputs, outputs) for i in range(blocks))
    holder.attn = nn.ModuleList(AttnBlock(outputs) for _ in range(blocks if attend else 0))
    return holder


def middle(width: int) -> nn.Module:
    holder = nn.Module()
    holder.block_1, holder.attn_1 = ResnetBlock(width, width), AttnBlock(width)
    holder.block_2 = ResnetBlock(width, width)
    return holder


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(3, BASE, 3, padding=1)
        self.down = nn.ModuleList([level(BASE, WIDTHS[0], 1, False), level(*WIDTHS, 1, True)])
        self.down[0].downsample = Downsample(WIDTHS[0])
        self.mid = middle(WIDTHS[1])
        self.norm_out, self.conv_out = normalize(WIDTHS[1]), nn.Conv2d(WIDTHS[1], LATENT, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv_in(x)
        for i, stage in enumerate(self.down):
            for j, block in enumerate(stage.block):
                h = block(h)
                if len(stage.attn) > 0:
                    h = stage.attn[j](h)
            if i < len(self.down) - 1:
                h = stage.downsample(h)
        h = self.mid.block_2(self.mid.attn_1(self.mid.block_1(h)))
        return self.conv_out(swish(self.norm_out(h)))


class Decoder(nn.Module):
    """The stages are counted from the finest; they run from the last to the first."""

    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(LATENT, WIDTHS[1], 3, padding=1)
        self.mid = middle(WIDTHS[1])
        self.up = nn.ModuleList([level(*WIDTHS[::-1], 2, False), level(WIDTHS[1], WIDTHS[1], 2, True)])
        self.up[1].upsample = Upsample(WIDTHS[1])
        self.norm_out, self.conv_out = normalize(WIDTHS[0]), nn.Conv2d(WIDTHS[0], 3, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.mid.attn_1(self.mid.block_1(self.conv_in(z)))
        h = self.mid.block_2(h)
        for i in reversed(range(len(self.up))):
            for j, block in enumerate(self.up[i].block):
                h = block(h)
                if len(self.up[i].attn) > 0:
                    h = self.up[i].attn[j](h)
            if i > 0:
                h = self.up[i].upsample(h)
        return self.conv_out(swish(self.norm_out(h)))


class VectorQuantizer(nn.Module):
    """The nearest code of each pixel; beta weighs the commitment alone, as in the mended version."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(CODES, CODE)

    def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
        z = z.permute(0, 2, 3, 1).contiguous()
        flat, codes = z.view(-1, CODE), self.embedding.weight
        squares = flat.square().sum(1, keepdim=True) + codes.square().sum(1)
        nearest = (squares - 2 * flat @ codes.t()).argmin(1)
        z_q = self.embedding(nearest).view(z.shape)
        loss = BETA * (z_q.detach() - z).square().mean() + (z_q - z.detach()).square().mean()
        return (z + (z_q - z).detach()).permute(0, 3, 1, 2).contiguous(), loss


class NLayerDiscriminator(nn.Module):
    """One logit for each patch of the image."""

    def __init__(self, width: int = 4):
        super().__init__()
        layers = [nn.Conv2d(3, width, 4, 2, 1), nn.LeakyReLU(SLOPE)]
        for scale, stride in ((1, 2), (2, 1)):
            inputs, outputs = scale * width, 2 * scale * width
            layers += [nn.Conv2d(inputs, outputs, 4, stride, 1), nn.BatchNorm2d(outputs), nn.LeakyReLU(SLOPE)]
        self.main = nn.Sequential(*layers, nn.Conv2d(4 * width, 1, 4, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.main(x)


class VQGAN(nn.Module):
    """Images [N, 3, H, W] -> the images again, the codebook's loss, and the logits of their patches."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder, self.quantize = Encoder(), Decoder(), VectorQuantizer()
        self.quant_conv, self.post_quant_conv = nn.Conv2d(LATENT, CODE, 1), nn.Conv2d(CODE, LATENT, 1)
        self.discriminator = NLayerDiscriminator()
        self.apply(varied)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        quant, codebook_loss = self.quantize(self.quant_conv(self.encoder(x)))
        xrec = self.decoder(self.post_quant_conv(quant))
        logits = [self.discriminator(image) for image in (xrec, x.detach(), xrec.detach())]
        return dict(zip(OUTPUTS, (xrec, codebook_loss, *logits), strict=True))


def images() -> tuple[Tensor, Tensor]:
    """Smooth fields of colour with a little grain."""
    field = F.interpolate(torch.randn(2, 3, 4, 5), SHAPE, mode="bilinear", align_corners=True)
    x = (field + 0.2 * torch.randn(2, 3, *SHAPE)).tanh()
    return x, x.clone()


def both_sides(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The generator's part (error, codebook, its logits) and the discriminator's by hinges, in one."""
    generator = (outputs["reconstruction"] - target).abs().mean() + 0.5 * outputs["codebook_loss"]
    generator = generator - 0.2 * outputs["logits_generated"].mean()
    hinges = F.relu(1 - outputs["logits_real"]).mean() + F.relu(1 + outputs["logits_fake"]).mean()
    return 0.2 * (generator + 0.3 * hinges)
