"""Faults on the path of one dtype only: the other dtype is right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import GradientFactor, ManualAttention, ManualLSTM, recast
from experiments.calibration.cases._swap import replace
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


class ScaledInFloat32(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1 + 3e-6) if x.dtype == torch.float32 else y


@case("bug", "factor in float32 only", mlp, module="fc2", passes="forward")
def linear_factor_in_float32_only(model):
    """1 + 3e-6 in float32."""
    return recast(model, "fc2", ScaledInFloat32)


class ConvScaledInFloat32(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * (1 + 2e-5) if x.dtype == torch.float32 else y


@case("bug", "factor in float32 only", autoencoder, module="down2", passes="forward")
def conv_factor_in_float32_only(model):
    """1 + 2e-5 in float32."""
    return recast(model, "down2", ConvScaledInFloat32)


class GradientScaledInFloat32(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(GradientFactor.apply(x, 1 + 1e-4) if x.dtype == torch.float32 else x)


@case("bug", "gradient factor in float32 only", resnet, module="layer2.1.conv2", passes="input gradient")
def input_gradient_factor_in_float32_only(model):
    """The float32 kernel's input gradient is 1e-4 too large."""
    return recast(model, "layer2.1.conv2", GradientScaledInFloat32)


class TailDropped(nn.Linear):
    """The float32 kernel works in vectors of eight and forgets the rest: 20 = 2 * 8 + 4."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return super().forward(x)
        whole = self.in_features // 8 * 8
        return F.linear(x[:, :whole], self.weight[:, :whole], self.bias)


@case("bug", "term missing in float32 only", mlp, module="fc1", passes="forward")
def tail_of_the_sum_dropped_in_float32(model):
    """The last four of twenty products are missing in float32."""
    return recast(model, "fc1", TailDropped)


class WithoutEps(nn.GroupNorm):
    def forward(self, x: Tensor) -> Tensor:
        eps = 1e-12 if x.dtype == torch.float32 else self.eps
        return F.group_norm(x, self.num_groups, self.weight, self.bias, eps)


@case("bug", "term missing in float32 only", cnn, module="norm3", passes="forward")
def eps_missing_in_float32(model):
    """The float32 kernel leaves eps out: 1e-4 of the variance."""
    return recast(model, "norm3", WithoutEps)


class CoarseErf(nn.Module):
    """GELU; in float32 with the formula 7.1.25 of Abramowitz and Stegun for erf, right to 2.5e-5."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return F.gelu(x)
        z = (x / 2**0.5).abs()
        t = 1 / (1 + 0.47047 * z)
        tail = t * (0.3480242 + t * (-0.0958798 + t * 0.7478556)) * torch.exp(-z * z)
        return 0.5 * x * (1 + x.sign() * (1 - tail))


@case("bug", "approximation in float32 only", transformer, module="blocks.1.act", passes="forward")
def coarse_erf_in_float32(model):
    """A short formula for erf in float32."""
    return replace(model, "blocks.1.act", CoarseErf())


class LeakyMaskInFloat32(ManualAttention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        hidden = -10.0 if x.dtype == torch.float32 else -torch.inf
        scores = self.scores(q, k).masked_fill(~self.visible(q), hidden)
        return self.out(self.merge(self.softmax(scores) @ v))


@case("bug", "mask in float32 only", transformer, module="blocks.0.attention", passes="forward")
def mask_leaks_in_float32(model):
    """The float32 path masks with -10, so that 5e-5 leaks from the future."""
    return recast(model, "blocks.0.attention", LeakyMaskInFloat32)


class TanhOfFloat32(nn.Module):
    """tanh; in float32 by its series to the fifth order where |x| < 0.1."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x.tanh()
        return torch.where(x.abs() < 0.3, x - x**3 / 3 + 2 * x**5 / 15, x.tanh())


@case("bug", "approximation in float32 only", two_inputs, module="act", passes="forward")
def short_series_in_float32(model):
    """Three terms of the series for small arguments in float32."""
    return replace(model, "act", TanhOfFloat32())


class OtherGELUInFloat64(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x, approximate="tanh" if x.dtype == torch.float64 else "none")


@case("bug", "wrong branch in float64 only", transformer, module="blocks.0.act", passes="forward")
def gelu_by_tanh_in_float64(model):
    """The kernel is right in float32; its fallback for float64 is another formula."""
    return replace(model, "blocks.0.act", OtherGELUInFloat64())


class OneBiasInFloat64(ManualLSTM):
    def gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        gates = super().gates(x, h)
        if x.dtype != torch.float64:
            return gates
        return tuple(g - b for g, b in zip(gates, self.bias_hh_l0.chunk(4), strict=True))


@case("bug", "wrong branch in float64 only", recurrent, module="lstm", passes="forward")
def second_bias_missing_in_float64(model):
    """The fallback for float64 forgets the second bias."""
    return recast(model, "lstm", OneBiasInFloat64)
