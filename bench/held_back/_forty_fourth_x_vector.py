"""A small x-vector network: log mel bank, dilated layers, two poolings, segments and a margin head."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BINS, MELS, FRAMES, SPEAKERS, UTTERANCES = 33, 14, 27, 7, 6
LAYERS = ((20, 5, 1), (24, 3, 2), (28, 3, 3), (36, 1, 1))  # channels, taps, dilation
ATTENTION, SEGMENTS, LOG_EPS, POOL_EPS = 16, (40, 32), 1e-3, 1e-4
MARGIN, SCALE = 0.3, 8.0


def drawn(layer: nn.Module) -> nn.Module:
    """The layer with all its weights at random, a norm's near one."""
    if isinstance(layer, nn.BatchNorm1d | nn.LayerNorm):
        nn.init.normal_(layer.weight, 1.0, 0.2)
    else:
        nn.init.normal_(layer.weight, std=1.2 / math.sqrt(layer.weight[0].numel()))
    nn.init.normal_(layer.bias, std=0.2)
    return layer


def mel_matrix() -> Tensor:
    """Triangles that are even on the mel scale, [BINS, MELS]; the last bin is 4 kHz."""
    points = torch.linspace(0, 2595 * math.log10(1 + 4000 / 700), MELS + 2)
    edges = 700 * (10 ** (points / 2595) - 1)
    hertz = torch.linspace(0, 4000, BINS)[:, None]
    up = (hertz - edges[:-2]) / (edges[1:-1] - edges[:-2])
    down = (edges[2:] - hertz) / (edges[2:] - edges[1:-1])
    return torch.minimum(up, down).clamp(min=0)


class FilterBank(nn.Module):
    """A power spectrogram [N, T, BINS] -> log mel features [N, MELS, T] without their mean over time."""

    def __init__(self):
        super().__init__()
        self.register_buffer("fb", mel_matrix())

    def forward(self, power: Tensor, mask: Tensor) -> Tensor:
        x = torch.log(torch.matmul(power, self.fb) + LOG_EPS).transpose(1, 2)
        mean = (x * mask).sum(2, keepdim=True) / mask.sum(2, keepdim=True)
        return (x - mean) * mask


class TDNNLayer(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, kernel_size: int, dilation: int):
        super().__init__()
        edge = dilation * (kernel_size - 1) // 2
        self.conv = drawn(nn.Conv1d(in_channels, out_channels, kernel_size, dilation=dilation, padding=edge))
        self.activation = nn.ReLU()
        self.norm = drawn(nn.BatchNorm1d(out_channels))
        nn.init.normal_(self.norm.running_mean, 0.4, 0.1), nn.init.uniform_(self.norm.running_var, 0.4, 0.9)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.norm(self.activation(self.conv(x))) * mask


class StatisticsPooling(nn.Module):
    """Mean and unbiased standard deviation over the valid frames."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        count = mask.sum(2)
        mean = (x * mask).sum(2) / count
        var = ((x - mean[:, :, None]) ** 2 * mask).sum(2) / (count - 1)
        return torch.cat([mean, torch.sqrt(var + POOL_EPS)], dim=1)


class AttentiveStatisticsPooling(nn.Module):
    """Mean and standard deviation under a softmax over the valid frames, one for each channel."""

    def __init__(self, channels: int, attention_channels: int):
        super().__init__()
        self.linear1 = drawn(nn.Conv1d(channels, attention_channels, 1))
        self.linear2 = drawn(nn.Conv1d(attention_channels, channels, 1))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        score = self.linear2(torch.tanh(self.linear1(x)))
        alpha = torch.softmax(score.masked_fill(mask == 0, -math.inf), dim=2)
        mean = (alpha * x).sum(2)
        var = (alpha * x**2).sum(2) - mean**2
        return torch.cat([mean, torch.sqrt(var + POOL_EPS)], dim=1)


class SegmentLayer(nn.Module):
    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.affine = drawn(nn.Linear(in_features, out_features))
        self.activation = nn.ReLU()
        self.norm = drawn(nn.LayerNorm(out_features))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.activation(self.affine(x)))


class AAMSoftmax(nn.Module):
    """Scaled cosines with an additive angular margin (the easy one) in training, plain in evaluation."""

    def __init__(self, in_features: int, out_features: int):
        super().__init__()
        self.weight = nn.Parameter(0.3 * torch.randn(out_features, in_features))
        self.cos_m, self.sin_m = math.cos(MARGIN), math.sin(MARGIN)

    def forward(self, x: Tensor, label: Tensor) -> Tensor:
        cosine = F.linear(F.normalize(x), F.normalize(self.weight))
        if not self.training:
            return cosine
        sine = torch.sqrt((1.0 - cosine**2).clamp(0, 1))
        phi = cosine * self.cos_m - sine * self.sin_m
        phi = torch.where(cosine > 0, phi, cosine)
        one_hot = F.one_hot(label, len(self.weight)).to(cosine)
        return SCALE * (one_hot * phi + (1.0 - one_hot) * cosine)


class XVector(nn.Module):
    """A power spectrogram, lengths and speakers -> logits of the speakers and the embedding."""

    def __init__(self):
        super().__init__()
        self.fbank, self.tdnn, width = FilterBank(), nn.ModuleList(), MELS
        for channels, taps, dilation in LAYERS:
            self.tdnn.append(TDNNLayer(width, channels, taps, dilation))
            width = channels
        self.stat_pool = StatisticsPooling()
        self.att_pool = AttentiveStatisticsPooling(width, ATTENTION)
        self.segments = nn.ModuleList([SegmentLayer(4 * width, SEGMENTS[0]), SegmentLayer(*SEGMENTS)])
        self.head = AAMSoftmax(SEGMENTS[1], SPEAKERS)

    def forward(self, power: Tensor, lengths: Tensor, label: Tensor) -> tuple[Tensor, Tensor]:
        steps = torch.arange(power.shape[1], device=power.device)
        mask = (steps < lengths[:, None])[:, None].to(power)
        x = self.fbank(power, mask)
        for layer in self.tdnn:
            x = layer(x, mask)
        x = torch.cat([self.stat_pool(x, mask), self.att_pool(x, mask)], dim=1)
        for segment in self.segments:
            x = segment(x)
        return self.head(x, label), x


def voices() -> tuple[dict[str, Tensor], Tensor]:
    """Harmonics of a moving pitch under a speaker's formant, padded with silence."""
    label = torch.randint(SPEAKERS, (UTTERANCES,))
    lengths = torch.randint(15, FRAMES + 1, (UTTERANCES,))
    time, bins = torch.arange(FRAMES)[:, None], torch.arange(BINS)
    who, phase = label[:, None, None], 6 * torch.rand(UTTERANCES, 1, 1)
    pitch = 4 + 0.5 * who + torch.sin(time / 4 + phase)
    formant = torch.exp(-((bins - 6 - 3 * who - 2 * torch.cos(time / 3 + phase)) ** 2) / 40)
    power = (1.1 + torch.cos(math.tau * bins / pitch)) * (0.1 + formant)
    power = power * (0.5 + torch.rand_like(power)) * (time < lengths[:, None, None])
    return {"power": power, "lengths": lengths, "label": label}, label


def speakers(outputs: tuple[Tensor, Tensor], label: Tensor) -> Tensor:
    """A quarter of the cross entropy."""
    return F.cross_entropy(outputs[0], label) / 4
