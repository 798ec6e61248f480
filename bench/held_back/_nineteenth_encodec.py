"""A small EnCodec: causal convolutions with weight norm, residual codebooks, critics of spectrograms."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CHANNELS, WIDTH, LATENT, LENGTH, FILTERS, SLOPE, SIZES = 2, 4, 6, 93, 4, 0.2, (16, 32)
CODES, BOOKS, DECAY, SMOOTH, SPREAD, ONE = 8, 3, 0.97, 1e-3, 1.3, (1,)
KINDS, NAMES = ("real", "generated", "fake"), ("logits", "feature_0", "feature_1", "feature_2")
GIVEN = (f"{kind}_{i}_{name}" for kind in KINDS for i in range(len(SIZES)) for name in NAMES)
OUTPUTS = "audio", "latents", "commitment", *GIVEN


class WeightNormed(nn.Module):
    """A weight of direction v and length g for each index of its first axis, and a bias."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple, stride: tuple = ONE, dilation: tuple = ONE):
        super().__init__()
        shape = (inputs, outputs) if isinstance(self, SConvTranspose1d) else (outputs, inputs)
        self.weight_v = nn.Parameter(torch.randn(*shape, *kernel) / math.sqrt(inputs * math.prod(kernel)))
        self.weight_g = nn.Parameter(torch.empty(shape[0], 1, *(1 for _ in kernel)))
        nn.init.uniform_(self.weight_g, 0.8, 1.4)
        self.bias = nn.Parameter(0.2 * torch.randn(outputs))
        self.kernel, self.stride, self.dilation = kernel, stride, dilation

    def weight(self) -> Tensor:
        return self.weight_v * (self.weight_g / self.weight_v.flatten(1).norm(dim=1).view_as(self.weight_g))


class SConv1d(WeightNormed):
    """Causal: it mirrors the past, and as much on the right as the last whole frame needs."""

    def forward(self, x: Tensor) -> Tensor:
        (kernel,), (stride,), (dilation,) = self.kernel, self.stride, self.dilation
        effective, length = (kernel - 1) * dilation + 1, x.shape[2]
        past = effective - stride
        frames = math.ceil((length - effective + past) / stride + 1)
        x = F.pad(x, (past, (frames - 1) * stride + effective - past - length), mode="reflect")
        return F.conv1d(x, self.weight(), self.bias, stride, dilation=dilation)


class SConvTranspose1d(WeightNormed):
    """What is more than a stride for each frame is trimmed on the right."""

    def forward(self, x: Tensor) -> Tensor:
        y = F.conv_transpose1d(x, self.weight(), self.bias, self.stride)
        return y[..., : y.shape[2] - (self.kernel[0] - self.stride[0])]


