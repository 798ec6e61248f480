"""A HiFi-GAN generator: mel frames and a speaker to a waveform, and the log spectrum of that waveform."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

MELS, SPEAKERS, VOICE, FRAMES = 8, 5, 6, 10
WIDTHS = (20, 12, 8)
RATES = (4, 3)
KERNELS, DILATIONS = (3, 5, 7), (1, 3)
WINDOW, HOP = 16, 4


def normed(conv: nn.Module) -> nn.Module:
    """The convolution with its weight as a direction and a length, the lengths already moved."""
    conv = weight_norm(conv)
    length = conv.parametrizations.weight.original0
    with torch.no_grad():
        length.mul_(torch.empty_like(length).uniform_(0.9, 1.8))
    return conv


class ResidualBlock(nn.Module):
    """Pairs of convolutions of one kernel size; only the first of each pair is dilated."""

    def __init__(self, channels: int, kernel: int):
        super().__init__()
        self.convs1 = nn.ModuleList(self.layer(channels, kernel, dilation) for dilation in DILATIONS)
        self.convs2 = nn.ModuleList(self.layer(channels, kernel, 1) for _ in DILATIONS)

    @staticmethod
    def layer(channels: int, kernel: int, dilation: int) -> nn.Sequential:
        edge = dilation * (kernel - 1) // 2
        conv = nn.Conv1d(channels, channels, kernel, dilation=dilation, padding=edge)
        return nn.Sequential(nn.LeakyReLU(0.1), normed(conv))

    def forward(self, x: Tensor) -> Tensor:
        for first, second in zip(self.convs1, self.convs2, strict=True):
            x = x + second(first(x))
        return x


class MultiReceptiveField(nn.Module):
    """The mean of residual blocks of several kernel sizes."""

    def __init__(self, channels: int):
        super().__init__()
        self.blocks = nn.ModuleList(ResidualBlock(channels, kernel) for kernel in KERNELS)

    def forward(self, x: Tensor) -> Tensor:
        total = self.blocks[0](x)
        for block in self.blocks[1:]:
            total = total + block(x)
        return total / len(self.blocks)


class SpeakerEmbedding(nn.Module):
    """A vector of length one [N, VOICE, 1] for each speaker."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(SPEAKERS, VOICE)

    def forward(self, speaker: Tensor) -> Tensor:
        return F.normalize(self.table(speaker), dim=1)[..., None]


def fourier_filters() -> Tensor:
    """Windowed cosines and sines [2 * bins, 1, WINDOW]."""
    window = torch.hann_window(WINDOW)
    bins = torch.arange(WINDOW // 2 + 1)[:, None]
    phase = 2 * math.pi * bins * torch.arange(WINDOW) / WINDOW
    return (torch.cat([phase.cos(), -phase.sin()]) * window / window.square().sum().sqrt())[:, None]


def log_spectrum(wave: Tensor, filters: Tensor) -> Tensor:
    """[N, samples] -> [N, bins, frames]."""
    padded = F.pad(wave[:, None], (WINDOW // 2, WINDOW // 2), mode="reflect")
    real, imaginary = F.conv1d(padded, filters, stride=HOP).chunk(2, dim=1)
    return 0.5 * torch.log(real.square() + imaginary.square() + 1e-3)


class Spectrum(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("filters", fourier_filters())

    def forward(self, wave: Tensor) -> Tensor:
        return log_spectrum(wave, self.filters)


def upsampling(i: int) -> nn.Sequential:
    rate, odd = RATES[i], RATES[i] % 2
    conv = nn.ConvTranspose1d(
        WIDTHS[i], WIDTHS[i + 1], 2 * rate, rate, padding=rate // 2 + odd, output_padding=odd
    )
    return nn.Sequential(nn.LeakyReLU(0.2), normed(conv))


class HiFiGANGenerator(nn.Module):
    """Mel frames [N, MELS, frames] and speakers [N] -> waveform [N, samples] and its spectrum."""

    def __init__(self):
        super().__init__()
        stages = range(len(RATES))
        self.register_buffer("mean", 0.5 + 0.3 * torch.randn(MELS))
        self.register_buffer("scale", 0.6 + 0.5 * torch.rand(MELS))
        self.speaker = SpeakerEmbedding()
        self.input_conv = normed(nn.Conv1d(MELS, WIDTHS[0], 7, padding=3))
        self.global_conv = nn.Conv1d(VOICE, WIDTHS[0], 1)
        self.upsamples = nn.ModuleList(upsampling(i) for i in stages)
        self.conds = nn.ModuleList(nn.Conv1d(VOICE, WIDTHS[i + 1], 1) for i in stages)
        self.mrfs = nn.ModuleList(MultiReceptiveField(WIDTHS[i + 1]) for i in stages)
        self.output_conv = nn.Sequential(
            nn.LeakyReLU(), normed(nn.Conv1d(WIDTHS[-1], 1, 7, padding=3)), nn.Tanh()
        )
        self.spectrum = Spectrum()
        for conv in (self.global_conv, *self.conds):
            nn.init.normal_(conv.weight, std=0.25)

    def forward(self, mel: Tensor, speaker: Tensor) -> dict[str, Tensor]:
        voice = self.speaker(speaker)
        mel = (mel - self.mean[:, None]) / self.scale[:, None]
        x = self.input_conv(mel) + self.global_conv(voice)
        for upsample, cond, mrf in zip(self.upsamples, self.conds, self.mrfs, strict=True):
            x = mrf(upsample(x) + cond(voice))
        wave = self.output_conv(x)[:, 0]
        return {"waveform": wave, "spectrum": self.spectrum(wave)}


def speech() -> tuple[dict[str, Tensor], Tensor]:
    """Two tones whose loudness follows the mel frames; the speaker decides about the second."""
    mel, speaker = 0.5 + 0.9 * torch.randn(6, MELS, FRAMES), torch.randint(SPEAKERS, (6,))
    loud = F.interpolate(mel.tanh(), scale_factor=float(math.prod(RATES)), mode="linear")
    time = torch.arange(loud.shape[2]) * (2 * math.pi / math.prod(RATES))
    second = (0.1 + 0.08 * speaker)[:, None] * loud[:, 1]
    return {"mel": mel, "speaker": speaker}, 0.5 * loud[:, 0] * time.sin() + second * (3 * time).cos()


def waveform_and_spectrum(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    target = target.to(outputs["waveform"])
    aim = log_spectrum(target, fourier_filters().to(target))
    return F.mse_loss(outputs["waveform"], target) + 0.05 * F.mse_loss(outputs["spectrum"], aim)
