"""A small U-Net for volumes: flat kernels first, a gated residual block below, a head at each resolution."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTHS, KERNELS = (8, 8, 12), ((1, 3, 3), (3, 3, 3), (3, 3, 3))
STRIDES, CLASSES, SHAPE = ((1, 1, 1), (1, 2, 2), (2, 2, 2)), 3, (8, 12, 12)


def varied(module: nn.Module) -> None:
    """Start with weights that let every layer, gain and shift count."""
    if isinstance(module, nn.InstanceNorm3d):
        nn.init.uniform_(module.weight, 0.6, 1.4)
        nn.init.normal_(module.bias, std=0.2)
    elif isinstance(module, nn.Conv3d | nn.ConvTranspose3d):
        nn.init.kaiming_normal_(module.weight, a=0.01)
        if module.bias is not None:
            nn.init.normal_(module.bias, std=0.2)


class ConvNormReLU(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: tuple, stride: tuple = (1, 1, 1), act: bool = True):
        super().__init__()
        self.conv = nn.Conv3d(inputs, outputs, kernel, stride, [k // 2 for k in kernel], bias=False)
        self.norm = nn.InstanceNorm3d(outputs, eps=1e-5, affine=True)
        self.nonlin = nn.LeakyReLU(0.01) if act else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.nonlin(self.norm(self.conv(x)))


class StackedConvBlocks(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: tuple, stride: tuple = (1, 1, 1)):
        super().__init__()
        self.convs = nn.Sequential(
            ConvNormReLU(inputs, outputs, kernel, stride), ConvNormReLU(outputs, outputs, kernel)
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.convs(x)


class SqueezeExcite(nn.Module):
    """Each channel of each volume times a gate made of the means of all channels."""

    def __init__(self, channels: int, squeezed: int):
        super().__init__()
        self.fc1, self.fc2 = nn.Conv3d(channels, squeezed, 1), nn.Conv3d(squeezed, channels, 1)
        self.act, self.gate = nn.ReLU(), nn.Sigmoid()

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean((2, 3, 4), keepdim=True)
        return x * self.gate(self.fc2(self.act(self.fc1(mean))))


class ResidualBlock(nn.Module):
    """Two units and the gate; the way around them is a mean of each cell and a projection."""

    def __init__(self, inputs: int, outputs: int, kernel: tuple, stride: tuple):
        super().__init__()
        self.conv1 = ConvNormReLU(inputs, outputs, kernel, stride)
        self.conv2 = ConvNormReLU(outputs, outputs, kernel)
        self.squeeze_excitation = SqueezeExcite(outputs, outputs // 3)
        self.skip = nn.Sequential(
            nn.AvgPool3d(stride, stride), ConvNormReLU(inputs, outputs, (1, 1, 1), act=False)
        )
        self.nonlin2 = nn.LeakyReLU(0.01)

    def forward(self, x: Tensor) -> Tensor:
        y = self.squeeze_excitation(self.conv2(self.conv1(x)))
        return self.nonlin2(y + self.skip(x))


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        (a, b, c), (flat, cube, last) = WIDTHS, KERNELS
        self.stages = nn.Sequential(
            StackedConvBlocks(1, a, flat, STRIDES[0]),
            StackedConvBlocks(a, b, cube, STRIDES[1]),
            ResidualBlock(b, c, last, STRIDES[2]),
        )

    def forward(self, x: Tensor) -> list[Tensor]:
        skips = []
        for stage in self.stages:
            x = stage(x)
            skips.append(x)
        return skips


class Decoder(nn.Module):
    """From the lowest resolution up; a head at each, the finest first in what it gives."""

    def __init__(self):
        super().__init__()
        (a, b, c), (flat, cube, _) = WIDTHS, KERNELS
        self.transpconvs = nn.ModuleList(
            nn.ConvTranspose3d(i, o, s, s) for i, o, s in ((c, b, STRIDES[2]), (b, a, STRIDES[1]))
        )
        self.stages = nn.ModuleList([StackedConvBlocks(2 * b, b, cube), StackedConvBlocks(2 * a, a, flat)])
        self.seg_layers = nn.ModuleList(nn.Conv3d(width, CLASSES, 1) for width in (c, b, a))

    def forward(self, skips: list[Tensor]) -> tuple[Tensor, ...]:
        x = skips[-1]
        outputs = [self.seg_layers[0](x)]
        for i, (transpconv, stage) in enumerate(zip(self.transpconvs, self.stages, strict=True)):
            x = stage(torch.cat([transpconv(x), skips[-i - 2]], 1))
            outputs.append(self.seg_layers[i + 1](x))
        return tuple(reversed(outputs))


class Segmenter(nn.Module):
    """Volumes [N, 1, D, H, W] -> scores of the classes at three resolutions, the finest first."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = Encoder(), Decoder()
        self.apply(varied)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self.decoder(self.encoder(x))


def volumes() -> tuple[Tensor, Tensor]:
    """Smooth regions of two kinds on a background, each with its own grey under noise."""
    field = F.interpolate(torch.randn(2, 1, 3, 4, 4), SHAPE, mode="trilinear", align_corners=True)
    target = (field > 0.1).long() + (field > 0.6).long()
    grey = torch.tensor([0.0, 0.9, -0.7])[target]
    return grey + 0.4 * torch.randn(grey.shape), target[:, 0]


def dice_and_entropy(scores: Tensor, labels: Tensor) -> Tensor:
    """Cross entropy, and one minus the overlap over the whole batch, the background left out."""
    shares = scores.softmax(1)[:, 1:]
    truth = F.one_hot(labels, CLASSES).movedim(-1, 1)[:, 1:].to(scores)
    axes = (0, 2, 3, 4)
    both, sizes = (shares * truth).sum(axes), shares.sum(axes) + truth.sum(axes)
    dice = (2 * both + 1e-5) / (sizes + 1e-5)
    return F.cross_entropy(scores, labels) + 1 - dice.mean()


def supervised(outputs: tuple[Tensor, ...], target: Tensor) -> Tensor:
    """Each resolution counts half of the finer one; its labels are the nearest of the full ones."""
    weights = [0.5**i for i in range(len(outputs))]
    total = 0
    for weight, scores in zip(weights, outputs, strict=True):
        labels = F.interpolate(target[:, None].to(scores), scores.shape[2:], mode="nearest")[:, 0].long()
        total = total + weight / sum(weights) * dice_and_entropy(scores, labels)
    return total
