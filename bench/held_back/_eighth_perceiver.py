"""A small perceiver: latents read a set of measured points in two rounds, and answer at any other points."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, LATENTS, LAYERS, ROUNDS = 8, 2, 5, 2, 2
FIELDS, BANDS, HIGHEST, KINDS, ASKED = 2, 3, 4.0, 3, 5
PLACED = 2 * (2 * BANDS + 1)


class Whiten(nn.Module):
    """Values of the real points by their mean and spread: the batch's in training, kept ones afterwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(FIELDS))
        self.register_buffer("var", torch.ones(FIELDS))

    def forward(self, values: Tensor, real: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            mean, var = values[real].mean(0), values[real].var(0, correction=0)
            with torch.no_grad():
                self.mean.lerp_(mean, 0.1)
                self.var.lerp_(var, 0.1)
        return (values - mean) / (var + 1e-5).sqrt()


class Fourier(nn.Module):
    """Places [..., 2] -> their sines, cosines and themselves; frequencies in equal steps."""

    def forward(self, places: Tensor) -> Tensor:
        rates = torch.pi * torch.linspace(1, HIGHEST, BANDS).to(places)
        angles = (places[..., None] * rates).flatten(-2)
        return torch.cat([angles.sin(), angles.cos(), places], -1)


class Attention(nn.Module):
    def __init__(self, of: int = WIDTH):
        super().__init__()
        self.q = nn.Linear(WIDTH, WIDTH, bias=False)
        self.k, self.v = (nn.Linear(of, WIDTH, bias=False) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, of: Tensor, real: Tensor | None = None) -> Tensor:
        q, k, v = (
            f(y).unflatten(2, (HEADS, -1)).transpose(1, 2)
            for f, y in ((self.q, x), (self.k, of), (self.v, of))
        )
        scores = q @ k.transpose(2, 3) / (WIDTH // HEADS) ** 0.5
        if real is not None:
            scores = scores.masked_fill(~real[:, None, None], -torch.inf)
        return self.out((scores.softmax(3) @ v).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Read(nn.Module):
    """Latents look at the points."""

    def __init__(self):
        super().__init__()
        self.norm_latents, self.norm_points = nn.LayerNorm(WIDTH), nn.LayerNorm(FIELDS + PLACED)
        self.attention = Attention(FIELDS + PLACED)
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP()

    def forward(self, latents: Tensor, points: Tensor, real: Tensor) -> Tensor:
        latents = latents + self.attention(self.norm_latents(latents), self.norm_points(points), real)
        return latents + self.mlp(self.norm(latents))


class Think(nn.Module):
    """Latents look at each other."""

    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.mlp = Attention(), MLP()

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attention(normed, normed)
        return x + self.mlp(self.norm2(x))


class Answer(nn.Module):
    """Queries look at the latents; what they find takes their place."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(PLACED, WIDTH)
        self.norm_queries, self.norm_latents = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention()
        self.norm, self.mlp, self.head = nn.LayerNorm(WIDTH), MLP(), nn.Linear(WIDTH, FIELDS)

    def forward(self, queries: Tensor, latents: Tensor) -> Tensor:
        x = self.attention(self.norm_queries(self.lift(queries)), self.norm_latents(latents))
        return self.head(x + self.mlp(self.norm(x)))


class Probe(nn.Module):
    """The kind of field from the latents' mean; it only looks on."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(WIDTH, KINDS)

    def forward(self, latents: Tensor) -> Tensor:
        return self.fc(latents.detach().mean(1))


class Perceiver(nn.Module):
    """Values and places [N, T, 2], how many are real, places asked [N, Q, 2] -> values there, and kinds."""

    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(LATENTS, WIDTH))
        self.whiten, self.fourier = Whiten(), Fourier()
        self.read, self.layers = Read(), nn.ModuleList(Think() for _ in range(LAYERS))
        self.answer, self.probe = Answer(), Probe()

    def forward(
        self, values: Tensor, places: Tensor, lengths: Tensor, asked: Tensor
    ) -> tuple[Tensor, Tensor]:
        real = torch.arange(values.shape[1], device=values.device) < lengths[:, None]
        points = torch.cat([self.whiten(values, real), self.fourier(places)], 2)
        latents = self.latents.expand(len(values), -1, -1)
        for _ in range(ROUNDS):
            latents = self.read(latents, points, real)
            for layer in self.layers:
                latents = layer(latents)
        return self.answer(self.fourier(asked), latents), self.probe(latents)


def fields() -> tuple[dict[str, Tensor], Tensor]:
    """Waves along x, along y or both, and their slopes; the target is the values asked for and the kind."""
    kinds, lengths = torch.randint(KINDS, (12,)), torch.randint(4, 10, (12,))
    ways = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])[kinds]
    places, phase = 2 * torch.rand(12, 9 + ASKED, 2) - 1, torch.rand(12, 1)
    angles = 2 * (places @ ways[..., None]).squeeze(2) + phase
    values = torch.stack([1.5 * angles.sin() + 0.4, 0.8 * angles.cos() - 0.3], 2)
    real = (torch.arange(9) < lengths[:, None])[..., None]
    given = {"values": values[:, :9] * real, "places": places[:, :9] * real}
    given |= {"lengths": lengths, "asked": places[:, 9:]}
    return given, torch.cat([values[:, 9:].flatten(1), kinds[:, None]], 1)


def missed(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    values, kinds = outputs
    error = F.mse_loss(values.flatten(1), target[:, :-1].to(values))
    return error + 0.1 * F.cross_entropy(kinds, target[:, -1].long())
