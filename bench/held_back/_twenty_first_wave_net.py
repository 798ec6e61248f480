"""A small WaveNet vocoder: mel frames and a speaker steer two stacks of dilated causal convolutions."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

CLASSES, SPEAKERS, MELS, FRAMES, RECORDINGS = 32, 4, 8, 5, 4
RESIDUAL, GATE, SKIP, GIN = 16, 28, 20, 6
STACKS, LAYERS, SCALES = 2, 6, (2, 2)
SAMPLES = FRAMES * math.prod(SCALES)


class CausalConv1d(nn.Conv1d):
    """A convolution of two taps that looks back only; sample by sample it keeps what it was given."""

    def __init__(self, in_channels: int, out_channels: int, dilation: int = 1):
        super().__init__(in_channels, out_channels, 2, padding=dilation, dilation=dilation)
        self.clear_buffer()

    def clear_buffer(self) -> None:
        self.input_buffer = self._linearized_weight = None

    def forward(self, x: Tensor, is_incremental: bool = False) -> Tensor:
        if is_incremental:
            return self.incremental_forward(x)
        return super().forward(x)[..., : x.shape[-1]]

    def incremental_forward(self, x: Tensor) -> Tensor:
        if self.input_buffer is None:
            self.input_buffer = x.new_zeros(*x.shape[:2], self.dilation[0] + 1)
            self._linearized_weight = self.weight.flatten(1)
        self.input_buffer = torch.cat([self.input_buffer[..., 1:], x], -1)
        taps = self.input_buffer[..., :: self.dilation[0]].flatten(1)
        return F.linear(taps, self._linearized_weight, self.bias)[..., None]


class Conv1d1x1(nn.Conv1d):
    def __init__(self, in_channels: int, out_channels: int, bias: bool = True):
        super().__init__(in_channels, out_channels, 1, bias=bias)


class ResidualConv1dGLU(nn.Module):
    """A gated unit [N, R, T] with its conditions; the last gives nothing but its skip."""

    def __init__(self, dilation: int, last: bool):
        super().__init__()
        self.conv = weight_norm(CausalConv1d(RESIDUAL, GATE, dilation))
        self.conv1x1c = Conv1d1x1(MELS, GATE, bias=False)
        self.conv1x1g = Conv1d1x1(GIN, GATE, bias=False)
        self.conv1x1_out = None if last else Conv1d1x1(GATE // 2, RESIDUAL)
        self.conv1x1_skip = Conv1d1x1(GATE // 2, SKIP)

    def forward(self, x: Tensor, c: Tensor, g: Tensor, is_incremental: bool) -> tuple[Tensor, Tensor]:
        residual = x
        a, b = self.conv(x, is_incremental).chunk(2, dim=1)
        ca, cb = self.conv1x1c(c).chunk(2, dim=1)
        ga, gb = self.conv1x1g(g).chunk(2, dim=1)
        x = torch.tanh(a + ca + ga) * torch.sigmoid(b + cb + gb)
        s = self.conv1x1_skip(x)
        if self.conv1x1_out is not None:
            residual = (self.conv1x1_out(x) + residual) * math.sqrt(0.5)
        return residual, s


class WaveNet(nn.Module):
    """Classes x [N, T], frames c [N, M, F], speakers g [N] -> logits [N, Q, T] of the next classes."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(CLASSES, RESIDUAL)
        self.first_conv = weight_norm(CausalConv1d(RESIDUAL, RESIDUAL))
        per_stack = LAYERS // STACKS
        self.conv_layers = nn.ModuleList(
            ResidualConv1dGLU(2 ** (i % per_stack), i == LAYERS - 1) for i in range(LAYERS)
        )
        self.last_conv_layers = nn.ModuleList(
            [nn.ReLU(), Conv1d1x1(SKIP, SKIP), nn.ReLU(), Conv1d1x1(SKIP, CLASSES)]
        )
        self.embed_speakers = nn.Embedding(SPEAKERS, GIN)
        self.upsample_conv = nn.ModuleList()
        for s in SCALES:
            conv = nn.ConvTranspose2d(1, 1, (3, 2 * s), stride=(1, s), padding=(1, s // 2))
            nn.init.uniform_(conv.weight, -0.2, 0.3)
            self.upsample_conv += [weight_norm(conv), nn.LeakyReLU(0.4)]
        for module in self.modules():
            if hasattr(module, "parametrizations"):
                length = module.parametrizations.weight.original0
                length.data *= torch.empty_like(length).uniform_(1.5, 2.5)
            elif isinstance(module, Conv1d1x1):
                nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if isinstance(module, nn.Conv1d) and module.bias is not None:
                nn.init.normal_(module.bias, std=0.2)

    def clear_buffer(self) -> None:
        for module in self.modules():
            if isinstance(module, CausalConv1d):
                module.clear_buffer()

    def decode(self, x: Tensor, c: Tensor, g: Tensor, is_incremental: bool) -> tuple[Tensor, Tensor]:
        x = self.first_conv(self.embed(x).transpose(1, 2), is_incremental)
        skips = 0
        for f in self.conv_layers:
            x, h = f(x, c, g, is_incremental)
            skips = skips + h
        x = skips = skips * math.sqrt(1.0 / len(self.conv_layers))
        for f in self.last_conv_layers:
            x = f(x)
        return x, skips

    def forward(self, x: Tensor, c: Tensor, g: Tensor) -> dict[str, Tensor]:
        c, g = c.unsqueeze(1), self.embed_speakers(g)[..., None].expand(-1, -1, x.shape[1])
        for f in self.upsample_conv:
            c = f(c)
        c = c.squeeze(1)
        if self.training:
            logits, skips = self.decode(x, c, g, False)
        else:
            self.clear_buffer()
            spans = (slice(t, t + 1) for t in range(x.shape[1]))
            steps = [self.decode(x[:, t], c[..., t], g[..., t], True) for t in spans]
            self.clear_buffer()
            logits, skips = (torch.cat(part, -1) for part in zip(*steps, strict=True))
        return {"logits": logits, "skips": skips}


def mu_law(wave: Tensor) -> Tensor:
    """Samples within -1 and 1 -> classes, finer where it is quiet."""
    mu = CLASSES - 1
    bent = wave.sign() * torch.log1p(mu * wave.abs()) / math.log1p(mu)
    return ((bent + 1) / 2 * mu + 0.5).long()


def recordings() -> tuple[dict[str, Tensor], Tensor]:
    """Tones of each speaker's pitch; the frames tell how high and how loud they are."""
    g = torch.randint(SPEAKERS, (RECORDINGS,))
    bend, loud = 0.7 + 0.6 * torch.rand(RECORDINGS, FRAMES), 0.3 + 0.6 * torch.rand(RECORDINGS, FRAMES)
    rate = (0.4 + 0.25 * g)[:, None] * bend
    bins = torch.arange(MELS)[:, None]
    c = 2 * loud[:, None] * torch.exp(-(bins - 4 * rate[:, None]).square() / 3)
    hop = SAMPLES // FRAMES
    rate, loud = (
        F.pad(z.repeat_interleave(hop, 1)[:, None], (0, 1), "replicate")[:, 0] for z in (rate, loud)
    )
    phase = rate.cumsum(1) + 6 * torch.rand(RECORDINGS, 1)
    classes = mu_law(loud * (0.8 * phase.sin() + 0.2 * (2 * phase).cos()))
    c = c + 0.1 * torch.randn_like(c)
    return {"x": classes[:, :-1], "c": c, "g": g}, classes[:, 1:]


def next_sample(outputs: dict[str, Tensor], classes: Tensor) -> Tensor:
    return F.cross_entropy(outputs["logits"], classes)
