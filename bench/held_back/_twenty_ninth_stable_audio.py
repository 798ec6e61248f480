"""A small Stable Audio: an Oobleck autoencoder with a Gaussian bottleneck, and a DiT over its latents."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from bench.held_back._twenty_ninth_stable_audio_parts import GLOBAL, LATENT, TOKEN, DiffusionTransformer

AUDIO, BASE, MULTS, STRIDES = 2, 4, (1, 2, 3), (2, 4)
CLIPS, LENGTH, WORDS = 3, 72, 6


def conv(*args: int, **kwargs: int) -> nn.Module:
    return weight_norm(nn.Conv1d(*args, **kwargs))


class SnakeBeta(nn.Module):
    """x + sin(alpha x)^2 / beta, both learnt as logarithms, channel by channel."""

    def __init__(self, in_features: int):
        super().__init__()
        self.alpha = nn.Parameter(0.3 * torch.randn(in_features))
        self.beta = nn.Parameter(0.3 * torch.randn(in_features))

    def forward(self, x: Tensor) -> Tensor:
        alpha, beta = (torch.exp(w[None, :, None]) for w in (self.alpha, self.beta))
        return x + (1.0 / (beta + 1e-9)) * torch.sin(x * alpha).pow(2)


class Chain(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class ResidualUnit(nn.Module):
    def __init__(self, channels: int, dilation: int):
        super().__init__()
        wide = conv(channels, channels, 7, dilation=dilation, padding=dilation * 6 // 2)
        self.layers = nn.Sequential(
            SnakeBeta(channels), wide, SnakeBeta(channels), conv(channels, channels, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) + x


class EncoderBlock(Chain):
    def __init__(self, ins: int, outs: int, stride: int):
        super().__init__()
        down = conv(ins, outs, 2 * stride, stride=stride, padding=math.ceil(stride / 2))
        self.layers = nn.Sequential(*(ResidualUnit(ins, d) for d in (1, 3, 9)), SnakeBeta(ins), down)


class DecoderBlock(Chain):
    def __init__(self, ins: int, outs: int, stride: int):
        super().__init__()
        up = nn.ConvTranspose1d(ins, outs, 2 * stride, stride=stride, padding=math.ceil(stride / 2))
        self.layers = nn.Sequential(
            SnakeBeta(ins), weight_norm(up), *(ResidualUnit(outs, d) for d in (1, 3, 9))
        )


class OobleckEncoder(Chain):
    def __init__(self):
        super().__init__()
        c = [BASE * m for m in MULTS]
        blocks = [EncoderBlock(c[i], c[i + 1], STRIDES[i]) for i in range(len(STRIDES))]
        last = conv(c[-1], 2 * LATENT, 3, padding=1)
        self.layers = nn.Sequential(conv(AUDIO, c[0], 7, padding=3), *blocks, SnakeBeta(c[-1]), last)


class OobleckDecoder(Chain):
    def __init__(self):
        super().__init__()
        c = [BASE * m for m in MULTS]
        blocks = [DecoderBlock(c[i + 1], c[i], STRIDES[i]) for i in reversed(range(len(STRIDES)))]
        last = conv(c[0], AUDIO, 7, padding=3, bias=False)
        self.layers = nn.Sequential(conv(LATENT, c[-1], 7, padding=3), *blocks, SnakeBeta(c[0]), last)


class VAEBottleneck(nn.Module):
    def forward(self, x: Tensor, noise: Tensor) -> tuple[Tensor, Tensor]:
        mean, scale = x.chunk(2, dim=1)
        stdev = F.softplus(scale) + 1e-4
        var = stdev * stdev
        kl = (mean * mean + var - torch.log(var) - 1).sum(1).mean()
        return noise * stdev + mean, kl


class AudioAutoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.bottleneck, self.decoder = OobleckEncoder(), VAEBottleneck(), OobleckDecoder()

    def forward(self, audio: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        latents, kl = self.bottleneck(self.encoder(audio), noise)
        return latents, kl, self.decoder(latents)


class StableAudio(nn.Module):
    """Audio [N, 2, 8 T], noises [N, 5, T], times [N], a prompt -> the decoded, KL, v predicted and wanted."""

    def __init__(self):
        super().__init__()
        self.pretransform, self.model = AudioAutoencoder(), DiffusionTransformer()
        for name, weight in self.named_parameters():
            if name.endswith("original0"):
                weight.data *= 0.6 + 0.6 * torch.rand_like(weight)
            elif "q_norm" in name or "k_norm" in name:
                weight.data += 0.2 * torch.randn_like(weight)

    def forward(
        self,
        audio: Tensor,
        draw: Tensor,
        noise: Tensor,
        t: Tensor,
        prompt: Tensor,
        mask: Tensor,
        overall: Tensor,
    ) -> tuple[Tensor, ...]:
        latents, kl, decoded = self.pretransform(audio, draw)
        alpha, sigma = (f(t * math.pi / 2)[:, None, None] for f in (torch.cos, torch.sin))
        v = self.model(latents * alpha + noise * sigma, t, prompt, mask, overall)
        return decoded, kl, v, noise * alpha - latents * sigma


def chords() -> tuple[dict[str, Tensor], Tensor]:
    """Two tones in stereo, that a prompt of two to six words and its global numbers tell of."""
    pitch, side = 0.1 + 0.4 * torch.rand(CLIPS, 2), torch.rand(CLIPS, 2, 1)
    tones = torch.sin(pitch[..., None] * torch.arange(LENGTH)) * torch.tensor([0.8, 0.4])[:, None]
    audio = torch.stack([(tones * side).sum(1), (tones * (1 - side)).sum(1)], 1)
    audio = audio + 0.03 * torch.randn_like(audio)
    mask = torch.arange(WORDS) < torch.tensor([WORDS, 2, 4])[:, None]
    prompt = torch.randn(CLIPS, WORDS, TOKEN) + 3 * pitch.sum(1)[:, None, None]
    overall = torch.cat([pitch, side.flatten(1), torch.randn(CLIPS, GLOBAL - 4)], 1)
    draw, noise = torch.randn(2, CLIPS, LATENT, LENGTH // math.prod(STRIDES))
    times = (torch.arange(CLIPS) + torch.rand(CLIPS)) / CLIPS
    inputs = {"audio": audio, "draw": draw, "noise": noise, "t": times}
    return inputs | {"prompt": prompt * mask[..., None], "mask": mask, "overall": overall}, audio


def reconstruction_kl_and_v(outputs: tuple[Tensor, ...], audio: Tensor) -> Tensor:
    """The errors of the audio and of v, and a twentieth of the KL, by four."""
    decoded, kl, v, wanted = outputs
    return (F.mse_loss(decoded, audio) + F.mse_loss(v, wanted) + 0.05 * kl) / 4
