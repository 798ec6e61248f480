"""Networks of branches and concatenations: an Inception block, a DenseNet."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.cases._rewritten import copied, filled
from bench.tasks import _classes, _task


class ConvNorm(nn.Module):
    def __init__(self, before: int, width: int, kernel: int):
        super().__init__()
        self.conv = nn.Conv2d(before, width, kernel, padding=kernel // 2, bias=False)
        self.bn = nn.BatchNorm2d(width, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)).relu()


class Mixed(nn.Module):
    def __init__(self, before: int):
        super().__init__()
        self.branch1x1 = ConvNorm(before, 8, 1)
        self.branch3x3_1 = ConvNorm(before, 8, 1)
        self.branch3x3_2 = ConvNorm(8, 12, 3)
        self.branch5x5_1 = ConvNorm(before, 4, 1)
        self.branch5x5_2 = ConvNorm(4, 6, 5)
        self.pool = nn.AvgPool2d(3, 1, 1)
        self.branch_pool = ConvNorm(before, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        three = self.branch3x3_2(self.branch3x3_1(x))
        five = self.branch5x5_2(self.branch5x5_1(x))
        return torch.cat([self.branch1x1(x), three, five, self.branch_pool(self.pool(x))], 1)


class Inception(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = ConvNorm(3, 12, 3)
        self.mixed_a = Mixed(12)
        self.maxpool = nn.MaxPool2d(2)
        self.mixed_b = Mixed(32)
        self.fc = nn.Linear(32, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed_b(self.maxpool(self.mixed_a(self.stem(x))))
        return self.fc(x.mean((2, 3)))


inception = _task("ported_inception", Inception, lambda: (torch.randn(8, 3, 12, 12), _classes(8, 5)))


def joined(parts: list[ConvNorm]) -> nn.Sequential:
    """One conv and one norm for those that read the same input."""
    conv = nn.Conv2d(parts[0].conv.in_channels, sum(p.conv.out_channels for p in parts), 1, bias=False)
    filled(conv, weight=torch.cat([p.conv.weight for p in parts]))
    norm = nn.BatchNorm2d(conv.out_channels, eps=1e-3)
    filled(norm, weight=torch.cat([p.bn.weight for p in parts]), bias=torch.cat([p.bn.bias for p in parts]))
    norm.running_mean = torch.cat([p.bn.running_mean for p in parts])
    norm.running_var = torch.cat([p.bn.running_var for p in parts])
    return nn.Sequential(conv, norm, nn.ReLU())


def alone(part: ConvNorm) -> nn.Sequential:
    return nn.Sequential(part.conv, part.bn, nn.ReLU())


class FusedMixed(nn.Module):
    """The three reductions of the same input are one conv; their output is split."""

    def __init__(self, block: Mixed, padded: bool):
        super().__init__()
        self.reduce = joined([block.branch1x1, block.branch3x3_1, block.branch5x5_1])
        self.wide, self.wider = alone(block.branch3x3_2), alone(block.branch5x5_2)
        self.pooled = alone(block.branch_pool)
        self.padded = padded

    def forward(self, x: Tensor) -> Tensor:
        one, three, five = self.reduce(x).split([8, 8, 4], 1)
        pool = self.pooled(F.avg_pool2d(x, 3, 1, 1, count_include_pad=self.padded))
        return torch.cat([one, self.wide(three), self.wider(five), pool], 1)


class Fused(nn.Module):
    def __init__(self, model: Inception, padded: bool = True):
        super().__init__()
        self.first = alone(model.stem)
        self.body = nn.ModuleList([FusedMixed(model.mixed_a, padded), FusedMixed(model.mixed_b, padded)])
        self.last = model.fc

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.body[0](self.first(x)), 2)
        return self.last(F.adaptive_avg_pool2d(self.body[1](x), 1).squeeze(-1).squeeze(-1))


class Dense(nn.Module):
    """Each layer reads all before it: norm, relu, conv."""

    def __init__(self):
        super().__init__()
        self.conv0 = nn.Conv2d(3, 16, 3, padding=1)
        widths = (16, 24, 32)
        self.norms = nn.ModuleList(nn.GroupNorm(4, w) for w in widths)
        self.convs = nn.ModuleList(nn.Conv2d(w, 8, 3, padding=1) for w in widths)
        self.transition = nn.Conv2d(40, 16, 1)
        self.classifier = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv0(x)
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x = torch.cat([x, conv(norm(x).relu())], 1)
        return self.classifier(F.avg_pool2d(self.transition(x), 2).relu().mean((2, 3)))


densenet = _task("ported_densenet", Dense, lambda: (torch.randn(6, 3, 10, 10), _classes(6, 5)))


class DenseLayer(nn.Module):
    def __init__(self, norm: nn.GroupNorm, conv: nn.Conv2d):
        super().__init__()
        self.gamma, self.beta = copied(norm.weight), copied(norm.bias)
        widths = [16] + [8] * ((conv.in_channels - 16) // 8)
        self.kernels = nn.ParameterList(copied(w) for w in conv.weight.split(widths, 1))
        self.offset = copied(conv.bias)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = F.relu(F.group_norm(torch.cat(features, 1), 4, self.gamma, self.beta))
        parts = x.split([k.shape[1] for k in self.kernels], 1)
        y = sum(F.conv2d(part, k, padding=1) for part, k in zip(parts, self.kernels, strict=True))
        return y + self.offset[:, None, None]


class Collected(nn.Module):
    """Keeps a list of features; each conv is a sum over the parts of its kernel."""

    def __init__(self, model: Dense):
        super().__init__()
        self.features = nn.Module()
        self.features.begin = model.conv0
        self.features.layers = nn.ModuleList(
            DenseLayer(n, c) for n, c in zip(model.norms, model.convs, strict=True)
        )
        self.squeeze = nn.ParameterDict(
            {"matrix": copied(model.transition.weight[:, :, 0, 0].T), "bias": copied(model.transition.bias)}
        )
        self.answer = model.classifier

    def forward(self, x: Tensor) -> Tensor:
        found = [self.features.begin(x)]
        for layer in self.features.layers:
            found.append(layer(found))
        x = torch.cat(found, 1).movedim(1, -1) @ self.squeeze["matrix"] + self.squeeze["bias"]
        x = F.avg_pool2d(x.movedim(-1, 1), 2)
        return self.answer(x.relu().flatten(2).mean(2))
