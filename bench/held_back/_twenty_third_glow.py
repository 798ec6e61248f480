"""A small Glow: two levels of flow steps over squeezed pictures, under a prior by class."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, HIGH, WIDE, BINS = 3, 8, 12, 32
HIDDEN, STEPS, LEVELS, CLASSES, PICTURES = 12, 2, 2, 5, 4


def split_feature(tensor: Tensor, kind: str = "split") -> tuple[Tensor, Tensor]:
    """Half the channels and the other half, or every other channel and the rest."""
    return tensor.chunk(2, 1) if kind == "split" else (tensor[:, 0::2], tensor[:, 1::2])


def gaussian_likelihood(mean: Tensor, logs: Tensor, x: Tensor) -> Tensor:
    """The log-likelihood of each picture of the batch."""
    p = -0.5 * (logs * 2.0 + (x - mean) ** 2 / torch.exp(logs * 2.0) + math.log(2 * math.pi))
    return torch.sum(p, dim=[1, 2, 3])


def uniform_binning_correction(x: Tensor, noise: Tensor, n_bins: int) -> tuple[Tensor, Tensor]:
    """Noise within the bin of each value, and what the width of the bins adds to the objective."""
    return x + noise / n_bins, x.new_full(x.shape[:1], -math.log(n_bins) * x[0].numel())


class ActNorm2d(nn.Module):
    def __init__(self, num_features: int):
        super().__init__()
        self.bias = nn.Parameter(0.2 * torch.randn(1, num_features, 1, 1))
        self.logs = nn.Parameter(0.1 + 0.2 * torch.randn(1, num_features, 1, 1))

    def forward(self, x: Tensor, logdet: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        if logdet is not None:
            logdet = logdet + torch.sum(self.logs) * x.shape[2] * x.shape[3]
        return (x + self.bias) * torch.exp(self.logs), logdet


class Conv2d(nn.Module):
    """A convolution without bias, and an ActNorm in the place of it."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int = 3):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, kernel_size, padding=kernel_size // 2, bias=False)
        nn.init.normal_(self.conv.weight, std=0.8 / math.sqrt(in_channels * kernel_size**2))
        self.actnorm = ActNorm2d(out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return self.actnorm(self.conv(x))[0]


class Conv2dZeros(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1)
        nn.init.normal_(self.conv.weight, std=0.04), nn.init.normal_(self.conv.bias, std=0.1)
        self.logscale_factor, self.logs = 3, nn.Parameter(0.1 * torch.randn(out_channels, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) * torch.exp(self.logs * self.logscale_factor)


class LinearZeros(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.linear = nn.Linear(in_channels, out_channels)
        nn.init.normal_(self.linear.weight, std=0.15), nn.init.normal_(self.linear.bias, std=0.1)
        self.logscale_factor, self.logs = 3, nn.Parameter(0.1 * torch.randn(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * torch.exp(self.logs * self.logscale_factor)


class InvertibleConv1x1(nn.Module):
    """A product of channels by a matrix that is kept as its PLU decomposition."""

    def __init__(self, num_channels: int):
        super().__init__()
        p, lower, upper = torch.linalg.lu(torch.linalg.qr(torch.randn(num_channels, num_channels))[0])
        s = upper.diagonal()
        self.register_buffer("p", p), self.register_buffer("sign_s", s.sign())
        self.lower, self.upper = nn.Parameter(lower.tril(-1)), nn.Parameter(upper.triu(1))
        self.log_s = nn.Parameter(s.abs().log() + 0.1 + 0.1 * torch.randn(num_channels))

    def get_weight(self, x: Tensor) -> tuple[Tensor, Tensor]:
        lower = self.lower.tril(-1) + torch.eye(len(self.p)).to(self.lower)
        upper = self.upper.triu(1) + torch.diag(self.sign_s * torch.exp(self.log_s))
        return self.p @ lower @ upper, torch.sum(self.log_s) * x.shape[2] * x.shape[3]

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        weight, dlogdet = self.get_weight(x)
        return F.conv2d(x, weight[:, :, None, None]), logdet + dlogdet


class SqueezeLayer(nn.Module):
    """[N, C, H, W] -> [N, C f f, H / f, W / f]."""

    def __init__(self, factor: int):
        super().__init__()
        self.factor = factor

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        (n, c, h, w), f = x.shape, self.factor
        x = x.view(n, c, h // f, f, w // f, f).permute(0, 1, 3, 5, 2, 4)
        return x.reshape(n, c * f * f, h // f, w // f), logdet


class Split2d(nn.Module):
    """Leaves half the channels, after their likelihood under a prior that reads the other half."""

    def __init__(self, num_channels: int):
        super().__init__()
        self.conv = Conv2dZeros(num_channels // 2, num_channels)

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        z1, z2 = split_feature(x, "split")
        mean, logs = split_feature(self.conv(z1), "cross")
        return z1, gaussian_likelihood(mean, logs, z2) + logdet


class FlowStep(nn.Module):
    def __init__(self, in_channels: int):
        super().__init__()
        self.actnorm, self.invconv = ActNorm2d(in_channels), InvertibleConv1x1(in_channels)
        first, second = Conv2d(in_channels // 2, HIDDEN), Conv2d(HIDDEN, HIDDEN, 1)
        self.block = nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), Conv2dZeros(HIDDEN, in_channels))

    def forward(self, x: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        z, logdet = self.actnorm(x, logdet)
        z, logdet = self.invconv(z, logdet)
        z1, z2 = split_feature(z, "split")
        shift, scale = split_feature(self.block(z1), "cross")
        scale = torch.sigmoid(scale + 2.0)
        z = torch.cat((z1, (z2 + shift) * scale), dim=1)
        return z, torch.sum(torch.log(scale), dim=[1, 2, 3]) + logdet


class FlowNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, width = nn.ModuleList(), CHANNELS
        for level in range(LEVELS):
            width = 4 * width
            self.layers.extend([SqueezeLayer(2), *(FlowStep(width) for _ in range(STEPS))])
            if level < LEVELS - 1:
                self.layers.append(Split2d(width))
                width = width // 2

    def forward(self, z: Tensor, logdet: Tensor) -> tuple[Tensor, Tensor]:
        for layer in self.layers:
            z, logdet = layer(z, logdet)
        return z, logdet


class Glow(nn.Module):
    """Pictures of whole bins, noise and their class -> latents, bits per dimension and class logits."""

    def __init__(self):
        super().__init__()
        self.flow, width = FlowNet(), CHANNELS * 2 ** (LEVELS + 1)
        self.project_ycond = LinearZeros(CLASSES, 2 * width)
        self.project_class = LinearZeros(width, CLASSES)
        shape = 1, 2 * width, HIGH // 2**LEVELS, WIDE // 2**LEVELS
        self.register_buffer("prior_h", 0.2 * torch.randn(shape))

    def prior(self, y_onehot: Tensor) -> tuple[Tensor, Tensor]:
        h = self.prior_h.repeat(len(y_onehot), 1, 1, 1)
        return split_feature(h + self.project_ycond(y_onehot)[:, :, None, None], "split")

    def forward(self, x: Tensor, noise: Tensor, y_onehot: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        dimensions = x[0].numel()
        x, logdet = uniform_binning_correction(x, noise, BINS)
        z, objective = self.flow(x, logdet)
        objective = objective + gaussian_likelihood(*self.prior(y_onehot), z)
        y_logits = self.project_class(z.mean(2).mean(2))
        return z, -objective / (math.log(2.0) * dimensions), y_logits


def waves() -> tuple[dict[str, Tensor], Tensor]:
    """Waves in bins, whose class tells their direction and their colour."""
    label = torch.randint(CLASSES, (PICTURES,))
    turn = (math.pi * label / CLASSES)[:, None, None, None]
    across, down = torch.arange(WIDE) / 2, torch.arange(HIGH)[:, None] / 2
    phase, tone = 6 * torch.rand(PICTURES, 1, 1, 1), 2 * torch.arange(CHANNELS)[:, None, None]
    wave = torch.sin(turn.cos() * across + turn.sin() * down + phase) + torch.cos(2 * turn + tone)
    bright = 0.5 + 0.2 * wave + 0.02 * torch.randn_like(wave)
    x = (bright * BINS).floor().clamp(0, BINS - 1) / BINS - 0.5
    return {"x": x, "noise": torch.rand_like(x), "y_onehot": F.one_hot(label, CLASSES).to(x)}, label


def bits_and_classes(outputs: tuple[Tensor, Tensor, Tensor], label: Tensor) -> Tensor:
    """Bits per dimension and half the cross entropy of the class, by eight."""
    return (outputs[1].mean() + 0.5 * F.cross_entropy(outputs[2], label)) / 8
