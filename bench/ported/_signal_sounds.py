"""The port of the spectrogram and what follows: frames, a matrix of cosines and sines, convs over frames."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied
from bench.ported._signal_convs import Sounds


class Frames(nn.Module):
    """[N, samples] -> [N, frames, 17]: the waveform in pieces by a windowed Fourier basis."""

    def __init__(self, like: Tensor, periodic: bool):
        super().__init__()
        window = torch.hann_window(32, periodic=periodic).to(like)
        self.register_buffer("window", window[:, None], persistent=False)

    def basis(self, like: Tensor) -> Tensor:
        time, bins = torch.arange(32, device=like.device), torch.arange(17, device=like.device)
        angle = (torch.outer(time, bins) % 32).to(like.dtype) * (torch.pi / 16)
        return torch.cat([angle.cos(), -angle.sin()], 1) * self.window

    def forward(self, wave: Tensor) -> Tensor:
        padded = F.pad(wave[:, None], (16, 16), mode="reflect")[:, 0]
        real, imaginary = (padded.unfold(1, 32, 16) @ self.basis(wave)).chunk(2, -1)
        return torch.log(real**2 + imaginary**2 + 1e-3)


class SoundsByFrames(nn.Module):
    """Time comes before frequency all the way; convs are matrices over neighbouring frames."""

    def __init__(self, model: Sounds, periodic: bool = True):
        super().__init__()
        self.front = Frames(model.fc.weight, periodic)
        norm = model.norm
        self.scale, self.shift = copied(norm.weight), copied(norm.bias)
        self.register_buffer("mean", norm.running_mean.clone())
        self.register_buffer("variance", norm.running_var.clone())
        self.kernels = nn.ParameterList(
            copied(c.weight.permute(2, 1, 0).flatten(0, 1)) for c in (model.conv1, model.conv2)
        )
        self.biases = nn.ParameterList(copied(c.bias) for c in (model.conv1, model.conv2))
        self.by_mean, self.by_peak = (copied(part) for part in model.fc.weight.chunk(2, 1))
        self.bias = copied(model.fc.bias)

    def forward(self, wave: Tensor) -> Tensor:
        x = self.front(wave)
        n, frames, bins = x.shape
        x = F.batch_norm(
            x.flatten(0, 1), self.mean, self.variance, self.scale, self.shift, training=self.training
        ).view(n, frames, bins)
        for i, (kernel, bias) in enumerate(zip(self.kernels, self.biases, strict=True)):
            around = F.pad(x, (0, 0, 1, 1)).unfold(1, 3, i + 1)  # n frames c 3
            x = (around.transpose(2, 3).flatten(2) @ kernel + bias).relu()
        return x.mean(1) @ self.by_mean.T + x.amax(1) @ self.by_peak.T + self.bias
