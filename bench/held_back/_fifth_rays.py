"""A field of density and color along rays, whose high frequencies open while it learns."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import parts
from bench.tasks import _task


class Encode(nn.Module):
    """[..., 3] -> [..., 3 + 6 L]: sines and cosines by frequency; the k-th opens in its own four updates."""

    def __init__(self, count: int):
        super().__init__()
        self.register_buffer("bands", math.pi * 2.0 ** torch.arange(count))
        self.register_buffer("progress", torch.zeros(()))

    def opened(self) -> Tensor:
        alpha = self.progress / 4 + 1
        return (1 - (math.pi * (alpha - torch.arange(len(self.bands))).clamp(0, 1)).cos()) / 2

    def forward(self, x: Tensor) -> Tensor:
        angles = x[..., None, :] * self.bands[:, None]
        waves = torch.stack([angles.sin(), angles.cos()], -2) * self.opened()[:, None, None]
        if self.training:
            self.progress += 1
        return torch.cat([x, waves.flatten(-3)], -1)


class Density(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(x - 1)


class Trunk(nn.Module):
    """Layers that see the encoded place again before the third."""

    def __init__(self, inside: int, width: int):
        super().__init__()
        sizes = inside, width, width + inside, width
        self.layers = nn.ModuleList(nn.Linear(size, width) for size in sizes)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for index, layer in enumerate(self.layers):
            h = layer(torch.cat([x, h], -1) if index == 2 else h).relu()
        return h


class Render(nn.Module):
    """Densities and colors of the samples on a ray -> its color before white, and its depth."""

    def forward(self, density: Tensor, color: Tensor, depths: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.cat([depths.diff(), depths.new_full((1,), 1e10)])
        passed = (-density * steps).exp()
        before = torch.cat([torch.ones_like(passed[:, :1]), passed[:, :-1]], 1).cumprod(1)
        weights = before * (1 - passed)
        missed = 1 - weights[:, :-1].sum(1, keepdim=True)
        shown = (weights[:, :-1, None] * color[:, :-1]).sum(1) + missed
        return shown, (weights * depths).sum(1)


class Field(nn.Module):
    """Origins and directions [N, 3] -> colors [N, 3] and depths [N]."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.register_buffer("depths", torch.linspace(0.2, 2.0, 10))
        self.encode, self.view = Encode(4), nn.Linear(3, 8)
        self.trunk = Trunk(27, width)
        self.to_density, self.density = nn.Linear(width, 1), Density()
        self.color = nn.Sequential(nn.Linear(width + 8, 16), nn.ReLU(), nn.Linear(16, 3), nn.Sigmoid())
        self.render = Render()

    def forward(self, origins: Tensor, directions: Tensor) -> tuple[Tensor, Tensor]:
        directions = F.normalize(directions, dim=1)
        h = self.trunk(self.encode(origins[:, None] + directions[:, None] * self.depths[:, None]))
        seen = self.view(directions)[:, None].expand(-1, h.shape[1], -1)
        density = self.density(self.to_density(h)).squeeze(2)
        return self.render(density, self.color(torch.cat([h, seen], 2)), self.depths)


def _rays() -> tuple[dict[str, Tensor], Tensor]:
    origins, directions = 0.3 * torch.randn(24, 3), torch.randn(24, 3)
    return {"origins": origins, "directions": directions}, 0.5 + 0.4 * torch.sin(3 * origins + directions)


def _seen(outputs: tuple | dict, targets: Tensor) -> Tensor:
    color, depth = parts(outputs)
    return F.mse_loss(color, targets) + 0.05 * (depth - 1).square().mean()


rays = _task("fifth_rays", Field, _rays, _seen)
