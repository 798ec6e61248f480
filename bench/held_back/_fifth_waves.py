"""A WaveNet, and N-BEATS: a forecast by blocks that each explain a part of the past."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fifth_ports import tokens
from bench.tasks import _task


class Gate(nn.Module):
    """A dilated convolution of the past, a gate, and two ways out: on, and to the sum of all layers."""

    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.dilated = nn.Conv1d(width, 2 * width, 2, dilation=dilation)
        self.on, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        value, gate = self.dilated(F.pad(x, (self.dilated.dilation[0], 0))).chunk(2, 1)
        y = value.tanh() * gate.sigmoid()
        return x + self.on(y), self.skip(y)


class Wave(nn.Module):
    """Samples [N, T] of 16 kinds -> logits [N, 16, T] of the next."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Embedding(16, 12)
        self.layers = nn.ModuleList(Gate(12, dilation) for dilation in (1, 2, 4, 8, 1))
        self.join, self.leave = nn.Conv1d(12, 12, 1), nn.Conv1d(12, 16, 1)

    def forward(self, samples: Tensor) -> Tensor:
        x, total = self.enter(samples).mT, 0.0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.leave(self.join(total.relu()).relu())


class Grid(nn.Module):
    """What coefficients make of the past and the future: powers of time, waves, or free weights."""

    def __init__(self, kind: str, past: int, future: int):
        super().__init__()
        self.kind, self.past, self.future = kind, past, future

    def rows(self, length: int, like: Tensor) -> Tensor:
        time = torch.arange(length).to(like) / length
        if self.kind == "trend":
            return time ** torch.arange(3).to(like)[:, None]
        angles = 2 * torch.pi * torch.arange(1, 3).to(like)[:, None] * time
        return torch.cat([angles.cos(), angles.sin()])

    def forward(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        back, ahead = theta.chunk(2, 1)
        return back @ self.rows(self.past, theta), ahead @ self.rows(self.future, theta)


class Beat(nn.Module):
    def __init__(self, kind: str):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU())
        self.theta = nn.Linear(20, 6 if kind == "trend" else 8, bias=False)
        self.grid = Grid(kind, 12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.grid(self.theta(self.mlp(x)))


class Beats(nn.Module):
    """[N, 12] -> the next four, and what no block has explained."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Beat(kind) for kind in ("trend", "trend", "waves", "waves"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        total = 0.0
        for block in self.blocks:
            back, ahead = block(x)
            x, total = x - back, total + ahead
        return total, x


def _forecast(outputs: tuple | dict, targets: Tensor) -> Tensor:
    ahead, left = outputs.values() if isinstance(outputs, dict) else outputs
    return F.mse_loss(ahead, targets.to(ahead)) + 0.1 * left.square().mean()


def _series() -> tuple[Tensor, Tensor]:
    time = torch.arange(16) / 6 + 6 * torch.rand(16, 1)
    x = time.sin() + 0.3 * torch.randn(16, 1) * time + 0.1 * torch.randn(16, 16)
    return x[:, :12], x[:, 12:]


wave = _task("fifth_wave", Wave, tokens(4, 12, 16))
beats = _task("fifth_beats", Beats, _series, _forecast)
