"""A small DiffWave: dilated gated layers that tell the noise in a wave, by its spectrogram and its step."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WAVES, MELS, FRAMES, HOPS, STEPS = 3, 10, 9, (4, 2), 20
CHANNELS, LAYERS, CYCLE, WAVELENGTHS, HIDDEN, EMBEDDED = 14, 5, 4, 64, 44, 36


def conv1d(*sizes: int, **settings: int) -> nn.Conv1d:
    layer = nn.Conv1d(*sizes, **settings)
    nn.init.kaiming_normal_(layer.weight)
    return layer


def silu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


class DiffusionEmbedding(nn.Module):
    """A table by whole steps, read between its rows for the others, and two layers."""

    def __init__(self, max_steps: int):
        super().__init__()
        self.register_buffer("embedding", self._build_embedding(max_steps), persistent=False)
        self.projection1 = nn.Linear(2 * WAVELENGTHS, HIDDEN)
        self.projection2 = nn.Linear(HIDDEN, EMBEDDED)

    def forward(self, diffusion_step: Tensor) -> Tensor:
        if diffusion_step.dtype in (torch.int32, torch.int64):
            x = self.embedding[diffusion_step]
        else:
            x = self._lerp_embedding(diffusion_step)
        x = silu(self.projection1(x))
        return silu(self.projection2(x))

    def _lerp_embedding(self, t: Tensor) -> Tensor:
        low_idx, high_idx = torch.floor(t).long(), torch.ceil(t).long()
        low, high = self.embedding[low_idx], self.embedding[high_idx]
        return low + (high - low) * (t - low_idx)[:, None]

    def _build_embedding(self, max_steps: int) -> Tensor:
        steps = torch.arange(max_steps).unsqueeze(1)
        dims = torch.arange(WAVELENGTHS).unsqueeze(0)
        table = steps * 10.0 ** (dims * 4.0 / (WAVELENGTHS - 1))
        return torch.cat([torch.sin(table), torch.cos(table)], dim=1)


class SpectrogramUpsampler(nn.Module):
    """[N, mels, frames] -> [N, mels, samples]."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = (
            nn.ConvTranspose2d(1, 1, [3, 2 * hop], stride=[1, hop], padding=[1, hop // 2]) for hop in HOPS
        )

    def forward(self, x: Tensor) -> Tensor:
        x = torch.unsqueeze(x, 1)
        x = F.leaky_relu(self.conv1(x), 0.4)
        x = F.leaky_relu(self.conv2(x), 0.4)
        return torch.squeeze(x, 1)


class ResidualBlock(nn.Module):
    def __init__(self, n_mels: int, residual_channels: int, dilation: int):
        super().__init__()
        c = residual_channels
        self.dilated_conv = conv1d(c, 2 * c, 3, padding=dilation, dilation=dilation)
        self.diffusion_projection = nn.Linear(EMBEDDED, c)
        self.conditioner_projection = conv1d(n_mels, 2 * c, 1)
        self.output_projection = conv1d(c, 2 * c, 1)

    def forward(self, x: Tensor, diffusion_step: Tensor, conditioner: Tensor) -> tuple[Tensor, Tensor]:
        diffusion_step = self.diffusion_projection(diffusion_step).unsqueeze(-1)
        y = x + diffusion_step
        y = self.dilated_conv(y) + self.conditioner_projection(conditioner)
        gate, filter_ = torch.chunk(y, 2, dim=1)
        y = self.output_projection(torch.sigmoid(gate) * torch.tanh(filter_))
        residual, skip = torch.chunk(y, 2, dim=1)
        return (x + residual) / math.sqrt(2.0), skip


class DiffWave(nn.Module):
    """Noisy audio [N, T], a step each and spectrograms [N, mels, T / hop] -> the noise, [N, 1, T]."""

    def __init__(self):
        super().__init__()
        self.input_projection = conv1d(1, CHANNELS, 1)
        self.diffusion_embedding = DiffusionEmbedding(STEPS)
        self.spectrogram_upsampler = SpectrogramUpsampler()
        self.residual_layers = nn.ModuleList(
            ResidualBlock(MELS, CHANNELS, 2 ** (i % CYCLE)) for i in range(LAYERS)
        )
        self.skip_projection = conv1d(CHANNELS, CHANNELS, 1)
        self.output_projection = conv1d(CHANNELS, 1, 1)

    def forward(self, audio: Tensor, diffusion_step: Tensor, spectrogram: Tensor) -> Tensor:
        x = F.relu(self.input_projection(audio.unsqueeze(1)))
        diffusion_step = self.diffusion_embedding(diffusion_step)
        spectrogram = self.spectrogram_upsampler(spectrogram)
        skip = None
        for layer in self.residual_layers:
            x, skip_connection = layer(x, diffusion_step, spectrogram)
            skip = skip_connection if skip is None else skip_connection + skip
        x = skip / math.sqrt(len(self.residual_layers))
        x = F.relu(self.skip_projection(x))
        return self.output_projection(x)


def voices() -> tuple[dict[str, Tensor], Tensor]:
    """Harmonics that swell, silent after their end, under noise by the step; the noise is asked for."""
    hop = math.prod(HOPS)
    time, frame = torch.arange(FRAMES * hop) / hop, torch.arange(FRAMES)
    pitch, end = 0.3 + 0.9 * torch.rand(WAVES, 1), torch.tensor([[FRAMES], [FRAMES - 2], [FRAMES - 3]])
    loud = 0.4 + 0.3 * torch.rand(WAVES, 3, 1)
    waves = loud * torch.sin(math.tau * torch.arange(1, 4)[:, None] * (pitch * time)[:, None])
    clean = waves.sum(1) * (time < end)
    peaks = 3 * pitch[..., None] * torch.arange(1, 4)
    bands = torch.exp(-0.5 * (torch.arange(MELS)[:, None] - peaks).square()) @ loud
    swell = 1 + 0.3 * torch.sin(frame + math.tau * torch.rand(WAVES, 1))
    spectrogram = (bands * swell[:, None]).clamp(max=1) * (frame < end)[:, None]
    step = torch.randint(STEPS - 1, (WAVES,)) + 0.1 + 0.8 * torch.rand(WAVES)
    level, noise = torch.exp(-0.01 * step * (step + 1))[:, None], torch.randn_like(clean)
    audio = level.sqrt() * clean + (1 - level).sqrt() * noise
    return {"audio": audio, "diffusion_step": step, "spectrogram": spectrogram}, noise


def noise_missed(predicted: Tensor, noise: Tensor) -> Tensor:
    """The mean distance from the noise, by four."""
    return F.l1_loss(predicted.squeeze(1), noise) / 4
