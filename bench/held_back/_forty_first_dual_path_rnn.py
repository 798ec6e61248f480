"""A small dual-path RNN that separates two speakers in the time domain, under its loss of any order."""

import itertools
import math

import torch
from torch import Tensor, nn

FILTERS, WIDTH, HIDDEN, KERNEL, CHUNK, LAYERS, SPEAKERS = 20, 12, 9, 4, 6, 3, 2
MIXTURES, SAMPLES = 5, 52


class GlobalLayerNorm(nn.Module):
    """Normalises [B, N, K, S] over all but the first axis."""

    def __init__(self, dim: int, eps: float = 1e-8):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(1 + 0.2 * torch.randn(dim, 1, 1))
        self.bias = nn.Parameter(0.2 * torch.randn(dim, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        mean = torch.mean(x, (1, 2, 3), keepdim=True)
        var = torch.mean((x - mean) ** 2, (1, 2, 3), keepdim=True)
        return self.weight * (x - mean) / torch.sqrt(var + self.eps) + self.bias


class CumulativeLayerNorm(nn.LayerNorm):
    """Normalises [B, N, L] over its channels, frame by frame."""

    def __init__(self, dim: int):
        super().__init__(dim)
        nn.init.normal_(self.weight, 1, 0.2)
        nn.init.normal_(self.bias, 0, 0.2)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1d = nn.Conv1d(1, FILTERS, KERNEL, stride=KERNEL // 2, bias=False)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.conv1d(x.unsqueeze(1)))


class Decoder(nn.ConvTranspose1d):
    def __init__(self):
        super().__init__(FILTERS, 1, KERNEL, stride=KERNEL // 2, bias=False)
        nn.init.normal_(self.weight, 0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).squeeze(1)


class DualRNNBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.intra_rnn = nn.LSTM(WIDTH, HIDDEN, 1, batch_first=True, bidirectional=True)
        self.inter_rnn = nn.LSTM(WIDTH, HIDDEN, 1, batch_first=True, bidirectional=True)
        self.intra_norm, self.inter_norm = GlobalLayerNorm(WIDTH), GlobalLayerNorm(WIDTH)
        self.intra_linear, self.inter_linear = nn.Linear(2 * HIDDEN, WIDTH), nn.Linear(2 * HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, n, k, s = x.shape
        intra_rnn = x.permute(0, 3, 2, 1).reshape(b * s, k, n)
        intra_rnn = self.intra_linear(self.intra_rnn(intra_rnn)[0])
        intra_rnn = intra_rnn.view(b, s, k, n).permute(0, 3, 2, 1)
        intra_rnn = self.intra_norm(intra_rnn) + x
        inter_rnn = intra_rnn.permute(0, 2, 3, 1).reshape(b * k, s, n)
        inter_rnn = self.inter_linear(self.inter_rnn(inter_rnn)[0])
        inter_rnn = inter_rnn.view(b, k, s, n).permute(0, 3, 1, 2)
        return self.inter_norm(inter_rnn) + intra_rnn


class DualPathRNN(nn.Module):
    """[B, FILTERS, L] -> masks [SPEAKERS, B, FILTERS, L]."""

    def __init__(self):
        super().__init__()
        self.norm = CumulativeLayerNorm(FILTERS)
        self.conv1d = nn.Conv1d(FILTERS, WIDTH, 1, bias=False)
        self.dual_rnn = nn.ModuleList(DualRNNBlock() for _ in range(LAYERS))
        self.conv2d = nn.Conv2d(WIDTH, WIDTH * SPEAKERS, kernel_size=1)
        self.end_conv1x1 = nn.Conv1d(WIDTH, FILTERS, 1, bias=False)
        self.prelu, self.activation = nn.PReLU(init=0.17), nn.ReLU()
        self.output = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.Tanh())
        self.output_gate = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 1), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        x, gap = self._segmentation(self.conv1d(self.norm(x)))
        for block in self.dual_rnn:
            x = block(x)
        x = self.conv2d(self.prelu(x))
        b, _, k, s = x.shape
        x = self._over_add(x.reshape(b * SPEAKERS, -1, k, s), gap)
        x = self.end_conv1x1(self.output(x) * self.output_gate(x))
        return self.activation(x.view(b, SPEAKERS, FILTERS, -1)).transpose(0, 1)

    def _padding(self, x: Tensor) -> tuple[Tensor, int]:
        (b, n, length), half = x.shape, CHUNK // 2
        gap = CHUNK - (half + length % CHUNK) % CHUNK
        edge = x.new_zeros(b, n, half)
        return torch.cat([edge, x, x.new_zeros(b, n, gap), edge], dim=2), gap

    def _segmentation(self, x: Tensor) -> tuple[Tensor, int]:
        x, gap = self._padding(x)
        (b, n, _), half = x.shape, CHUNK // 2
        one = x[:, :, :-half].reshape(b, n, -1, CHUNK)
        two = x[:, :, half:].reshape(b, n, -1, CHUNK)
        return torch.cat([one, two], dim=3).view(b, n, -1, CHUNK).transpose(2, 3), gap

    def _over_add(self, x: Tensor, gap: int) -> Tensor:
        (b, n, k, _), half = x.shape, CHUNK // 2
        x = x.transpose(2, 3).reshape(b, n, -1, 2 * k)
        one = x[:, :, :, :k].reshape(b, n, -1)[:, :, half:]
        two = x[:, :, :, k:].reshape(b, n, -1)[:, :, :-half]
        return (one + two)[:, :, :-gap] if gap > 0 else one + two


class DualRNNModel(nn.Module):
    """Mixtures [B, T] -> a waveform [B, T] for each speaker."""

    def __init__(self):
        super().__init__()
        self.encoder, self.separation, self.decoder = Encoder(), DualPathRNN(), Decoder()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        e = self.encoder(x)
        s = self.separation(e)
        out = [s[i] * e for i in range(SPEAKERS)]
        return tuple(self.decoder(out[i]) for i in range(SPEAKERS))


def voices() -> tuple[Tensor, Tensor]:
    """A low and a high voice that swell at times of their own, and their sum."""
    time, shape = torch.arange(SAMPLES), (MIXTURES, SPEAKERS, 1)
    pitch = torch.tensor([0.25, 0.9])[:, None] * (1 + 0.2 * torch.rand(shape))
    swell = 1 + 0.8 * torch.sin(0.15 * time + math.tau * torch.rand(shape))
    phase = pitch * time + math.tau * torch.rand(shape)
    sources = swell * (phase.sin() + 0.4 * (2 * phase).cos())
    return sources.sum(1) + 0.05 * torch.randn(MIXTURES, SAMPLES), sources


def sisnr(x: Tensor, s: Tensor, eps: float = 1e-8) -> Tensor:
    x, s = x - x.mean(-1, keepdim=True), s - s.mean(-1, keepdim=True)
    t = (x * s).sum(-1, keepdim=True) * s / (s.norm(dim=-1, keepdim=True) ** 2 + eps)
    return 20 * torch.log10(eps + t.norm(dim=-1) / ((x - t).norm(dim=-1) + eps))


def permuted_sisnr(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """The negative ratio under the best order of the speakers, by twenty."""
    orders = itertools.permutations(range(SPEAKERS))
    each = [sum(sisnr(outputs[i], target[:, j]) for i, j in enumerate(order)) for order in orders]
    return -torch.stack(each).amax(0).mean() / SPEAKERS / 20
