"""Networks whose ports turn on the order of elements: flattening, pixel shuffle, patches, token mixing."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, filled, linear_of
from bench.tasks import _classes, _task


class VGG(nn.Module):
    """[N, 3, 12, 12] -> [N, 5]; the classifier reads the flattened map."""

    def __init__(self):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(12, 16, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(nn.Linear(144, 24), nn.ReLU(), nn.Linear(24, 5))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.flatten(self.features(x)))


vgg = _task("ported_vgg", VGG, lambda: (torch.randn(8, 3, 12, 12), _classes(8, 5)))


class KerasVGG(nn.Module):
    """Channels last, flattened in that order; kernels [H, W, in, out] and [in, out]."""

    def __init__(self, model: VGG, reordered: bool = True):
        super().__init__()
        for i, conv in enumerate((model.features[0], model.features[3])):
            kernel = conv.weight.permute(2, 3, 1, 0)
            setattr(self, f"block{i}_kernel", copied(kernel))
            setattr(self, f"block{i}_bias", copied(conv.bias))
        first, last = model.classifier[0], model.classifier[2]
        rows = first.weight.unflatten(1, (16, 3, 3)).permute(0, 2, 3, 1).flatten(1)
        self.dense_kernel = copied((rows if reordered else first.weight).T)
        self.dense_bias = copied(first.bias)
        self.predictions = nn.ParameterList([copied(last.weight.T), copied(last.bias)])

    def block(self, x: Tensor, kernel: Tensor, bias: Tensor) -> Tensor:
        y = F.conv2d(x.permute(0, 3, 1, 2), kernel.permute(3, 2, 0, 1), bias, padding="same")
        return F.max_pool2d(y.relu(), 2).permute(0, 2, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.block(x.permute(0, 2, 3, 1), self.block0_kernel, self.block0_bias)
        x = self.block(x, self.block1_kernel, self.block1_bias)
        x = (x.flatten(1) @ self.dense_kernel + self.dense_bias).relu()
        return torch.addmm(self.predictions[1], x, self.predictions[0])


class Upscaler(nn.Module):
    """[N, 1, 8, 8] -> [N, 3, 16, 16]."""

    def __init__(self):
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 16, 5, padding=2), nn.Conv2d(16, 12, 3, padding=1)
        self.act = nn.PReLU(16)
        self.shuffle = nn.PixelShuffle(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.shuffle(self.conv2(self.act(self.conv1(x)))).sigmoid()


upscaler = _task(
    "ported_upscaler", Upscaler, lambda: (torch.randn(6, 1, 8, 8), torch.rand(6, 3, 16, 16)), F.mse_loss
)


class DepthToSpace(nn.Module):
    """The channels of the last conv are ordered [2, 2, colour], as TensorFlow reads them."""

    def __init__(self, model: Upscaler, reordered: bool = True):
        super().__init__()
        self.entry = model.conv1
        self.slopes = copied(model.act.weight[:, None, None])
        weight, bias = model.conv2.weight, model.conv2.bias
        if reordered:
            weight, bias = (w.unflatten(0, (3, 4)).transpose(0, 1).flatten(0, 1) for w in (weight, bias))
        self.subpixel = filled(nn.Conv2d(16, 12, 3, padding=1), weight=weight, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.entry(x)
        x = self.subpixel(torch.where(x > 0, x, self.slopes * x)).permute(0, 2, 3, 1)
        n, height, width, _ = x.shape
        x = x.reshape(n, height, width, 2, 2, 3).permute(0, 5, 1, 3, 2, 4)
        return x.reshape(n, 3, 2 * height, 2 * width).sigmoid()


class MixerBlock(nn.Module):
    def __init__(self, tokens: int, width: int):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token1, self.token2 = nn.Linear(tokens, 20), nn.Linear(20, tokens)
        self.channel1, self.channel2 = nn.Linear(width, 40), nn.Linear(40, width)
        self.act = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token2(self.act(self.token1(self.norm1(x).transpose(1, 2)))).transpose(1, 2)
        return x + self.channel2(self.act(self.channel1(self.norm2(x))))


class Mixer(nn.Module):
    """[N, 3, 12, 12] -> [N, 5], of 9 patches of 4 x 4."""

    def __init__(self):
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.blocks = nn.Sequential(MixerBlock(9, 16), MixerBlock(9, 16))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.patch(x).flatten(2).transpose(1, 2))
        return self.head(self.norm(x).mean(1))


mixer = _task("ported_mixer", Mixer, lambda: (torch.randn(6, 3, 12, 12), _classes(6, 5)))


def pointwise(linear: nn.Linear) -> nn.Conv1d:
    conv = nn.Conv1d(linear.in_features, linear.out_features, 1)
    return filled(conv, weight=linear.weight[:, :, None], bias=linear.bias)


class ConvMixer(nn.Module):
    """Tokens are mixed by 1-D convs of which the tokens are the channels; patches are rows of a matrix."""

    def __init__(self, model: Mixer):
        super().__init__()
        self.embed = linear_of(model.patch.weight.permute(0, 2, 3, 1).flatten(1), model.patch.bias)
        self.norms = nn.ModuleList(n for b in model.blocks for n in (b.norm1, b.norm2))
        self.tokens = nn.ModuleList(
            nn.Sequential(pointwise(b.token1), nn.GELU(), pointwise(b.token2)) for b in model.blocks
        )
        self.channels = nn.ModuleList(nn.Sequential(b.channel1, nn.GELU(), b.channel2) for b in model.blocks)
        self.last = nn.Sequential(model.norm, model.head)

    def forward(self, x: Tensor) -> Tensor:
        grid = x.unflatten(3, (3, 4)).unflatten(2, (3, 4))  # n c i y j x
        x = self.embed(grid.permute(0, 2, 4, 3, 5, 1).reshape(x.shape[0], 9, 48))
        for i, (tokens, channels) in enumerate(zip(self.tokens, self.channels, strict=True)):
            x = x + tokens(self.norms[2 * i](x))
            x = x + channels(self.norms[2 * i + 1](x))
        return self.last[1](self.last[0](x).mean(1))
