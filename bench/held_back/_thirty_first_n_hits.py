"""A small N-HiTS: blocks of three stacks, each with its own pooling and knots, over scaled windows."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

INPUT, HORIZON, WINDOWS = 21, 12, 7
HIST, FUTR, STAT = 2, 3, 4
QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9)
BLOCKS, POOLS, DOWNSAMPLES = (1, 2, 1), (4, 3, 2), (4, 3, 2)
MODES = ("linear", "cubic", "nearest")
UNITS = ((32, 36), (36, 28))


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    return (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True)


class TemporalNorm(nn.Module):
    """The standard scaler of each window, by its values that are not masked."""

    def __init__(self, eps: float = 1e-6):
        super().__init__()
        self.eps = eps

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x_shift = masked_mean(x, mask)
        x_scale = torch.sqrt(masked_mean((x - x_shift) ** 2, mask)) + self.eps
        return (x - x_shift) / x_scale, x_shift, x_scale

    def inverse_transform(self, z: Tensor, x_shift: Tensor, x_scale: Tensor) -> Tensor:
        return z * x_scale[:, :, None] + x_shift[:, :, None]


class _IdentityBasis(nn.Module):
    """theta -> the backcast [N, INPUT] and the forecast [N, HORIZON, out_features] through its knots."""

    def __init__(self, backcast_size: int, forecast_size: int, interpolation_mode: str, out_features: int):
        super().__init__()
        self.backcast_size, self.forecast_size = backcast_size, forecast_size
        self.interpolation_mode, self.out_features = interpolation_mode, out_features

    def forward(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        backcast, knots = theta[:, : self.backcast_size], theta[:, self.backcast_size :]
        knots = knots.reshape(len(knots), self.out_features, -1)
        if self.interpolation_mode in ("nearest", "linear"):
            forecast = F.interpolate(knots, size=self.forecast_size, mode=self.interpolation_mode)
        else:
            size = self.out_features, self.forecast_size
            forecast = F.interpolate(knots[:, None], size=size, mode="bicubic")[:, 0]
        return backcast, forecast.permute(0, 2, 1)


class NHITSBlock(nn.Module):
    def __init__(self, n_theta: int, basis: nn.Module, n_pool_kernel_size: int):
        super().__init__()
        past, whole = (math.ceil(n / n_pool_kernel_size) for n in (INPUT, INPUT + HORIZON))
        width = past + HIST * past + FUTR * whole + STAT
        self.pooling_layer = nn.MaxPool1d(n_pool_kernel_size, n_pool_kernel_size, ceil_mode=True)
        layers = [nn.Linear(width, UNITS[0][0])]
        for before, after in UNITS:
            layers.extend([nn.Linear(before, after), nn.ReLU()])
        self.layers = nn.Sequential(*layers, nn.Linear(UNITS[-1][1], n_theta))
        self.basis = basis

    def forward(
        self, insample_y: Tensor, futr_exog: Tensor, hist_exog: Tensor, stat_exog: Tensor
    ) -> tuple[Tensor, Tensor]:
        insample_y = self.pooling_layer(insample_y.unsqueeze(1)).squeeze(1)
        batch_size = len(insample_y)
        hist_exog = self.pooling_layer(hist_exog.permute(0, 2, 1)).permute(0, 2, 1)
        insample_y = torch.cat((insample_y, hist_exog.reshape(batch_size, -1)), dim=1)
        futr_exog = self.pooling_layer(futr_exog.permute(0, 2, 1)).permute(0, 2, 1)
        insample_y = torch.cat((insample_y, futr_exog.reshape(batch_size, -1)), dim=1)
        insample_y = torch.cat((insample_y, stat_exog), dim=1)
        return self.basis(self.layers(insample_y))


class NHITS(nn.Module):
    """Windows, which of their values are there, and covariates -> quantiles [N, HORIZON, 5]."""

    def __init__(self):
        super().__init__()
        self.scaler, self.blocks = TemporalNorm(), nn.ModuleList()
        for count, pool, down, mode in zip(BLOCKS, POOLS, DOWNSAMPLES, MODES, strict=True):
            for _ in range(count):
                n_theta = INPUT + len(QUANTILES) * max(HORIZON // down, 1)
                basis = _IdentityBasis(INPUT, HORIZON, mode, len(QUANTILES))
                self.blocks.append(NHITSBlock(n_theta, basis, pool))

    def forward(
        self,
        insample_y: Tensor,
        insample_mask: Tensor,
        futr_exog: Tensor,
        hist_exog: Tensor,
        stat_exog: Tensor,
    ) -> Tensor:
        insample_mask = insample_mask.to(insample_y.dtype)
        insample_y, x_shift, x_scale = self.scaler(insample_y, insample_mask)
        insample_y = insample_y * insample_mask
        residuals, insample_mask = insample_y.flip(dims=(-1,)), insample_mask.flip(dims=(-1,))
        forecast = insample_y[:, -1:, None]
        for block in self.blocks:
            backcast, block_forecast = block(residuals, futr_exog, hist_exog, stat_exog)
            residuals = (residuals - backcast) * insample_mask
            forecast = forecast + block_forecast
        return self.scaler.inverse_transform(forecast, x_shift, x_scale)


def seasons() -> tuple[dict[str, Tensor], Tensor]:
    """Noisy seasons on a trend, some of which began within the window; what came before is masked."""
    time = torch.arange(INPUT + HORIZON) - INPUT
    level, slope, height, phase = torch.randn(4, WINDOWS, 1)
    turn = math.tau * time / 7 + 3 * phase
    y = level + 0.03 * slope * time + (1 + height.abs()) * turn.sin() / 2
    y = y + 0.1 * torch.randn_like(y)
    mask = time[:INPUT] >= -torch.randint(11, INPUT + 4, (WINDOWS, 1))
    calendar = torch.stack([turn.sin(), turn.cos(), (time / 20).expand(WINDOWS, -1)], 2)
    other = torch.stack([y[:, :INPUT].roll(1, 1), turn[:, :INPUT].cos()], 2)
    inputs = {
        "insample_y": y[:, :INPUT] * mask,
        "insample_mask": mask,
        "futr_exog": calendar + 0.1 * torch.randn_like(calendar),
        "hist_exog": other + 0.2 * torch.randn_like(other),
        "stat_exog": torch.cat([level, slope, height, phase], 1),
    }
    return inputs, y[:, INPUT:]


def quantile_loss(outputs: Tensor, target: Tensor) -> Tensor:
    """The mean of the pinball losses, doubled."""
    error, q = target[:, :, None] - outputs, outputs.new_tensor(QUANTILES)
    return 2 * torch.maximum(q * error, (q - 1) * error).mean()
