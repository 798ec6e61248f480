"""Two models of a density: coupling layers with their determinant, and an autoencoder given its noise."""

import torch
from torch import Tensor, nn

WIDTH, HALF = 6, 3


class Scale(nn.Module):
    """Each feature stretched and moved, and the logarithm of the determinant of that."""

    def __init__(self):
        super().__init__()
        self.logs, self.shift = nn.Parameter(0.1 * torch.randn(WIDTH)), nn.Parameter(0.1 * torch.randn(WIDTH))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x * self.logs.exp() + self.shift, self.logs.sum()


class Mix(nn.Module):
    """A square matrix that starts as a rotation."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x @ self.weight.T, torch.linalg.slogdet(self.weight)[1]


class Coupling(nn.Module):
    """The second half stretched and moved as the first half says."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(HALF, 16), nn.Tanh(), nn.Linear(16, 2 * (WIDTH - HALF)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, moved = x[:, :HALF], x[:, HALF:]
        logs, shift = self.net(kept).chunk(2, 1)
        logs = 1.5 * torch.tanh(logs / 1.5)
        return torch.cat([kept, moved * logs.exp() + shift], 1), logs.sum(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.mix, self.coupling = Scale(), Mix(), Coupling()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        spread = 0.0
        for part in (self.scale, self.mix, self.coupling):
            x, more = part(x)
            spread = spread + more
        return x, spread


class Flow(nn.Module):
    """[N, 6] -> the point in the latent space and the logarithm of the determinant, in a dict."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        total = x.new_zeros(len(x))
        for block in self.blocks:
            x, spread = block(x)
            total = total + spread
        return {"z": x, "spread": total}


class Sample(nn.Module):
    def forward(self, mean: Tensor, logs: Tensor, noise: Tensor) -> Tensor:
        return mean + torch.exp(0.5 * logs) * noise


class Divergence(nn.Module):
    """How far the codes are from the prior; an axis counts as no nearer than the floor."""

    floor = 0.05

    def forward(self, mean: Tensor, logs: Tensor) -> Tensor:
        each = -0.5 * (1 + logs - mean.square() - logs.exp())
        return each.mean(0).clamp(min=self.floor).sum()


class Warm(nn.Module):
    """A term that grows to its full weight in the first twelve steps."""

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x: Tensor) -> Tensor:
        rate = ((self.count + 1) / 12).clamp(max=1.0)
        if self.training:
            self.count += 1
        return rate.to(x) * x


class NoisyAutoencoder(nn.Module):
    """x [N, 16] and noise [N, 4] -> the picture and the divergence, in a dict."""

    def __init__(self):
        super().__init__()
        first = [nn.Linear(16, 24), nn.LayerNorm(24, eps=1e-3), nn.GELU(), nn.Linear(24, 24), nn.GELU()]
        self.encoder = nn.Sequential(*first)
        self.mean, self.spread = nn.Linear(24, 4), nn.Linear(24, 4)
        self.sample, self.divergence, self.warm = Sample(), Divergence(), Warm()
        last = [nn.Linear(4, 24), nn.LayerNorm(24, eps=1e-3), nn.GELU(), nn.Linear(24, 24), nn.GELU()]
        self.decoder = nn.Sequential(*last, nn.Linear(24, 16))

    def forward(self, x: Tensor, noise: Tensor) -> dict[str, Tensor]:
        h = self.encoder(x)
        mean, logs = self.mean(h), self.spread(h)
        made = self.decoder(self.sample(mean, logs, noise))
        return {"picture": made, "divergence": self.warm(self.divergence(mean, logs))}
