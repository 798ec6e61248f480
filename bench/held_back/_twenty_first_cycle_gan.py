"""A small CycleGAN: generators between two kinds of pictures, critics of patches, one sum of losses."""

import math
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

COLOURS, HIGH, WIDE, PICTURES = 2, 16, 12, 2
FILTERS, CRITIC_FILTERS, BLOCKS, SLOPE = 6, 3, 2, 0.2
LAMBDA, LAMBDA_IDENTITY, SCALE = 10.0, 0.5, 0.1
norm_layer = partial(nn.InstanceNorm2d, affine=True)


class ResnetBlock(nn.Module):
    def __init__(self, dim: int):
        super().__init__()
        half = [nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3, bias=False), norm_layer(dim), nn.ReLU(True)]
        again = [nn.ReflectionPad2d(1), nn.Conv2d(dim, dim, 3, bias=False), norm_layer(dim)]
        self.conv_block = nn.Sequential(*half, *again)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv_block(x)


class ResnetGenerator(nn.Module):
    def __init__(self, nc: int = COLOURS, ngf: int = FILTERS):
        super().__init__()
        wide = 2 * ngf
        self.model = nn.Sequential(
            *(nn.ReflectionPad2d(3), nn.Conv2d(nc, ngf, 7, bias=False), norm_layer(ngf), nn.ReLU(True)),
            *(nn.Conv2d(ngf, wide, 3, 2, 1, bias=False), norm_layer(wide), nn.ReLU(True)),
            *(ResnetBlock(wide) for _ in range(BLOCKS)),
            nn.ConvTranspose2d(wide, ngf, 3, stride=2, padding=1, output_padding=1, bias=False),
            *(norm_layer(ngf), nn.ReLU(True)),
            *(nn.ReflectionPad2d(3), nn.Conv2d(ngf, nc, 7), nn.Tanh()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


class NLayerDiscriminator(nn.Module):
    def __init__(self, nc: int = COLOURS, ndf: int = CRITIC_FILTERS):
        super().__init__()
        self.model = nn.Sequential(
            *(nn.Conv2d(nc, ndf, 4, 2, 1), nn.LeakyReLU(SLOPE, True)),
            *(nn.Conv2d(ndf, 2 * ndf, 4, 2, 1, bias=False), norm_layer(2 * ndf), nn.LeakyReLU(SLOPE, True)),
            *(nn.Conv2d(2 * ndf, 4 * ndf, 4, 1, 1, bias=False), norm_layer(4 * ndf)),
            *(nn.LeakyReLU(SLOPE, True), nn.Conv2d(4 * ndf, 1, 4, 1, 1)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


def set_requires_grad(nets: list[nn.Module], requires_grad: bool) -> None:
    for net in nets:
        net.requires_grad_(requires_grad)


class CycleGANModel(nn.Module):
    """Pictures of both kinds -> their translations, there and back, identities and what the critics say."""

    def __init__(self):
        super().__init__()
        self.netG_A, self.netG_B = ResnetGenerator(), ResnetGenerator()
        self.netD_A, self.netD_B = NLayerDiscriminator(), NLayerDiscriminator()
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
                nn.init.xavier_normal_(module.weight)
            elif isinstance(module, nn.InstanceNorm2d):
                nn.init.uniform_(module.weight, 0.6, 1.4)
            if getattr(module, "bias", None) is not None:
                nn.init.normal_(module.bias, std=0.2)

    def forward(self, real_a: Tensor, real_b: Tensor) -> dict[str, Tensor]:
        fake_b = self.netG_A(real_a)
        rec_a = self.netG_B(fake_b)
        fake_a = self.netG_B(real_b)
        rec_b = self.netG_A(fake_a)
        outputs = {"fake_B": fake_b, "rec_A": rec_a, "fake_A": fake_a, "rec_B": rec_b}
        outputs |= {"idt_A": self.netG_A(real_b), "idt_B": self.netG_B(real_a)}
        set_requires_grad([self.netD_A, self.netD_B], False)
        outputs |= {"gan_A": self.netD_A(fake_b), "gan_B": self.netD_B(fake_a)}
        set_requires_grad([self.netD_A, self.netD_B], True)
        outputs |= {"real_A": self.netD_A(real_b), "false_A": self.netD_A(fake_b.detach())}
        return outputs | {"real_B": self.netD_B(real_a), "false_B": self.netD_B(fake_a.detach())}


def drawn(upright: bool) -> Tensor:
    """Steep waves in one palette, or flat ones in another, with a bright disc somewhere."""
    turn = 0.5 * torch.randn(PICTURES, 1, 1) + (0 if upright else math.pi / 2)
    down, across = torch.arange(HIGH).to(turn)[:, None], torch.arange(WIDE).to(turn)
    waves = torch.sin(0.9 * (turn.cos() * across + turn.sin() * down) + 6 * torch.rand(PICTURES, 1, 1))
    y, x = HIGH * torch.rand(PICTURES, 1, 1), WIDE * torch.rand(PICTURES, 1, 1)
    disc = torch.exp(-((down - y) ** 2 + (across - x) ** 2) / 12)
    colours = [0.7 * waves, disc - 0.3 * waves] if upright else [0.4 - disc, 0.6 * waves.abs() + 0.3 * disc]
    return (torch.stack(colours, 1) + 0.1 * torch.randn(PICTURES, COLOURS, HIGH, WIDE)).clamp(-1, 1)


def unpaired() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    real_a, real_b = drawn(True), drawn(False)
    return {"real_a": real_a, "real_b": real_b}, {"A": real_a, "B": real_b}


def all_losses(outputs: dict[str, Tensor], target: dict[str, Tensor]) -> Tensor:
    """What the generators and the critics minimise, each by its own weights."""
    total = 0
    for own, other in ("AB", "BA"):
        here, there = target[own].to(outputs["gan_A"]), target[other].to(outputs["gan_A"])
        total = total + (outputs[f"gan_{own}"] - 1).square().mean()
        total = total + LAMBDA * F.l1_loss(outputs[f"rec_{own}"], here)
        total = total + LAMBDA * LAMBDA_IDENTITY * F.l1_loss(outputs[f"idt_{own}"], there)
        misses = (outputs[f"real_{own}"] - 1).square().mean() + outputs[f"false_{own}"].square().mean()
        total = total + 0.5 * misses
    return SCALE * total
