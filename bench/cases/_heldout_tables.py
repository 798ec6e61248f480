"""Networks for tables and vectors: a recommender, routed experts, a flow, a regression, a codebook."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.tasks import _classes, _task


class Recommender(nn.Module):
    """Users, and bags of items in one vector with their offsets -> scores [N]."""

    def __init__(self):
        super().__init__()
        self.user = nn.Embedding(13, 8)
        self.country = nn.Embedding(5, 8)
        self.items = nn.EmbeddingBag(31, 8, mode="mean")
        self.cross = nn.Bilinear(8, 8, 6)
        self.out = nn.Linear(6, 1)

    def forward(self, user: Tensor, country: Tensor, items: Tensor, offsets: Tensor) -> Tensor:
        who = self.user(user) + self.country(country)
        return self.out(torch.tanh(self.cross(who, self.items(items, offsets)))).squeeze(1)


class Expert(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.up(x)))


class Experts(nn.Module):
    """Each row goes through the two experts that the router scores highest."""

    def __init__(self, width: int, count: int):
        super().__init__()
        self.router = nn.Linear(width, count, bias=False)
        self.experts = nn.ModuleList(Expert(width) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        scores, chosen = self.router(x).topk(2, dim=1)
        weights = scores.softmax(1)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slot = torch.where(chosen == index)
            y = y.index_add(0, rows, weights[rows, slot, None] * expert(x[rows]))
        return y


class MoE(nn.Module):
    """[N, 10] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(10, 12)
        self.moe = Experts(12, 4)
        self.norm = nn.LayerNorm(12)
        self.fc = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        return self.fc(self.norm(x + self.moe(x)))


class Coupling(nn.Module):
    """An invertible linear mix; then a small network that sees one half scales and shifts the other."""

    def __init__(self, width: int):
        super().__init__()
        self.mix = nn.Parameter(torch.linalg.qr(torch.randn(width, width))[0].contiguous())
        self.net = nn.Sequential(nn.Linear(width // 2, 16), nn.Tanh(), nn.Linear(16, width))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x @ self.mix.T
        kept, moved = x.chunk(2, 1)
        scale, shift = self.net(kept).chunk(2, 1)
        scale = torch.tanh(scale)
        volume = scale.sum(1) + torch.linalg.slogdet(self.mix).logabsdet
        return torch.cat([kept, moved * scale.exp() + shift], 1), volume


class Flow(nn.Module):
    """[N, 6] -> (latent [N, 6], log of the change of volume [N])."""

    def __init__(self):
        super().__init__()
        self.steps = nn.ModuleList(Coupling(6) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = x.new_zeros(len(x))
        for step in self.steps:
            x, volume = step(x)
            total = total + volume
        return x, total


class Regression(nn.Module):
    """[N, 9] in raw units -> (mean [N, 2], log of the variance [N, 2]); the inputs are standardised first."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", 3 * torch.randn(9))
        self.register_buffer("spread", 0.5 + 2 * torch.rand(9))
        self.fc1 = nn.Linear(9, 20)
        self.act1 = nn.PReLU()
        self.fc2 = nn.Linear(20, 20)
        self.act2 = nn.PReLU()
        self.mean = nn.Linear(20, 2)
        self.log_variance = nn.Linear(20, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = (x - self.center) / self.spread
        x = self.act2(self.fc2(self.act1(self.fc1(x))))
        return self.mean(x), self.log_variance(x)


class Codebook(nn.Module):
    """[N, 10] -> its reconstruction from the nearest of eight codes; the gradient passes straight through."""

    def __init__(self):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(10, 16), nn.Tanh(), nn.Linear(16, 6))
        self.codes = nn.Embedding(8, 6)
        self.decode = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 10))

    def nearest(self, z: Tensor) -> Tensor:
        return torch.cdist(z, self.codes.weight).argmin(1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        z = self.encode(x)
        code = self.codes(self.nearest(z))
        penalty = F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())
        return {"image": self.decode(z + (code - z).detach()), "penalty": penalty}


def _baskets() -> tuple[dict, Tensor]:
    counts = torch.randint(1, 6, (10,))
    return {
        "user": torch.randint(13, (10,)),
        "country": torch.randint(5, (10,)),
        "items": torch.randint(31, (int(counts.sum()),)),
        "offsets": counts.cumsum(0) - counts,
    }, torch.randint(2, (10,)).float()


def _clicks_loss(scores: Tensor, clicks: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(scores, clicks.to(scores.dtype))


def _likelihood(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    latent, volume = outputs
    return (0.5 * latent.square().sum(1) - volume).mean() / latent.shape[1]


def _gaussian(outputs: tuple[Tensor, Tensor], targets: Tensor) -> Tensor:
    mean, log_variance = outputs
    return (log_variance + (targets.to(mean.dtype) - mean).square() * (-log_variance).exp()).mean() / 2


def _coded(outputs: dict[str, Tensor], targets: Tensor) -> Tensor:
    return F.mse_loss(outputs["image"], targets.to(outputs["image"].dtype)) + outputs["penalty"]


def _measured() -> tuple[Tensor, Tensor]:
    x = 3 * torch.randn(16, 9)
    return x, 0.3 * x[:, :2] + torch.randn(16, 2)


def _image() -> tuple[Tensor, Tensor]:
    x = torch.randn(16, 10)
    return x, x


recommender = _task("recommender", Recommender, _baskets, _clicks_loss)
moe = _task("moe", MoE, lambda: (torch.randn(24, 10), _classes(24, 5)))
flow = _task("flow", Flow, lambda: (torch.randn(16, 6).cumsum(1) / 2, torch.zeros(16)), _likelihood)
regression = _task("regression", Regression, _measured, _gaussian)
codebook = _task("codebook", Codebook, _image, _coded)
