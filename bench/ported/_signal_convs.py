"""Causal and gated 1-D convs, and a spectrogram in front of a small classifier."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, linear_of
from bench.tasks import _classes, _task


class Chomp(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        return x[..., : -self.size]


class Temporal(nn.Module):
    def __init__(self, before: int, width: int, dilation: int):
        super().__init__()
        self.conv1 = nn.Conv1d(before, width, 3, padding=2 * dilation, dilation=dilation)
        self.chomp1, self.relu1 = Chomp(2 * dilation), nn.ReLU()
        self.conv2 = nn.Conv1d(width, width, 3, padding=2 * dilation, dilation=dilation)
        self.chomp2, self.relu2 = Chomp(2 * dilation), nn.ReLU()
        self.downsample = nn.Conv1d(before, width, 1) if before != width else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu1(self.chomp1(self.conv1(x)))
        y = self.relu2(self.chomp2(self.conv2(y)))
        return (y + (x if self.downsample is None else self.downsample(x))).relu()


class TCN(nn.Module):
    """[N, 4, T] -> [N, T, 4]."""

    def __init__(self):
        super().__init__()
        self.network = nn.Sequential(Temporal(4, 16, 1), Temporal(16, 16, 2), Temporal(16, 16, 4))
        self.linear = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.network(x).transpose(1, 2))


tcn = _task("ported_tcn", TCN, lambda: (torch.randn(4, 4, 20), torch.randn(4, 20, 4)), F.mse_loss)


class Causal(nn.Module):
    """Over [N, T, C]; the kernel is [3, in, out] and each tap a matrix, the last for the present."""

    def __init__(self, conv: nn.Conv1d, late: int = 0):
        super().__init__()
        self.taps, self.bias = copied(conv.weight.permute(2, 1, 0)), copied(conv.bias)
        self.dilation, self.late = conv.dilation[0], late

    def forward(self, x: Tensor) -> Tensor:
        reach, length = 2 * self.dilation, x.shape[1]
        x = F.pad(x, (0, 0, reach + self.late, 0))
        parts = [x[:, i * self.dilation :][:, :length] @ tap for i, tap in enumerate(self.taps)]
        return sum(parts) + self.bias


class CausalBlock(nn.Module):
    def __init__(self, block: Temporal, late: int):
        super().__init__()
        self.a, self.b = Causal(block.conv1), Causal(block.conv2, late)
        if block.downsample is not None:
            self.match = linear_of(block.downsample.weight[:, :, 0], block.downsample.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.b(self.a(x).relu()).relu()
        return F.relu((self.match(x) if hasattr(self, "match") else x) + y)


class CausalNet(nn.Module):
    def __init__(self, model: TCN, late: int = 0):
        super().__init__()
        self.stack = nn.ModuleList(
            CausalBlock(block, late if i == 1 else 0) for i, block in enumerate(model.network)
        )
        self.decode = model.linear

    def forward(self, x: Tensor) -> Tensor:
        x = x.transpose(1, 2)
        for block in self.stack:
            x = block(x)
        return self.decode(x)


class Gated(nn.Module):
    def __init__(self, width: int, dilation: int):
        super().__init__()
        self.filter = nn.Conv1d(width, width, 2, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 2, dilation=dilation)
        self.residual, self.skip = nn.Conv1d(width, width, 1), nn.Conv1d(width, 12, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        padded = F.pad(x, (self.filter.dilation[0], 0))
        y = self.filter(padded).tanh() * self.gate(padded).sigmoid()
        return (x + self.residual(y)) * math.sqrt(0.5), self.skip(y)


class WaveNet(nn.Module):
    """Levels [N, T] of 20 -> logits [N, T, 20]."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.layers = nn.ModuleList(Gated(16, dilation) for dilation in (1, 2, 4))
        self.post1, self.post2 = nn.Conv1d(12, 16, 1), nn.Conv1d(16, 20, 1)

    def forward(self, levels: Tensor) -> Tensor:
        x, total = self.embed(levels).transpose(1, 2), 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.post2(self.post1(total.relu()).relu()).transpose(1, 2)


def _levels() -> tuple[Tensor, Tensor]:
    levels = torch.randint(20, (4, 17))
    return levels[:, :-1], levels[:, 1:]


def _next_level(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


wavenet = _task("ported_wavenet", WaveNet, _levels, _next_level)


class OneConv(nn.Module):
    """Filter and gate are one conv, residual and skip another; the embedding is a matrix for one-hot rows."""

    def __init__(self, model: WaveNet, detached: bool = False):
        super().__init__()
        self.table = copied(model.embed.weight.T)
        self.inner, self.outer = nn.ModuleList(), nn.ModuleList()
        for layer in model.layers:
            self.inner.append(self.both(layer.filter, layer.gate))
            self.outer.append(self.both(layer.residual, layer.skip))
        self.head = nn.ModuleList(linear_of(c.weight[:, :, 0], c.bias) for c in (model.post1, model.post2))
        self.detached = detached

    def both(self, one: nn.Conv1d, two: nn.Conv1d) -> nn.Conv1d:
        conv = nn.Conv1d(16, one.out_channels + two.out_channels, one.kernel_size, dilation=one.dilation)
        conv.weight = copied(torch.cat([one.weight, two.weight]))
        conv.bias = copied(torch.cat([one.bias, two.bias]))
        return conv

    def forward(self, levels: Tensor) -> Tensor:
        x, skips = self.table[:, levels].transpose(0, 1), []
        for i, (inner, outer) in enumerate(zip(self.inner, self.outer, strict=True)):
            a, b = inner(F.pad(x, (inner.dilation[0], 0))).chunk(2, 1)
            y, skip = outer(a.tanh() * b.sigmoid()).split([16, 12], 1)
            x = (x + y) * 0.5**0.5
            skips.append(skip.detach() if self.detached and i == 0 else skip)
        y = torch.stack(skips).sum(0).relu().transpose(1, 2)
        return self.head[1](self.head[0](y).relu())


class Spectrogram(nn.Module):
    """[N, 256] -> the logarithm of [N, 17, frames] with frames of 32, 16 apart."""

    def __init__(self):
        super().__init__()
        self.register_buffer("window", torch.hann_window(32), persistent=False)

    def forward(self, wave: Tensor) -> Tensor:
        found = torch.stft(wave, 32, 16, window=self.window, center=True, return_complex=True)
        return (found.real.square() + found.imag.square() + 1e-3).log()


class Sounds(nn.Module):
    """[N, 256] -> [N, 5]."""

    def __init__(self):
        super().__init__()
        self.spectrogram = Spectrogram()
        self.norm = nn.BatchNorm1d(17)
        self.conv1, self.conv2 = nn.Conv1d(17, 24, 3, padding=1), nn.Conv1d(24, 24, 3, 2, 1)
        self.fc = nn.Linear(48, 5)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.norm(self.spectrogram(wave))
        x = self.conv2(self.conv1(x).relu()).relu()
        return self.fc(torch.cat([x.mean(2), x.amax(2)], 1))


sounds = _task("ported_sounds", Sounds, lambda: (torch.randn(8, 256), _classes(8, 5)))
