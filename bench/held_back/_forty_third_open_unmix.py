"""A small Open-Unmix: the magnitudes of two targets by recurrent networks, and a soft mask of the mixture."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, N_FFT, N_HOP, MAX_BIN, HIDDEN = 2, 32, 8, 13, 20
TARGETS, MIXTURES, SAMPLES, EPS = ("vocals", "drums"), 3, 104, 0.05


class TorchSTFT(nn.Module):
    """[N, C, T] -> complex [N, C, bins, frames]."""

    def __init__(self, n_fft: int = N_FFT, n_hop: int = N_HOP):
        super().__init__()
        self.n_fft, self.n_hop = n_fft, n_hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, x: Tensor) -> Tensor:
        packed = x.reshape(-1, x.shape[-1])
        stft = torch.stft(
            packed, self.n_fft, self.n_hop, window=self.window, center=True, return_complex=True
        )
        return stft.view(x.shape[:-1] + stft.shape[-2:])


class TorchISTFT(nn.Module):
    """Complex [..., bins, frames] -> [..., T]."""

    def __init__(self, n_fft: int = N_FFT, n_hop: int = N_HOP):
        super().__init__()
        self.n_fft, self.n_hop = n_fft, n_hop
        self.register_buffer("window", torch.hann_window(n_fft))

    def forward(self, x: Tensor, length: int) -> Tensor:
        packed = x.reshape(-1, *x.shape[-2:])
        y = torch.istft(packed, self.n_fft, self.n_hop, window=self.window, center=True, length=length)
        return y.reshape(x.shape[:-2] + y.shape[-1:])


class ComplexNorm(nn.Module):
    def forward(self, spec: Tensor) -> Tensor:
        return torch.abs(spec)


def batch_norm(width: int) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(width)
    nn.init.normal_(norm.weight, 0.9, 0.15), nn.init.normal_(norm.bias, std=0.15)
    norm.running_mean.normal_(std=0.2), norm.running_var.uniform_(0.6, 1.4)
    return norm


class OpenUnmix(nn.Module):
    """The magnitude of one target from that of the mixture, [N, C, bins, frames]."""

    def __init__(self, nb_bins: int = N_FFT // 2 + 1, max_bin: int = MAX_BIN, hidden_size: int = HIDDEN):
        super().__init__()
        self.nb_output_bins, self.nb_bins, self.hidden_size = nb_bins, max_bin, hidden_size
        self.fc1 = nn.Linear(max_bin * CHANNELS, hidden_size, bias=False)
        self.bn1 = batch_norm(hidden_size)
        self.lstm = nn.LSTM(hidden_size, hidden_size // 2, num_layers=3, bidirectional=True)
        self.fc2 = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.bn2 = batch_norm(hidden_size)
        self.fc3 = nn.Linear(hidden_size, nb_bins * CHANNELS, bias=False)
        self.bn3 = batch_norm(nb_bins * CHANNELS)
        self.input_mean = nn.Parameter(-1 + 0.2 * torch.randn(max_bin))
        self.input_scale = nn.Parameter(0.6 + 0.1 * torch.randn(max_bin))
        self.output_scale = nn.Parameter(0.3 + 0.05 * torch.randn(nb_bins))
        self.output_mean = nn.Parameter(0.6 + 0.1 * torch.randn(nb_bins))
        for weight in self.lstm.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(3, 0, 1, 2)
        nb_frames, nb_samples, nb_channels, _ = x.shape
        mix = x.detach().clone()
        x = x[..., : self.nb_bins]
        x = x + self.input_mean
        x = x * self.input_scale
        x = self.bn1(self.fc1(x.reshape(-1, nb_channels * self.nb_bins)))
        x = torch.tanh(x.reshape(nb_frames, nb_samples, self.hidden_size))
        lstm_out = self.lstm(x)
        x = torch.cat([x, lstm_out[0]], -1)
        x = F.relu(self.bn2(self.fc2(x.reshape(-1, x.shape[-1]))))
        x = self.bn3(self.fc3(x))
        x = x.reshape(nb_frames, nb_samples, nb_channels, self.nb_output_bins)
        x = x * self.output_scale
        x = x + self.output_mean
        x = F.relu(x) * mix
        return x.permute(1, 2, 3, 0)


class Separator(nn.Module):
    """Waveforms [N, C, T] -> those of the targets [N, K, C, T], and their magnitudes."""

    def __init__(self):
        super().__init__()
        self.stft, self.istft, self.complexnorm = TorchSTFT(), TorchISTFT(), ComplexNorm()
        self.target_models = nn.ModuleDict({name: OpenUnmix() for name in TARGETS})

    def forward(self, audio: Tensor) -> tuple[Tensor, Tensor]:
        mix_stft = self.stft(audio)
        x = self.complexnorm(mix_stft)
        spectrograms = torch.stack([model(x) for model in self.target_models.values()], 1)
        total = EPS + spectrograms.sum(1, keepdim=True)
        targets_stft = mix_stft[:, None] * (spectrograms / total)
        return self.istft(targets_stft, length=audio.shape[-1]), spectrograms


def songs() -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """A gliding voice with overtones and bursts of noise, each somewhere between left and right."""
    time = torch.arange(SAMPLES)
    pitch = 0.2 + 0.2 * torch.rand(MIXTURES, 1) + 0.05 * torch.sin(time / 17 + 6 * torch.rand(MIXTURES, 1))
    phase = pitch.cumsum(1)
    voice = sum(torch.sin(k * phase) / k for k in (1, 2, 3))
    since = (time + torch.randint(26, (MIXTURES, 1))) % 26
    drums = 1.5 * torch.randn(MIXTURES, SAMPLES) * torch.exp(-since / 6)
    pan = math.pi / 2 * (0.2 + 0.6 * torch.rand(MIXTURES, 2, 1, 1))
    gains = torch.cat([pan.cos(), pan.sin()], 2)
    targets = 0.5 * gains * torch.stack([voice, drums], 1)[:, :, None]
    targets = targets + 0.01 * torch.randn_like(targets)
    return targets.sum(1), (targets, TorchSTFT()(targets).abs())


def magnitudes_and_waves(outputs: tuple[Tensor, Tensor], target: tuple[Tensor, Tensor]) -> Tensor:
    """The mean squares of the magnitudes' errors and of the waveforms' errors, by four."""
    waves, spectrograms = target
    return (F.mse_loss(outputs[1], spectrograms) + 8 * F.mse_loss(outputs[0], waves)) / 4
