"""A generator of layers scaled by a style: weights of equal rates, demodulated; pictures summed by size."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, CHANNELS = 8, 6


class Equal(nn.Module):
    """A linear layer with weights of unit size, which are scaled as it runs."""

    def __init__(self, before: int, after: int, start: float = 0.0):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(after, before))
        self.bias, self.scale = nn.Parameter(torch.full((after,), start)), before**-0.5

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.scale, self.bias)


class Mapping(nn.Module):
    """Noise [N, 8] -> styles [N, 8]; in eval mode nearer to the mean of those before."""

    def __init__(self, rate: float = 0.1, keep: float = 0.7):
        super().__init__()
        self.layers = nn.ModuleList(Equal(WIDTH, WIDTH) for _ in range(3))
        self.rate, self.keep = rate, keep
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, z: Tensor) -> Tensor:
        z = z * (z.square().mean(1, keepdim=True) + 1e-8).rsqrt()
        for layer in self.layers:
            z = F.leaky_relu(layer(z), 0.2) * 2**0.5
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(z.mean(0), self.rate)
            return z
        return self.mean + self.keep * (z - self.mean)


class Modulated(nn.Module):
    """A convolution whose weights are scaled by a style for each picture."""

    def __init__(self, before: int, after: int, size: int, demodulate: bool = True):
        super().__init__()
        self.demodulate, self.edge = demodulate, size // 2
        self.style = Equal(WIDTH, before, start=1.0)
        self.weight = nn.Parameter(torch.randn(after, before, size, size))
        self.scale = (before * size**2) ** -0.5

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        weight = self.scale * self.weight * self.style(w)[:, None, :, None, None]
        if self.demodulate:
            weight = weight * (weight.square().sum((2, 3, 4), keepdim=True) + 1e-8).rsqrt()
        y = F.conv2d(x.flatten(0, 1)[None], weight.flatten(0, 1), padding=self.edge, groups=len(x))
        return y[0].unflatten(0, (len(x), -1))


class Layer(nn.Module):
    """A convolution, fixed noise, an activation."""

    def __init__(self, size: int):
        super().__init__()
        self.conv = Modulated(CHANNELS, CHANNELS, 3)
        self.register_buffer("noise", torch.randn(size, size))
        self.strength, self.bias = nn.Parameter(torch.tensor(0.3)), nn.Parameter(0.1 * torch.randn(CHANNELS))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        x = self.conv(x, w) + self.strength * self.noise + self.bias[:, None, None]
        return F.leaky_relu(x, 0.2) * 2**0.5


class Colours(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.bias = Modulated(CHANNELS, 3, 1, demodulate=False), nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return self.conv(x, w) + self.bias[:, None, None]


class Enlarge(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False)


class Styles(nn.Module):
    """Noise [N, 8] -> pictures [N, 3, 8, 8]."""

    def __init__(self):
        super().__init__()
        self.mapping, self.enlarge = Mapping(), Enlarge()
        self.first = nn.Parameter(torch.randn(CHANNELS, 4, 4))
        self.layers = nn.ModuleList([Layer(4), Layer(8), Layer(8)])
        self.colours = nn.ModuleList([Colours(), Colours()])

    def forward(self, z: Tensor) -> Tensor:
        w = self.mapping(z)
        x = self.layers[0](self.first.expand(len(z), -1, -1, -1), w)
        picture = self.colours[0](x, w)
        x = self.layers[2](self.layers[1](self.enlarge(x), w), w)
        return self.enlarge(picture) + self.colours[1](x, w)


def discs() -> tuple[Tensor, Tensor]:
    """Noise, and a coloured disc whose place and size it says."""
    z = torch.randn(8, WIDTH)
    steps = torch.arange(8) - 3.5
    down, across = steps[:, None] - z[:, :1, None], steps - z[:, 1:2, None]
    inside = torch.sigmoid(2 + z[:, 2, None, None] - (down**2 + across**2).sqrt())
    return z, inside[:, None] * z[:, 3:6, None, None].tanh()
