"""A small ensemble for tables: embedded numbers into oblivious trees and a ResNet."""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FEATURES, BINS, WAVES, RAMP, WAVE = 6, 5, 7, 5, 4
TREES, TREE_DIM, DEPTH, LAYERS = 8, 3, 4, 2
MAIN, HIDDEN, BLOCKS, SAMPLES, ROWS = 40, 52, 3, 8, 9
QUANTILES = (0.1, 0.3, 0.5, 0.8)


def dense(n_in: int, n_out: int, gain: float = 1.0) -> nn.Linear:
    layer = nn.Linear(n_in, n_out)
    nn.init.normal_(layer.weight, std=gain / math.sqrt(n_in)), nn.init.normal_(layer.bias, std=0.2)
    return layer


def batch_norm(width: int) -> nn.BatchNorm1d:
    norm = nn.BatchNorm1d(width)
    nn.init.normal_(norm.weight, 1, 0.2), nn.init.normal_(norm.bias, std=0.2)
    nn.init.normal_(norm.running_mean, std=0.3), nn.init.uniform_(norm.running_var, 0.5, 1.5)
    return norm


class RunningMeanImputer(nn.Module):
    """Fills what is missing with the running means, then moves these by what is there."""

    def __init__(self, n_features: int, momentum: float = 0.2):
        super().__init__()
        self.momentum = momentum
        self.register_buffer("running_mean", 0.3 * torch.randn(n_features))

    def forward(self, x: Tensor, missing: Tensor) -> Tensor:
        filled = torch.where(missing, self.running_mean, x)
        if self.training:
            count, total = (~missing).sum(0), x.detach().masked_fill(missing, 0).sum(0)
            mean = torch.where(count > 0, total / count.clamp(min=1), self.running_mean)
            self.running_mean = (1 - self.momentum) * self.running_mean + self.momentum * mean
        return filled


class NLinear(nn.Module):
    """A linear layer of its own for each feature."""

    def __init__(self, n: int, n_in: int, n_out: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, n_in, n_out) / math.sqrt(n_in))
        self.bias = nn.Parameter(0.2 * torch.randn(n, n_out))

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., None, :] @ self.weight).squeeze(-2) + self.bias


class PiecewiseLinearEncoding(nn.Module):
    """How full each bin is: the first is open below, and the last is open above."""

    def __init__(self, n_features: int, n_bins: int):
        super().__init__()
        widths = 0.3 + 0.6 * torch.rand(n_features, n_bins)
        edges = F.pad(widths.cumsum(1), (1, 0)) - 1.5 + 0.3 * torch.randn(n_features, 1)
        self.register_buffer("edges", edges)

    def forward(self, x: Tensor) -> Tensor:
        x = (x[..., None] - self.edges[:, :-1]) / self.edges.diff()
        return torch.cat([x[..., :1].clamp_max(1), x[..., 1:-1].clamp(0, 1), x[..., -1:].clamp_min(0)], -1)


class PiecewiseLinearEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.impl = PiecewiseLinearEncoding(FEATURES, BINS)
        self.linear, self.activation = NLinear(FEATURES, BINS, RAMP), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(self.impl(x)))


class Periodic(nn.Module):
    def __init__(self, n_features: int, k: int):
        super().__init__()
        self.weight = nn.Parameter(0.25 * torch.randn(n_features, k))

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * math.pi * self.weight * x[..., None]
        return torch.cat([torch.cos(x), torch.sin(x)], -1)


class PeriodicEmbeddings(nn.Module):
    def __init__(self):
        super().__init__()
        self.periodic, self.linear = Periodic(FEATURES, WAVES), NLinear(FEATURES, 2 * WAVES, WAVE)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.periodic(x))


