"""A small Conv-TasNet: masks over a learned basis that part a waveform into its sources."""

import math

import torch
from torch import Tensor, nn

SOURCES, KERNEL, FEATURES = 2, 10, 24
BOTTLENECK, HIDDEN, TAPS, LAYERS, STACKS = 16, 30, 3, 3, 2
CLIPS, LENGTH = 4, 123


def global_norm(num_channels: int) -> nn.GroupNorm:
    norm = nn.GroupNorm(num_groups=1, num_channels=num_channels, eps=1e-08)
    nn.init.normal_(norm.weight, 1.0, 0.2), nn.init.normal_(norm.bias, std=0.2)
    return norm


def prelu() -> nn.PReLU:
    return nn.PReLU(init=0.25 + 0.1 * torch.randn(()).item())


class ConvBlock(nn.Module):
    """A depthwise-separable convolution, [N, C, T] -> what is added to its input, what skips to the end."""

    def __init__(
        self,
        io_channels: int,
        hidden_channels: int,
        kernel_size: int,
        padding: int,
        dilation: int = 1,
        no_residual: bool = False,
    ):
        super().__init__()
        wide = hidden_channels
        self.conv_layers = nn.Sequential(
            nn.Conv1d(io_channels, wide, kernel_size=1),
            prelu(),
            global_norm(wide),
            nn.Conv1d(wide, wide, kernel_size, padding=padding, dilation=dilation, groups=wide),
            prelu(),
            global_norm(wide),
        )
        self.res_out = None if no_residual else nn.Conv1d(wide, io_channels, kernel_size=1)
        self.skip_out = nn.Conv1d(wide, io_channels, kernel_size=1)

    def forward(self, input: Tensor) -> tuple[Tensor | None, Tensor]:
        feature = self.conv_layers(input)
        residual = None if self.res_out is None else self.res_out(feature)
        return residual, self.skip_out(feature)


class MaskGenerator(nn.Module):
    """[N, F, T] -> a mask for each source, [N, S, F, T]."""

    def __init__(
        self,
        input_dim: int,
        num_sources: int,
        kernel_size: int,
        num_feats: int,
        num_hidden: int,
        num_layers: int,
        num_stacks: int,
    ):
        super().__init__()
        self.input_dim, self.num_sources = input_dim, num_sources
        self.input_norm = global_norm(input_dim)
        self.input_conv = nn.Conv1d(input_dim, num_feats, kernel_size=1)
        self.conv_layers = nn.ModuleList()
        for s in range(num_stacks):
            for k in range(num_layers):
                last = k == num_layers - 1 and s == num_stacks - 1
                block = ConvBlock(num_feats, num_hidden, kernel_size, 2**k, dilation=2**k, no_residual=last)
                self.conv_layers.append(block)
        self.output_prelu = prelu()
        self.output_conv = nn.Conv1d(num_feats, input_dim * num_sources, kernel_size=1)
        self.mask_activate = nn.Sigmoid()

    def forward(self, input: Tensor) -> Tensor:
        feats = self.input_conv(self.input_norm(input))
        output = 0.0
        for layer in self.conv_layers:
            residual, skip = layer(feats)
            if residual is not None:
                feats = feats + residual
            output = output + skip
        output = self.mask_activate(self.output_conv(self.output_prelu(output)))
        return output.view(len(input), self.num_sources, self.input_dim, -1)


class ConvTasNet(nn.Module):
    """Waveforms [N, 1, L] -> those of their sources, [N, S, L]."""

    def __init__(self):
        super().__init__()
        self.num_sources, self.enc_num_feats = SOURCES, FEATURES
        self.enc_kernel_size, self.enc_stride = KERNEL, KERNEL // 2
        sizes = {"kernel_size": KERNEL, "stride": self.enc_stride, "padding": self.enc_stride, "bias": False}
        self.encoder = nn.Conv1d(1, FEATURES, **sizes)
        self.mask_generator = MaskGenerator(FEATURES, SOURCES, TAPS, BOTTLENECK, HIDDEN, LAYERS, STACKS)
        self.decoder = nn.ConvTranspose1d(FEATURES, 1, **sizes)

    def _align_num_frames_with_strides(self, input: Tensor) -> tuple[Tensor, int]:
        """The waveform with zeros after it, so that strides fill it, and their count."""
        batch_size, num_channels, num_frames = input.shape
        is_odd = self.enc_kernel_size % 2
        num_strides = (num_frames - is_odd) // self.enc_stride
        num_remainings = num_frames - (is_odd + num_strides * self.enc_stride)
        if num_remainings == 0:
            return input, 0
        num_paddings = self.enc_stride - num_remainings
        return torch.cat([input, input.new_zeros(batch_size, num_channels, num_paddings)], 2), num_paddings

    def forward(self, input: Tensor) -> Tensor:
        padded, num_pads = self._align_num_frames_with_strides(input)
        batch_size, num_padded_frames = padded.shape[0], padded.shape[2]
        feats = self.encoder(padded)
        masked = self.mask_generator(feats) * feats.unsqueeze(1)
        masked = masked.view(batch_size * self.num_sources, self.enc_num_feats, -1)
        decoded = self.decoder(masked)
        output = decoded.view(batch_size, self.num_sources, num_padded_frames)
        if num_pads > 0:
            output = output[..., :-num_pads]
        return output


def voices() -> tuple[Tensor, Tensor]:
    """Mixtures of a low hum and a high chirp under bursts; clips of several lengths, then zeros."""
    time = torch.arange(LENGTH)
    draw = torch.rand(5, CLIPS, 1)
    pitch = 0.1 + 0.1 * draw[0]
    hum = sum(torch.sin(k * (pitch * time + 6 * draw[1])) / k for k in (1, 2, 3))
    chirp = torch.sin((1 + 0.5 * draw[2] + 0.004 * time) * time)
    chirp = chirp * (0.3 + torch.sin(0.15 * time + 6 * draw[3]).relu())
    sources = 0.1 * torch.stack([hum, chirp * (0.7 + draw[4])], 1)
    sources = sources + 0.002 * torch.randn_like(sources)
    ends = torch.cat([torch.tensor([LENGTH]), torch.randint(2 * LENGTH // 3, LENGTH, (CLIPS - 1,))])
    sources = sources * (time < ends[:, None, None])
    return sources.sum(1, keepdim=True), sources


def lacking_si_snr(estimate: Tensor, sources: Tensor) -> Tensor:
    """One less a twentieth of the scale-invariant signal-to-noise ratio in decibels, within each clip."""
    mask = (sources != 0).any(1, keepdim=True).to(estimate)
    count = mask.sum(2, keepdim=True)
    estimate, sources = (mask * (x - (mask * x).sum(2, keepdim=True) / count) for x in (estimate, sources))
    scale = (estimate * sources).sum(2, keepdim=True) / sources.square().sum(2, keepdim=True)
    found = scale * sources
    power, noise = (x.square().sum(2) + 1e-8 for x in (found, estimate - found))
    return 1 - (power / noise).log().mean() / (2 * math.log(10))
