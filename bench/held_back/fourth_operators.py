"""A neural operator: maps of a field over a grid through its lowest frequencies."""

from math import pi

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.held_back._fourth_ports import Port, leaf, pile, wrong
from bench.tasks import _task

W, MODES = 16, 3


class Grid(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        places = [torch.linspace(0, 1, n, dtype=x.dtype, device=x.device) for n in x.shape[2:]]
        grid = torch.stack(torch.meshgrid(*places, indexing="ij"))
        return torch.cat([x, grid.expand(len(x), -1, -1, -1)], 1)


class Spectral(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, W, W, MODES, MODES, 2) / W)

    def forward(self, x: Tensor) -> Tensor:
        before, (low, high) = torch.fft.rfft2(x), torch.view_as_complex(self.weight)
        after = torch.zeros_like(before)
        after[:, :, :MODES, :MODES] = torch.einsum("nihw,iohw->nohw", before[:, :, :MODES, :MODES], low)
        after[:, :, -MODES:, :MODES] = torch.einsum("nihw,iohw->nohw", before[:, :, -MODES:, :MODES], high)
        return torch.fft.irfft2(after, s=x.shape[2:])


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.spectral, self.point = Spectral(), nn.Conv2d(W, W, 1)
        self.norm, self.act = nn.InstanceNorm2d(W, affine=True), nn.GELU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.spectral(x) + self.point(x)))


class Operator(nn.Module):
    def __init__(self):
        super().__init__()
        self.grid, self.lift = Grid(), nn.Conv2d(3, W, 1)
        self.layers = nn.Sequential(Layer(), Layer())
        self.project = nn.Sequential(nn.Conv2d(W, 24, 1), nn.GELU(), nn.Conv2d(24, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.layers(self.lift(self.grid(x))))


class _Mix(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, conjugate: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.conjugate = conjugate
        return torch.einsum("nkli,klio->nklo", x, weight)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight = torch.einsum("nkli,nklo->klio", x.conj() if ctx.conjugate else x, gradient)
        return torch.einsum("nklo,klio->nkli", gradient, weight.conj()), of_weight, None


class WaveOperator(Port):
    """Waves written out as matrices for the transforms, channels last, a custom function between them."""

    def take(self, model: Operator) -> None:
        self.lift = leaf(torch.cat([model.lift.weight[..., 0, 0], model.lift.bias[:, None]], 1).T)
        self.waves = pile(e.spectral.weight.permute(0, 3, 4, 1, 2, 5).flatten(0, 1) for e in model.layers)
        self.point = pile(e.point.weight[..., 0, 0].T for e in model.layers)
        self.terms = pile(torch.stack([e.point.bias, e.norm.weight, e.norm.bias]) for e in model.layers)
        ends = model.project[::2]
        self.ends = nn.ParameterList(leaf(p) for e in ends for p in (e.weight[..., 0, 0].T, e.bias))

    def lifted(self, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        end = width if self.fault == "columns_end_inside_the_field" else width - 1
        rows, columns = torch.arange(height).to(x) / (height - 1), torch.arange(width).to(x) / end
        value, row, column, bias = self.lift
        return x * value + rows[:, None, None] * row + columns[:, None] * column + bias

    def spectral(self, i: int, x: Tensor) -> Tensor:
        height, width = x.shape[1:3]
        start = -MODES - int(i == 1 and self.fault == "negative_waves_start_too_low")
        low, high = torch.arange(MODES), torch.arange(start, start + MODES)
        rows = torch.exp(-2j * pi / height * torch.outer(torch.cat([low, high]), torch.arange(height)).to(x))
        columns = torch.exp(-2j * pi / width * torch.outer(low, torch.arange(width)).to(x))
        seen = torch.einsum("nhwc,kh,lw->nklc", x.to(rows.dtype), rows, columns)
        conjugate = not i or self.fault != "weight_gradient_not_conjugated"
        seen = _Mix.apply(seen, torch.view_as_complex(self.waves[i]), conjugate)
        twice = torch.tensor([1 + (i == 0 and self.fault == "zero_frequency_twice"), 2, 2]).to(x)
        columns = columns.conj() * twice[:, None] / (height * width)
        return torch.einsum("nklc,kh,lw->nhwc", seen, rows.conj(), columns).real

    def forward(self, x: Tensor) -> Tensor:
        x = self.lifted(x.permute(0, 2, 3, 1))
        for i, (point, (bias, scale, shift)) in enumerate(zip(self.point, self.terms, strict=True)):
            x = self.spectral(i, x) + x @ point + bias
            correction = int(i == 0 and self.fault == "spread_counts_one_less")
            var, mean = torch.var_mean(x, (1, 2), correction=correction, keepdim=True)
            x = F.gelu((x - mean) * (var + 1e-5).rsqrt() * scale + shift)
        w1, b1, w2, b2 = self.ends
        curve = "tanh" if self.fault == "fast_curve_in_the_projection" else "none"
        return (F.gelu(x @ w1 + b1, approximate=curve) @ w2 + b2).permute(0, 3, 1, 2)


def _fields() -> tuple[Tensor, ...]:
    return torch.randn(2, 4, 1, 10, 12).unbind()


wrong(
    _task("fourth_operator", Operator, _fields, lambda x, targets: F.mse_loss(x, targets.to(x))),
    WaveOperator,
    columns_end_inside_the_field=("end of a range", "grid"),
    negative_waves_start_too_low=("off by one in one layer", "layers.1.spectral"),
    zero_frequency_twice=("a factor in one layer", "layers.0.spectral"),
    spread_counts_one_less=("variance of a sample", "layers.0.norm"),
    fast_curve_in_the_projection=("variant of an activation", "project.1"),
    weight_gradient_not_conjugated=("a custom backward", "layers.1.spectral", "weight gradient"),
)
