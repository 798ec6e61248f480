"""Demucs in small: a stereo mix through a U-Net on the waveform, an LSTM at its bottom -> the sources."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SOURCES, LENGTH, WINDOWS = ("drums", "bass", "vocals"), 270, (32, 80)


def center_trim(tensor: Tensor, reference: Tensor | int) -> Tensor:
    """Cut the last axis to the reference's length, at both ends alike; an odd sample goes at the end."""
    wanted = reference if isinstance(reference, int) else reference.shape[-1]
    excess = tensor.shape[-1] - wanted
    return tensor[..., excess // 2 : excess // 2 + wanted]


def unfold(x: Tensor, kernel_size: int, stride: int) -> Tensor:
    """[..., T] -> [..., frames, kernel]; zeros at the end let each stride begin a frame."""
    frames = math.ceil(x.shape[-1] / stride)
    missing = (frames - 1) * stride + kernel_size - x.shape[-1]
    return F.pad(x, (0, missing)).unfold(-1, kernel_size, stride)


class BLSTM(nn.Module):
    """Both directions and back to the width; longer inputs in chunks that overlap by half."""

    def __init__(self, dim: int, layers: int = 2, max_steps: int | None = None):
        super().__init__()
        self.max_steps = max_steps
        self.lstm = nn.LSTM(dim, dim, layers, bidirectional=True)
        self.linear = nn.Linear(2 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        batch, _, length = x.shape
        framed = self.max_steps is not None and length > self.max_steps
        if framed:
            stride = self.max_steps // 2
            x = unfold(x, self.max_steps, stride).transpose(1, 2).flatten(0, 1)
        x = self.linear(self.lstm(x.permute(2, 0, 1))[0]).permute(1, 2, 0)
        if framed:
            edge, (first, *inner, last) = stride // 2, x.unflatten(0, (batch, -1)).unbind(1)
            middle = [frame[..., edge:-edge] for frame in inner]
            x = torch.cat([first[..., :-edge], *middle, last[..., edge:]], -1)[..., :length]
        return x


class LayerScale(nn.Module):
    """A factor for each channel of a residual branch."""

    def __init__(self, channels: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale[:, None] * x


class DConv(nn.Module):
    """Residual branches one after the other, each with twice the dilation of the one before."""

    def __init__(self, channels: int, compress: float = 2, depth: int = 2, kernel: int = 3):
        super().__init__()
        hidden = int(channels / compress)
        self.layers = nn.ModuleList()
        for index in range(depth):
            dilation = 2**index
            self.layers.append(
                nn.Sequential(
                    nn.Conv1d(channels, hidden, kernel, padding=dilation * (kernel // 2), dilation=dilation),
                    nn.GroupNorm(1, hidden),
                    nn.GELU(),
                    nn.Conv1d(hidden, 2 * channels, 1),
                    nn.GroupNorm(1, 2 * channels),
                    nn.GLU(1),
                    LayerScale(channels),
                )
            )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Demucs(nn.Module):
    """Mixes [N, 2, T] -> sources [N, S, 2, T], and the estimates that they are scaled from."""

    def __init__(
        self,
        sources: tuple[str, ...] = SOURCES,
        audio_channels: int = 2,
        channels: int = 8,
        growth: float = 1.5,
        depth: int = 3,
        kernel_size: int = 6,
        stride: int = 3,
        context: int = 3,
        norm_starts: int = 1,
        norm_groups: int = 2,
        lstm_layers: int = 2,
        max_steps: int = 8,
    ):
        super().__init__()
        self.sources, self.audio_channels, self.depth = sources, audio_channels, depth
        self.kernel_size, self.stride, self.context = kernel_size, stride, context
        self.encoder, self.decoder = nn.ModuleList(), nn.ModuleList()
        inside, outside = audio_channels, len(sources) * audio_channels
        for index in range(depth):

            def norm(width: int, index: int = index) -> nn.Module:
                return nn.GroupNorm(norm_groups, width) if index >= norm_starts else nn.Identity()

            self.encoder.append(
                nn.Sequential(
                    nn.Conv1d(inside, channels, kernel_size, stride),
                    norm(channels),
                    nn.GELU(),
                    DConv(channels),
                    nn.Conv1d(channels, 2 * channels, 1),
                    norm(2 * channels),
                    nn.GLU(1),
                )
            )
            decode = [
                nn.Conv1d(channels, 2 * channels, context),
                norm(2 * channels),
                nn.GLU(1),
                nn.ConvTranspose1d(channels, outside, kernel_size, stride),
            ]
            if index > 0:
                decode += [norm(outside), nn.GELU()]
            self.decoder.insert(0, nn.Sequential(*decode))
            inside = outside = channels
            channels = int(growth * channels)
        self.lstm = BLSTM(inside, lstm_layers, max_steps)
        self.apply(self.varied)

    @staticmethod
    def varied(module: nn.Module) -> None:
        """Start with weights that let every layer, gain and shift count."""
        if isinstance(module, nn.GroupNorm):
            nn.init.uniform_(module.weight, 0.6, 1.4)
        elif isinstance(module, LayerScale):
            nn.init.uniform_(module.scale, 0.3, 0.9)
        elif isinstance(module, nn.ConvTranspose1d):
            nn.init.normal_(module.weight, std=(2 * module.in_channels) ** -0.5)
        elif isinstance(module, nn.Conv1d | nn.Linear):
            nn.init.normal_(module.weight, std=1.2 * module.weight[0].numel() ** -0.5)
        elif isinstance(module, nn.LSTM):
            for weight in module.parameters():
                nn.init.uniform_(weight, -0.4, 0.4)
        if isinstance(getattr(module, "bias", None), Tensor):
            nn.init.normal_(module.bias, std=0.2)

    def valid_length(self, length: int) -> int:
        """The least length from that on at which no layer leaves samples over and enough come out."""
        for _ in range(self.depth):
            length = max(1, math.ceil((length - self.kernel_size) / self.stride) + 1) + self.context - 1
        for _ in range(self.depth):
            length = (length - 1) * self.stride + self.kernel_size
        return length

    def forward(self, mix: Tensor) -> dict[str, Tensor]:
        length = mix.shape[-1]
        mono = mix.mean(1, keepdim=True)
        mean, std = mono.mean(-1, keepdim=True), mono.std(-1, keepdim=True)
        x = (mix - mean) / (1e-5 + std)
        missing = self.valid_length(length) - length
        x = F.pad(x, (missing // 2, missing - missing // 2))
        saved = []
        for encode in self.encoder:
            x = encode(x)
            saved.append(x)
        x = self.lstm(x)
        for decode in self.decoder:
            x = decode(x + center_trim(saved.pop(), x))
        x = center_trim(x, length)
        shape = (len(self.sources), self.audio_channels)
        return {"sources": (x * std + mean).unflatten(1, shape), "estimates": x.unflatten(1, shape)}


def songs() -> tuple[Tensor, Tensor]:
    """Two songs of beats, a low tone and a gliding voice, each source at its own place between the ears."""
    time, loud = torch.arange(LENGTH) / LENGTH, 0.4 + torch.rand(2, 1)
    phase, pitch = 6.28 * torch.rand(2, 1), 1 + torch.rand(2, 1)
    beats = torch.randn(2, LENGTH) * (-8 * ((5 * time + phase) % 1)).exp()
    bass = (6.28 * 9 * pitch * time + phase).sin()
    voice = (6.28 * (30 * time + 14 * pitch * time**2) + phase).sin() * (3 * time + phase).cos()
    parts = loud[..., None] * torch.stack([2 * beats, bass, voice], 1) + 0.3 * torch.randn(2, 3, 1)
    sources = parts[:, :, None] * (0.3 + torch.rand(2, 3, 2, 1)) + 0.02 * torch.randn(2, 3, 2, LENGTH)
    return sources.sum(1), sources


def missed(outputs: dict[str, Tensor], sources: Tensor) -> Tensor:
    """How far the waveforms are off, and the magnitudes of their short spectra at two sizes."""
    signals = torch.stack([outputs["sources"], sources]).flatten(1, 3)
    total = F.l1_loss(*signals)
    for size in WINDOWS:
        window = torch.hann_window(size, dtype=signals.dtype, device=signals.device)
        options = {"window": window, "normalized": True, "return_complex": True}
        spectra = (torch.stft(x, size, size // 4, **options) for x in signals)
        total = total + 0.5 * F.l1_loss(*((x.real**2 + x.imag**2 + 1e-6).sqrt() for x in spectra))
    return 0.3 * total