class ODST(nn.Module):
    """Oblivious trees: each level asks one soft question, and each leaf has a response."""

    def __init__(self, in_features: int):
        super().__init__()
        self.feature_selection_logits = nn.Parameter(2 * torch.randn(in_features, TREES, DEPTH))
        self.feature_thresholds = nn.Parameter(0.4 * torch.randn(TREES, DEPTH))
        self.log_temperatures = nn.Parameter(0.3 * torch.randn(TREES, DEPTH) - 0.5)
        self.response = nn.Parameter(torch.randn(TREES, TREE_DIM, 2**DEPTH))
        codes = (torch.arange(2**DEPTH) // 2 ** torch.arange(DEPTH)[:, None] % 2).float()
        self.register_buffer("bin_codes_1hot", torch.stack([codes, 1 - codes], -1))

    def forward(self, x: Tensor) -> Tensor:
        selectors = self.feature_selection_logits.softmax(0)
        values = torch.einsum("bi,ind->bnd", x, selectors)
        logits = (values - self.feature_thresholds) * torch.exp(-self.log_temperatures)
        bins = torch.sigmoid(torch.stack([-logits, logits], -1))
        matches = torch.einsum("btds,dcs->btdc", bins, self.bin_codes_1hot)
        return torch.einsum("bnd,ncd->bnc", matches.prod(-2), self.response).flatten(1)


class DenseBlock(nn.Sequential):
    """Layers of trees, each of which reads the input and all the trees before."""

    def __init__(self, width: int):
        super().__init__(*(ODST(width + i * TREES * TREE_DIM) for i in range(LAYERS)))

    def forward(self, x: Tensor) -> Tensor:
        initial = x.shape[-1]
        for layer in self:
            x = torch.cat([x, layer(x)], -1)
        return x[:, initial:]


class ResNetBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.normalization, self.activation = batch_norm(MAIN), nn.ReLU()
        self.linear_first, self.linear_second = dense(MAIN, HIDDEN, 1.2), dense(HIDDEN, MAIN)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear_second(self.activation(self.linear_first(self.normalization(x))))


class ResNet(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.first_layer = dense(width, MAIN)
        self.blocks = nn.Sequential(*(ResNetBlock() for _ in range(BLOCKS)))
        self.head = nn.Sequential(OrderedDict(normalization=batch_norm(MAIN), activation=nn.ReLU()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.first_layer(x)))


class QuantileHead(nn.Module):
    """The lowest quantile, and the others by steps above it."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = dense(width, len(QUANTILES), 0.4)

    def forward(self, x: Tensor) -> Tensor:
        low, steps = self.linear(x).split([1, len(QUANTILES) - 1], -1)
        return torch.cat([low, low + F.softplus(steps).cumsum(-1)], -1)


class TabularEnsemble(nn.Module):
    """The rows of each sample, and what is missing of them -> quantiles and a logit for each row."""

    def __init__(self):
        super().__init__()
        width = FEATURES * (RAMP + WAVE)
        self.imputer = RunningMeanImputer(FEATURES)
        self.ple, self.plr = PiecewiseLinearEmbeddings(), PeriodicEmbeddings()
        self.trees, self.resnet = DenseBlock(width), ResNet(width)
        total = LAYERS * TREES * TREE_DIM + MAIN
        self.quantile_head, self.binary_head = QuantileHead(total), dense(total, 1, 0.4)

    def forward(self, x_num: Tensor, missing: Tensor) -> tuple[Tensor, Tensor]:
        x = self.imputer(x_num.flatten(0, 1), missing.flatten(0, 1))
        x = torch.cat([self.ple(x), self.plr(x)], -1).flatten(1)
        x = torch.cat([self.trees(x), self.resnet(x)], -1).unflatten(0, x_num.shape[:2])
        return self.quantile_head(x), self.binary_head(x).squeeze(-1)


def tables() -> tuple[dict[str, Tensor], Tensor]:
    """Rows about the middle of their sample; a tenth is missing and reads zero."""
    x = 0.7 * torch.randn(SAMPLES, 1, FEATURES) + 0.7 * torch.randn(SAMPLES, ROWS, FEATURES)
    x, missing = x + 0.3 * torch.arange(FEATURES) / FEATURES, torch.rand(x.shape) < 0.1
    y = torch.sin(2 * x[..., 0]) + x[..., 1] * (x[..., 2] > 0) + 0.2 * torch.randn(x.shape[:2])
    label = (x[..., 3] + x[..., 4] * x[..., 5] > 0.2).to(x)
    return {"x_num": x.masked_fill(missing, 0), "missing": missing}, torch.stack([y, label], -1)


def pinball_and_label(outputs: tuple[Tensor, Tensor], target: Tensor) -> Tensor:
    """The pinball loss of the quantiles and the binary cross entropy, by three."""
    error, q = target[..., :1] - outputs[0], torch.tensor(QUANTILES).to(target)
    pinball = torch.maximum(q * error, (q - 1) * error).mean()
    return (pinball + F.binary_cross_entropy_with_logits(outputs[1], target[..., 1])) / 3
