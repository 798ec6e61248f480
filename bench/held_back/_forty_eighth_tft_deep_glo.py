"""A small hybrid forecaster: RevIN, DLinear's heads by channel, a TCN as DeepGLO's, and quantiles."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

SERIES, CHANNELS, LENGTH, HORIZON, WINDOW = 6, 5, 24, 9, 7
WIDTHS, KERNEL, EXPERTS, LEVELS, EPS = (20, 28, 28), 3, 3, (0.1, 0.5, 0.8, 0.95), 1e-5


class RevIN(nn.Module):
    """Normalises by the statistics of what was observed, and undoes it at the end."""

    def __init__(self, num_features: int, eps: float = EPS):
        super().__init__()
        self.eps = eps
        self.affine_weight = nn.Parameter(1 + 0.2 * torch.randn(num_features))
        self.affine_bias = nn.Parameter(0.3 * torch.randn(num_features))

    def forward(self, x: Tensor, mode: str, mask: Tensor | None = None) -> Tensor:
        if mode == "norm":
            self._get_statistics(x, mask)
            return self._normalize(x) * mask
        return self._denormalize(x)

    def _get_statistics(self, x: Tensor, mask: Tensor) -> None:
        count = mask.sum(1, keepdim=True).clamp(min=1)
        mean = (x * mask).sum(1, keepdim=True) / count
        var = ((x - mean).square() * mask).sum(1, keepdim=True) / count
        self.mean, self.stdev = mean.detach(), torch.sqrt(var + self.eps).detach()

    def _normalize(self, x: Tensor) -> Tensor:
        return (x - self.mean) / self.stdev * self.affine_weight + self.affine_bias

    def _denormalize(self, x: Tensor) -> Tensor:
        x = (x - self.affine_bias) / (self.affine_weight + self.eps * self.eps)
        return x * self.stdev[:, None] + self.mean[:, None]


class MovingAvg(nn.Module):
    """A moving average of [N, T, C] whose ends are repeated."""

    def __init__(self, kernel_size: int):
        super().__init__()
        self.kernel_size = kernel_size
        self.avg = nn.AvgPool1d(kernel_size, stride=1, padding=0)

    def forward(self, x: Tensor) -> Tensor:
        front = x[:, :1].repeat(1, (self.kernel_size - 1) // 2, 1)
        end = x[:, -1:].repeat(1, (self.kernel_size - 1) // 2, 1)
        return self.avg(torch.cat([front, x, end], dim=1).permute(0, 2, 1)).permute(0, 2, 1)


class SeriesDecomp(nn.Module):
    def __init__(self, kernel_size: int):
        super().__init__()
        self.moving_avg = MovingAvg(kernel_size)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        moving_mean = self.moving_avg(x)
        return x - moving_mean, moving_mean


class DLinear(nn.Module):
    """[N, T, C] -> [N, H, C] by two linear heads for each channel."""

    def __init__(self):
        super().__init__()
        self.decompsition = SeriesDecomp(WINDOW)
        self.Linear_Seasonal = nn.ModuleList(nn.Linear(LENGTH, HORIZON) for _ in range(CHANNELS))
        self.Linear_Trend = nn.ModuleList(nn.Linear(LENGTH, HORIZON) for _ in range(CHANNELS))

    def forward(self, x: Tensor) -> Tensor:
        seasonal_init, trend_init = (part.permute(0, 2, 1) for part in self.decompsition(x))
        seasonal = [layer(seasonal_init[:, i]) for i, layer in enumerate(self.Linear_Seasonal)]
        trend = [layer(trend_init[:, i]) for i, layer in enumerate(self.Linear_Trend)]
        return (torch.stack(seasonal, 1) + torch.stack(trend, 1)).permute(0, 2, 1)


class Chomp1d(nn.Module):
    def __init__(self, chomp_size: int):
        super().__init__()
        self.chomp_size = chomp_size

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, : -self.chomp_size].contiguous()


def normed(n_inputs: int, n_outputs: int, dilation: int) -> nn.Module:
    """A convolution with weight normalisation, whose gains are drawn at random."""
    conv = nn.Conv1d(n_inputs, n_outputs, KERNEL, padding=(KERNEL - 1) * dilation, dilation=dilation)
    conv = weight_norm(conv)
    nn.init.uniform_(conv.parametrizations.weight.original0, 0.7, 1.4)
    return conv


class TemporalBlock(nn.Module):
    def __init__(self, n_inputs: int, n_outputs: int, dilation: int):
        super().__init__()
        self.conv1 = normed(n_inputs, n_outputs, dilation)
        self.chomp1, self.relu1 = Chomp1d((KERNEL - 1) * dilation), nn.ReLU()
        self.conv2 = normed(n_outputs, n_outputs, dilation)
        self.chomp2, self.relu2 = Chomp1d((KERNEL - 1) * dilation), nn.ReLU()
        parts = self.conv1, self.chomp1, self.relu1, self.conv2, self.chomp2, self.relu2
        self.net = nn.Sequential(*parts)
        self.downsample = nn.Conv1d(n_inputs, n_outputs, 1) if n_inputs != n_outputs else None
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        out = self.net(x)
        res = x if self.downsample is None else self.downsample(x)
        return self.relu(out + res)


class TemporalConvNet(nn.Module):
    def __init__(self, num_inputs: int, num_channels: tuple[int, ...]):
        super().__init__()
        sizes = zip((num_inputs, *num_channels), num_channels, strict=False)
        self.network = nn.Sequential(*(TemporalBlock(a, b, 2**i) for i, (a, b) in enumerate(sizes)))

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x)


class HorizonMixture(nn.Module):
    """Mixes forecasts with weights for each step of the horizon."""

    def __init__(self, width: int):
        super().__init__()
        self.gate = nn.Linear(width, HORIZON * EXPERTS)

    def forward(self, hidden: Tensor, experts: Tensor) -> Tensor:
        weights = torch.softmax(self.gate(hidden).view(-1, HORIZON, 1, EXPERTS), dim=-1)
        return (weights * experts).sum(-1)


class QuantileHead(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.proj = nn.Linear(width, len(LEVELS) * HORIZON)

    def forward(self, hidden: Tensor, point: Tensor) -> Tensor:
        return point[:, None] + self.proj(hidden).view(-1, len(LEVELS), HORIZON, 1)


class HybridForecaster(nn.Module):
    """[N, T, C] and what of it was observed -> quantiles [N, Q, H, C]."""

    def __init__(self):
        super().__init__()
        self.revin, self.dlinear = RevIN(CHANNELS), DLinear()
        self.tcn = TemporalConvNet(2 * CHANNELS, WIDTHS)
        self.linear = nn.Linear(WIDTHS[-1], HORIZON * CHANNELS)
        self.mixture, self.quantiles = HorizonMixture(WIDTHS[-1]), QuantileHead(WIDTHS[-1])

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.revin(x, "norm", mask)
        hidden = self.tcn(torch.cat([x, mask.to(x)], dim=2).permute(0, 2, 1))[:, :, -1]
        deep = self.linear(hidden).view(-1, HORIZON, CHANNELS)
        naive = x[:, -1:].expand(-1, HORIZON, -1)
        point = self.mixture(hidden, torch.stack([self.dlinear(x), deep, naive], dim=-1))
        return self.revin(self.quantiles(hidden, point), "denorm")


def seasons() -> tuple[dict[str, Tensor], tuple[Tensor, Tensor]]:
    """Waves on a trend; some values are missing, and some series begin late."""
    time = torch.arange(LENGTH + HORIZON)[:, None]
    phase, slope, level = 6 * torch.rand(SERIES, 1, CHANNELS), *torch.randn(2, SERIES, 1, CHANNELS)
    wave = torch.sin(time * (0.4 + 0.1 * torch.arange(CHANNELS)) + phase)
    series = level + 0.03 * slope * time + wave + 0.1 * torch.randn_like(wave)
    seen = (torch.rand(series.shape) > 0.12) & (time >= torch.randint(0, 8, (SERIES, 1, 1)))
    series = series * seen
    inputs = {"x": series[:, :LENGTH], "mask": seen[:, :LENGTH]}
    return inputs, (series[:, LENGTH:], seen[:, LENGTH:])


def masked_loss(outputs: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    """The pinball loss of the quantiles and the absolute error of the median, where observed."""
    (value, seen), levels = target, torch.tensor(LEVELS).to(outputs)[:, None, None]
    error = value[:, None] - outputs
    pinball = torch.maximum(levels * error, (levels - 1) * error).sum(1)
    return ((pinball + F.l1_loss(outputs[:, 1], value, reduction="none")) * seen).sum() / seen.sum() / 4
