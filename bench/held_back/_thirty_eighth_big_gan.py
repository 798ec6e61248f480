"""A small BigGAN: a generator of classes and chunks of noise, a projection discriminator, hinge losses."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIGH, WIDE, CLASSES, SHARED, CHUNK, PICTURES = 3, 4, 6, 7, 5, 4
UP, DOWN = (20, 16, 10), (3, 16, 22, 26)


class SN:
    """Divides a weight by its largest singular value, after one power iteration."""

    def spectral(self) -> None:
        nn.init.normal_(self.weight, std=0.2)
        if getattr(self, "bias", None) is not None:
            nn.init.normal_(self.bias, std=0.1)
        self.register_buffer("u0", torch.randn(1, len(self.weight)))

    def w_(self) -> Tensor:
        w = self.weight.flatten(1)
        with torch.no_grad():
            v = F.normalize(self.u0 @ w)
            u = F.normalize(v @ w.T)
            if self.training:
                self.u0.copy_(u)
        return self.weight / torch.squeeze(v @ w.T @ u.T)


class SNConv2d(nn.Conv2d, SN):
    def __init__(self, in_channels: int, out_channels: int, size: int = 3, bias: bool = True):
        super().__init__(in_channels, out_channels, size, padding=size // 2, bias=bias)
        self.spectral()

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.w_(), self.bias, padding=self.padding)


class SNLinear(nn.Linear, SN):
    def __init__(self, in_features: int, out_features: int, bias: bool = True):
        super().__init__(in_features, out_features, bias)
        self.spectral()

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.w_(), self.bias)


class SNEmbedding(nn.Embedding, SN):
    def __init__(self, count: int, width: int):
        super().__init__(count, width)
        self.spectral()

    def forward(self, x: Tensor) -> Tensor:
        return F.embedding(x, self.w_())


class CCBN(nn.Module):
    """A batch norm whose gain and bias come from the class and a chunk of noise."""

    def __init__(self, output_size: int):
        super().__init__()
        self.gain, self.bias = (SNLinear(SHARED + CHUNK, output_size, bias=False) for _ in range(2))
        self.eps, self.momentum = 1e-5, 0.1
        self.register_buffer("stored_mean", 0.1 * torch.randn(output_size))
        self.register_buffer("stored_var", 0.8 + 0.4 * torch.rand(output_size))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        gain, bias = (1 + self.gain(y))[:, :, None, None], self.bias(y)[:, :, None, None]
        stats = self.stored_mean, self.stored_var
        out = F.batch_norm(x, *stats, None, None, self.training, self.momentum, self.eps)
        return out * gain + bias


class GBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int):
        super().__init__()
        self.conv1, self.conv2 = SNConv2d(in_channels, out_channels), SNConv2d(out_channels, out_channels)
        self.conv_sc = SNConv2d(in_channels, out_channels, 1)
        self.bn1, self.bn2 = CCBN(in_channels), CCBN(out_channels)
        self.activation, self.upsample = nn.ReLU(), nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.upsample(self.activation(self.bn1(x, y)))
        h = self.activation(self.bn2(self.conv1(h), y))
        return self.conv2(h) + self.conv_sc(self.upsample(x))


class DBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int, preactivation: bool, downsample: bool):
        super().__init__()
        self.conv1, self.conv2 = SNConv2d(in_channels, out_channels), SNConv2d(out_channels, out_channels)
        self.conv_sc = SNConv2d(in_channels, out_channels, 1)
        self.activation, self.preactivation = nn.ReLU(), preactivation
        self.downsample = nn.AvgPool2d(2) if downsample else nn.Identity()

    def shortcut(self, x: Tensor) -> Tensor:
        if self.preactivation:
            return self.downsample(self.conv_sc(x))
        return self.conv_sc(self.downsample(x))

    def forward(self, x: Tensor) -> Tensor:
        h = self.activation(x) if self.preactivation else x
        h = self.conv2(self.activation(self.conv1(h)))
        return self.downsample(h) + self.shortcut(x)


class Generator(nn.Module):
    def __init__(self):
        super().__init__()
        self.shared, self.linear = nn.Embedding(CLASSES, SHARED), SNLinear(CHUNK, UP[0] * HIGH * WIDE)
        self.blocks = nn.ModuleList(nn.ModuleList([GBlock(*UP[i : i + 2])]) for i in range(2))
        norm = nn.BatchNorm2d(UP[-1])
        nn.init.normal_(norm.weight, 1, 0.2), nn.init.normal_(norm.bias, std=0.1)
        nn.init.normal_(norm.running_mean, std=0.1), nn.init.uniform_(norm.running_var, 0.8, 1.2)
        self.output_layer = nn.Sequential(norm, nn.ReLU(), SNConv2d(UP[-1], 3))

    def forward(self, z: Tensor, y: Tensor) -> Tensor:
        zs = torch.split(z, CHUNK, 1)
        ys = [torch.cat([y, item], 1) for item in zs[1:]]
        h = self.linear(zs[0]).unflatten(1, (-1, HIGH, WIDE))
        for index, blocklist in enumerate(self.blocks):
            h = blocklist[0](h, ys[index])
            for block in blocklist[1:]:
                h = block(h)
        return torch.tanh(self.output_layer(h))


class Discriminator(nn.Module):
    def __init__(self):
        super().__init__()
        blocks = [[DBlock(DOWN[i], DOWN[i + 1], i > 0, i < 2)] for i in range(3)]
        self.blocks = nn.ModuleList(map(nn.ModuleList, blocks))
        self.activation = nn.ReLU()
        self.linear, self.embed = SNLinear(DOWN[-1], 1), SNEmbedding(CLASSES, DOWN[-1])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = x
        for blocklist in self.blocks:
            for block in blocklist:
                h = block(h)
        h = torch.sum(self.activation(h), [2, 3])
        return self.linear(h) + torch.sum(self.embed(y) * h, 1, keepdim=True)


class BigGAN(nn.Module):
    """Noise, pictures and the classes of both -> pictures, the discriminator's losses, the generator's."""

    def __init__(self):
        super().__init__()
        self.G, self.D = Generator(), Discriminator()

    def forward(self, z: Tensor, gy: Tensor, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        g_z = self.G(z, self.G.shared(gy))
        scores = self.D(torch.cat([g_z.detach(), x, g_z]), torch.cat([gy, dy, gy]))
        d_fake, d_real, g_fake = torch.split(scores, [len(z), len(x), len(z)])
        return g_z, F.relu(1 + d_fake).mean(), F.relu(1 - d_real).mean(), -g_fake.mean()


def blobs() -> tuple[dict[str, Tensor], Tensor]:
    """Noise, and soft blobs whose class tells their colour and their height."""
    gy, dy = torch.randint(CLASSES, (2, PICTURES))
    down, across = torch.linspace(-1, 1, 4 * HIGH)[:, None], torch.linspace(-1, 1, 4 * WIDE)
    place = torch.rand(PICTURES, 1, 1) - 0.5
    far = (down - (dy / CLASSES - 0.4)[:, None, None]) ** 2 + (across - place) ** 2
    colour = torch.cos(2 * math.pi * dy[:, None] / CLASSES + 2 * torch.arange(3))[:, :, None, None]
    x = (colour * torch.exp(-4 * far)[:, None] - 0.2 + 0.05 * torch.randn(PICTURES, 3, *far.shape[1:])).tanh()
    return {"z": torch.randn(PICTURES, 3 * CHUNK), "gy": gy, "x": x, "dy": dy}, torch.tensor([1, 1, 0.5])


def hinges(outputs: tuple[Tensor, ...], share: Tensor) -> Tensor:
    """The losses by their shares, and a tenth of all."""
    return (torch.stack(outputs[1:]) * share).sum() / 10
