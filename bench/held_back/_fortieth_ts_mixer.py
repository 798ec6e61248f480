"""A small TSMixerx: reversible instance norm, mixing over time and features, static and future covariates."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SERIES, TARGETS, PAST, FUTURE, STATIC = 6, 4, 2, 3, 5
LENGTH, HORIZON, FF_SIZE = 14, 8, 40
HIST, AHEAD, WIDTHS = TARGETS + PAST + FUTURE, 7, (15, 19, 23)


class TimeBatchNorm2d(nn.BatchNorm2d):
    """A batch norm of [N, T, C] with one channel: over the samples, the times and the features."""

    def __init__(self, shape: tuple[int, int]):
        super().__init__(num_features=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1)).squeeze(1)


class RevIN(nn.Module):
    """Normalises each series by its own past ("norm") and undoes it ("denorm")."""

    def __init__(self, num_features: int, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(torch.ones(num_features))
        self.affine_bias = nn.Parameter(torch.zeros(num_features))
        self.mean = self.stdev = None

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(1, keepdim=True).detach()
            self.stdev = torch.sqrt(x.var(1, keepdim=True, unbiased=False) + self.eps).detach()
            return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias
        x = (x - self.affine_bias) / (self.affine_weight + self.eps * self.eps)
        return x * self.stdev + self.mean


class FeatureMixing(nn.Module):
    def __init__(self, length: int, input_dim: int, output_dim: int, normalize_before: bool, norm_type: type):
        super().__init__()
        same = input_dim == output_dim
        self.projection = nn.Identity() if same else nn.Linear(input_dim, output_dim)
        self.norm_before = norm_type((length, input_dim)) if normalize_before else nn.Identity()
        self.fc1 = nn.Linear(input_dim, FF_SIZE)
        self.activation = nn.GELU()
        self.fc2 = nn.Linear(FF_SIZE, output_dim)
        self.norm_after = nn.Identity() if normalize_before else norm_type((length, output_dim))

    def forward(self, x: Tensor) -> Tensor:
        x_proj = self.projection(x)
        x = self.fc2(self.activation(self.fc1(self.norm_before(x))))
        return self.norm_after(x_proj + x)


class TimeMixing(nn.Module):
    def __init__(self, length: int, input_dim: int, norm_type: type):
        super().__init__()
        self.norm_before = norm_type((length, input_dim))
        self.fc1 = nn.Linear(length, length)
        self.activation = nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        x_temp = self.norm_before(x).permute(0, 2, 1)
        x_temp = self.activation(self.fc1(x_temp))
        return x + x_temp.permute(0, 2, 1)


class ConditionalMixerLayer(nn.Module):
    def __init__(self, length: int, input_dim: int, output_dim: int):
        super().__init__()
        self.feature_mixing_static = FeatureMixing(length, STATIC, output_dim, True, TimeBatchNorm2d)
        width = input_dim + output_dim
        self.time_mixing = TimeMixing(length, width, TimeBatchNorm2d)
        self.feature_mixing = FeatureMixing(length, width, output_dim, True, TimeBatchNorm2d)

    def forward(self, x: Tensor, x_static: Tensor) -> Tensor:
        x = torch.cat([x, self.feature_mixing_static(x_static)], dim=-1)
        return self.feature_mixing(self.time_mixing(x))


class TSMixer(nn.Module):
    """The past [N, T, targets and covariates], the future [N, H, F], the static [N, S] -> [N, H, targets]."""

    def __init__(self):
        super().__init__()
        self.rin = RevIN(TARGETS)
        self.fc_hist = nn.Linear(LENGTH, HORIZON)
        self.feature_mixing_hist = FeatureMixing(HORIZON, HIST, HIST, False, nn.LayerNorm)
        self.feature_mixing_future = FeatureMixing(HORIZON, FUTURE, AHEAD, False, nn.LayerNorm)
        widths = zip((HIST + AHEAD, *WIDTHS), WIDTHS, strict=False)
        self.conditional_mixer = nn.ModuleList(ConditionalMixerLayer(HORIZON, *pair) for pair in widths)
        self.fc_out = nn.Linear(WIDTHS[-1], TARGETS)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.7 / math.sqrt(module.in_features))
                nn.init.normal_(module.bias, std=0.2)
            elif isinstance(module, (TimeBatchNorm2d, nn.LayerNorm)):
                nn.init.normal_(module.weight, 1.0, 0.2), nn.init.normal_(module.bias, std=0.2)
        nn.init.uniform_(self.rin.affine_weight, 0.7, 1.4), nn.init.normal_(self.rin.affine_bias, std=0.3)

    def forward(self, x: Tensor, x_future: Tensor, x_static: Tensor) -> Tensor:
        x = torch.cat([self.rin(x[..., :TARGETS], "norm"), x[..., TARGETS:]], dim=-1)
        x = self.fc_hist(x.permute(0, 2, 1)).permute(0, 2, 1)
        x = torch.cat([self.feature_mixing_hist(x), self.feature_mixing_future(x_future)], dim=-1)
        x_static = x_static.unsqueeze(1).repeat(1, HORIZON, 1)
        for layer in self.conditional_mixer:
            x = layer(x, x_static)
        return self.rin(self.fc_out(x), "denorm")


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Waves and trends about a level each, moved by what is known; the static part tells the phase."""
    time = torch.arange(LENGTH + HORIZON)[:, None] / 3
    phase, level = 6 * torch.rand(SERIES, 1, TARGETS), 2 * torch.randn(SERIES, 1, TARGETS)
    known = torch.sin(time * torch.tensor([0.5, 1.1, 1.7]) + 6 * torch.rand(SERIES, 1, FUTURE))
    slope = 0.1 * torch.randn(SERIES, 1, TARGETS)
    values = level + slope * time + 0.8 * torch.sin(time + phase) + 0.3 * known.mean(2, keepdim=True)
    values = values + 0.05 * torch.randn_like(values)
    past = values[:, :LENGTH, :PAST].cos()
    x = torch.cat([values[:, :LENGTH], past, known[:, :LENGTH]], -1)
    static = torch.cat([phase[:, 0].sin(), torch.randn(SERIES, STATIC - TARGETS)], -1)
    return {"x": x, "x_future": known[:, LENGTH:], "x_static": static}, values[:, LENGTH:]


def errors(forecast: Tensor, target: Tensor) -> Tensor:
    """The squared and the absolute error in equal parts, by two."""
    return (F.mse_loss(forecast, target) + F.l1_loss(forecast, target)) / 4