class NormConv2d(WeightNormed):
    def forward(self, x: Tensor) -> Tensor:
        padding = [(k - 1) * d // 2 for k, d in zip(self.kernel, self.dilation, strict=True)]
        return F.conv2d(x, self.weight(), self.bias, self.stride, padding, self.dilation)


class SEANetResnetBlock(nn.Module):
    def __init__(self, dim: int, dilation: int):
        super().__init__()
        inner, outer = SConv1d(dim, dim // 2, (3,), dilation=(dilation,)), SConv1d(dim // 2, dim, (1,))
        self.block, self.shortcut = nn.Sequential(nn.ELU(), inner, nn.ELU(), outer), SConv1d(dim, dim, (1,))

    def forward(self, x: Tensor) -> Tensor:
        return self.shortcut(x) + self.block(x)


class SLSTM(nn.Module):
    """Two layers over the frames of [N, C, T], with a skip around both."""

    def __init__(self, dim: int):
        super().__init__()
        self.lstm = nn.LSTM(dim, dim, 2)
        for weight in self.lstm.parameters():
            nn.init.normal_(weight, std=0.3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.permute(2, 0, 1)
        return (self.lstm(x)[0] + x).permute(1, 2, 0)


class EuclideanCodebook(nn.Module):
    """The nearest code of each row; in training the codes follow the means of what was given to them."""

    def __init__(self, spread: float):
        super().__init__()
        embed, size = spread * torch.randn(CODES, LATENT), torch.empty(CODES).uniform_(1, 4)
        for name, value in (("embed", embed), ("cluster_size", size), ("embed_avg", embed * size[:, None])):
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.detach().flatten(0, 1)
        squares = rows.square().sum(1, keepdim=True) + self.embed.square().sum(1)
        nearest = (2 * rows @ self.embed.t() - squares).argmax(1)
        quantized = F.embedding(nearest, self.embed).view_as(x)
        if self.training:
            onehot = F.one_hot(nearest, CODES).to(rows)
            self.cluster_size.mul_(DECAY).add_(onehot.sum(0), alpha=1 - DECAY)
            self.embed_avg.mul_(DECAY).add_(onehot.t() @ rows, alpha=1 - DECAY)
            total = self.cluster_size.sum()
            smoothed = (self.cluster_size + SMOOTH) / (total + CODES * SMOOTH) * total
            self.embed.copy_(self.embed_avg / smoothed[:, None])
        return quantized


class ResidualVectorQuantization(nn.Module):
    """Each codebook takes what the earlier ones left; straight through all of them in training."""

    def __init__(self):
        super().__init__()
        books = (EuclideanCodebook(SPREAD * 0.7**i) for i in range(BOOKS))
        self.layers = nn.ModuleList(nn.Sequential(OrderedDict(_codebook=book)) for book in books)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        residual, total, losses = x.transpose(1, 2), 0, []
        for layer in self.layers:
            quantized = layer(residual)
            losses.append(F.mse_loss(residual, quantized))
            residual, total = residual - quantized, total + quantized.transpose(1, 2)
        return x + (total - x).detach() if self.training else total, torch.stack(losses).mean()


class Spectrogram(nn.Module):
    """Complex, of [N, C, T], in units of the window's norm."""

    def __init__(self, size: int):
        super().__init__()
        self.register_buffer("window", torch.hann_window(size))

    def forward(self, x: Tensor) -> Tensor:
        size = len(self.window)
        z = torch.stft(x.flatten(0, 1), size, size // 4, size, self.window, center=False, return_complex=True)
        return z.unflatten(0, x.shape[:2]) / self.window.square().sum().sqrt()


class DiscriminatorSTFT(nn.Module):
    """Real and imaginary parts as channels of [N, C, frames, bins]; the logits, then all features."""

    def __init__(self, size: int):
        super().__init__()
        f, k, one = FILTERS, (3, 5), (1, 1)
        self.spec_transform, self.activation = Spectrogram(size), nn.LeakyReLU(SLOPE)
        convs = [NormConv2d(f, f, k, (1, 2), (dilation, 1)) for dilation in (1, 2)]
        self.convs = nn.ModuleList([NormConv2d(2 * CHANNELS, f, k, one, one), *convs])
        self.conv_post = NormConv2d(f, 1, (3, 3), one, one)

    def forward(self, x: Tensor) -> list[Tensor]:
        z, features = self.spec_transform(x), []
        z = torch.cat([z.real, z.imag], 1).transpose(2, 3)
        for conv in self.convs:
            z = self.activation(conv(z))
            features.append(z)
        return [self.conv_post(z), *features]


class EncodecModel(nn.Module):
    """Waves [N, 2, T] -> the waves again, their quantised latents, the commitment, logits and features."""

    def __init__(self):
        super().__init__()
        a, b, c, res, elu, rise = WIDTH, 2 * WIDTH, 4 * WIDTH, SEANetResnetBlock, nn.ELU, SConvTranspose1d
        layers = [SConv1d(CHANNELS, a, (7,)), res(a, 1), elu(), SConv1d(a, b, (4,), (2,)), res(b, 3), elu()]
        layers += [SConv1d(b, c, (8,), (4,)), SLSTM(c), elu(), SConv1d(c, LATENT, (7,))]
        self.encoder = nn.Sequential(OrderedDict(model=nn.Sequential(*layers)))
        self.quantizer = nn.Sequential(OrderedDict(vq=ResidualVectorQuantization()))
        layers = [SConv1d(LATENT, c, (7,)), SLSTM(c), elu(), rise(c, b, (8,), (4,)), res(b, 1), elu()]
        layers += [rise(b, a, (4,), (2,)), res(a, 3), elu(), SConv1d(a, CHANNELS, (7,))]
        self.decoder = nn.Sequential(OrderedDict(model=nn.Sequential(*layers)))
        self.discriminators = nn.ModuleList(DiscriminatorSTFT(size) for size in SIZES)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        scale = 1e-8 + x.mean(1, keepdim=True).square().mean(2, keepdim=True).sqrt()
        latents, commitment = self.quantizer(self.encoder(x / scale))
        audio = self.decoder(latents)[..., : x.shape[2]] * scale
        heard = x, audio, audio.detach()
        given = [value for wave in heard for judge in self.discriminators for value in judge(wave)]
        return dict(zip(OUTPUTS, (audio, latents, commitment, *given), strict=True))


def waves() -> tuple[Tensor, Tensor]:
    """Three tones each, not alike in both channels, and noise; no two waves equally loud."""
    pitch, phase = 0.04 + 0.5 * torch.rand(2, 1, 3, 1), 6.3 * torch.rand(2, 1, 3, 1)
    tones = torch.sin(pitch * torch.arange(LENGTH) + phase) * torch.rand(2, CHANNELS, 3, 1)
    x = (tones.sum(2) + 0.1 * torch.randn(2, CHANNELS, LENGTH)) * torch.tensor([0.5, 1.2]).view(2, 1, 1)
    return x, x.clone()


def magnitudes(x: Tensor, n: int) -> Tensor:
    z = torch.stft(x.flatten(0, 1), n, n // 4, window=torch.hann_window(n).to(x), return_complex=True)
    return (z.real.square() + z.imag.square() + 1e-6).sqrt() / n**0.5


def codec(outputs: dict[str, Tensor], target: Tensor) -> Tensor:
    """The generator's part and the discriminator's, in one."""
    total = (outputs["audio"] - target).abs().mean() + outputs["commitment"]
    for i, size in enumerate(SIZES):
        error = magnitudes(outputs["audio"], size) - magnitudes(target, size)
        total = total + error.abs().mean() + error.square().mean()
        real, made, fake = (outputs[f"{kind}_{i}_logits"] for kind in KINDS)
        total = total + sum(F.relu(1 + sign * x).mean() for sign, x in ((-1, real), (-1, made), (1, fake)))
        for name in NAMES[1:]:
            real, made = outputs[f"real_{i}_{name}"].detach(), outputs[f"generated_{i}_{name}"]
            total = total + (made - real).abs().mean() / real.abs().mean()
    return 0.1 * total
