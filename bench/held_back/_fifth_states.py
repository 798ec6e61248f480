"""A small net of layers that keep a state or reshape their weights."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class StandardConv(nn.Conv2d):
    """Each filter by its mean and deviation."""

    def filters(self) -> Tensor:
        spread, mean = torch.var_mean(self.weight, (1, 2, 3), correction=0, keepdim=True)
        return (self.weight - mean) / (spread + 1e-5).sqrt() * self.weight[0].numel() ** -0.5

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.filters(), self.bias)


class Renorm(nn.Module):
    """A batch norm held to its running statistics by two factors that carry no gradient."""

    def __init__(self, width: int):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.register_buffer("center", torch.zeros(width))
        self.register_buffer("deviation", torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        shape = (1, -1, 1, 1)
        center, deviation = self.center.view(shape), self.deviation.view(shape)
        if self.training:
            spread, mean = torch.var_mean(x, (0, 2, 3), correction=0, keepdim=True)
            root = (spread + 1e-3).sqrt()
            stretch = (root / deviation).detach().clamp(0.5, 2.0)
            move = ((mean - center) / deviation).detach().clamp(-1.0, 1.0)
            with torch.no_grad():
                self.center.lerp_(mean.flatten(), 0.1)
                self.deviation.lerp_(root.flatten(), 0.1)
            x = (x - mean) / root * stretch + move
        else:
            x = (x - center) / deviation
        return x * self.weight.view(shape) + self.bias.view(shape)


class SpectralConv(nn.Conv2d):
    """The weight by its largest singular value, that one step of power iteration estimates."""

    def __init__(self, *args: object, **keywords: object):
        super().__init__(*args, **keywords)
        self.register_buffer("left", F.normalize(torch.randn(self.out_channels), dim=0))

    def norm(self) -> Tensor:
        matrix = self.weight.flatten(1)
        with torch.no_grad():
            right = F.normalize(matrix.T @ self.left, dim=0)
            left = F.normalize(matrix @ right, dim=0)
            if self.training:
                self.left.copy_(left)
        return left @ matrix @ right

    def forward(self, x: Tensor) -> Tensor:
        return self._conv_forward(x, self.weight / self.norm(), self.bias)


class RoundedLinear(nn.Linear):
    """Each row of the weight in thirty-one levels; the gradient goes straight through."""

    def rounded(self) -> Tensor:
        step = self.weight.detach().abs().amax(1, keepdim=True) / 15
        levels = (self.weight / step).round() * step
        return self.weight + (levels - self.weight).detach()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.rounded(), self.bias)


class Steady(nn.Module):
    """[N, 3, 10, 10] -> logits [N, 5]."""

    def __init__(self):
        super().__init__()
        self.stem, self.norm1 = StandardConv(3, 8, 3, padding=1), Renorm(8)
        self.mixer = SpectralConv(8, 12, 3, stride=2, padding=1)
        self.middle, self.norm2 = StandardConv(12, 12, 3, padding=1), Renorm(12)
        self.last, self.norm3 = StandardConv(12, 12, 3, padding=1), Renorm(12)
        self.hidden, self.head = RoundedLinear(12, 16), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm1(self.stem(x)).relu()
        x = self.norm2(self.middle(self.mixer(x).relu())).relu()
        x = self.norm3(self.last(x)).relu()
        return self.head(self.hidden(x.mean((2, 3))).relu())
