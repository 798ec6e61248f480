"""A small WGAN-GP: a generator by class, a critic of residual blocks, and both costs in one."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, PICTURES = 3, 16, 12, 4
NOISE, EMBED, CLASSES, LAMBDA, DRIFT = 10, 6, 5, 10.0, 0.02


class ConditionalBatchNorm2d(nn.Module):
    """A batch norm whose scale and offset are looked up by class."""

    def __init__(self, width: int):
        super().__init__()
        self.bn = nn.BatchNorm2d(width, affine=False)
        self.embed = nn.Embedding(CLASSES, 2 * width)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gamma, beta = self.embed(y)[:, :, None, None].chunk(2, 1)
        return gamma * self.bn(x) + beta


class UpBlock(nn.Module):
    def __init__(self, width: int, out: int, size: int | tuple = 4, stride: int = 2, padding: int = 1):
        super().__init__()
        self.deconv = nn.ConvTranspose2d(width, out, size, stride, padding, bias=False)
        self.norm = ConditionalBatchNorm2d(out)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.relu(self.norm(self.deconv(x), y))


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, EMBED)
        stem = UpBlock(NOISE + EMBED, 20, (HIGH // 4, WIDE // 4), 1, 0)
        self.blocks = nn.ModuleList([stem, UpBlock(20, 14)])
        self.to_rgb = nn.ConvTranspose2d(14, CHANNELS, 4, 2, 1)

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        x = torch.cat([z, self.embed(y)], 1)[:, :, None, None]
        for block in self.blocks:
            x = block(x, y)
        return torch.tanh(self.to_rgb(x))


class ResidualBlock(nn.Module):
    """Norm, activation and convolution twice, beside a convolution of one pixel; both pooled."""

    def __init__(self, width: int, out: int):
        super().__init__()
        self.norm1 = nn.GroupNorm(1, width)
        self.conv1 = nn.Conv2d(width, out, 3, padding=1)
        self.norm2 = nn.GroupNorm(1, out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1)
        self.shortcut = nn.Conv2d(width, out, 1)
        self.pool = nn.AvgPool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.leaky_relu(self.norm1(x), 0.2))
        h = self.conv2(F.leaky_relu(self.norm2(h), 0.2))
        return self.pool(h) + self.shortcut(self.pool(x))


class Critic(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv_in = nn.Conv2d(CHANNELS, 12, 3, padding=1)
        self.blocks = nn.ModuleList([ResidualBlock(12, 18), ResidualBlock(18, 22)])
        self.linear = nn.Linear(22, 1)
        self.embed = nn.Embedding(CLASSES, 22)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.conv_in(x)
        for block in self.blocks:
            x = block(x)
        h = F.leaky_relu(x, 0.2).mean((2, 3))
        return self.linear(h).squeeze(1) + (self.embed(y) * h).sum(1)


class GradientPenalty(nn.Module):
    """How far the norm of the critic's slope between real and made pictures is from one."""

    def forward(self, critic: nn.Module, real: Tensor, fake: Tensor, y: Tensor, epsilon: Tensor) -> Tensor:
        epsilon = epsilon[:, None, None, None]
        mixed = (epsilon * real + (1 - epsilon) * fake).detach()
        with torch.enable_grad():
            mixed.requires_grad_(True)
            scores = critic(mixed, y)
            (slope,) = torch.autograd.grad(scores, mixed, torch.ones_like(scores), create_graph=True)
            return (slope.flatten(1).norm(2, 1) - 1).square().mean()


class WGANGP(nn.Module):
    """The made pictures, the scores (real, made, made anew), the penalty and the joint cost."""

    def __init__(self):
        super().__init__()
        self.generator, self.critic, self.penalty = Generator(), Critic(), GradientPenalty()
        for name, weight in self.named_parameters():
            level = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            spread = 0.25 if weight.ndim < 3 else weight[0].numel() ** -0.5
            nn.init.normal_(weight, level, spread)
            if "norm.embed" in name:
                weight.data[:, weight.shape[1] // 2 :] -= 1

    def forward(self, real: Tensor, y: Tensor, z: Tensor, anew: Tensor, epsilon: Tensor) -> tuple:
        fake = self.generator(z, y).detach()
        on_real, on_fake = self.critic(real, y), self.critic(fake, y)
        penalty = self.penalty(self.critic, real, fake, y, epsilon)
        critic = on_fake.mean() - on_real.mean() + LAMBDA * penalty + DRIFT * on_real.square().mean()
        second = self.generator(anew, y)
        self.critic.requires_grad_(False)
        on_second = self.critic(second, y)
        self.critic.requires_grad_(True)
        scores = torch.stack([on_real, on_fake, on_second])
        return fake, second, scores, penalty, critic - on_second.mean()


def gratings() -> tuple[dict[str, Tensor], Tensor]:
    """Waves whose direction is that of their class, and all that is drawn for a step."""
    y = torch.randint(CLASSES, (PICTURES,))
    angle, phase = y * 0.6 + 0.2, 6 * torch.rand(PICTURES, CHANNELS, 1, 1)
    down, across = torch.arange(HIGH)[:, None], torch.arange(WIDE)
    wave = angle.cos()[:, None, None] * down + angle.sin()[:, None, None] * across
    real = 0.8 * torch.sin(0.9 * wave[:, None] + phase) + 0.1 * torch.randn(PICTURES, CHANNELS, HIGH, WIDE)
    noise = {"z": torch.randn(PICTURES, NOISE), "anew": torch.randn(PICTURES, NOISE)}
    return {"real": real, "y": y, **noise, "epsilon": torch.rand(PICTURES)}, y


def joint(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """A part of the joint cost, that plain descent may take long steps."""
    return outputs[-1] / 150
