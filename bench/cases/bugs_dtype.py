"""Faults on the path of one dtype only: the other dtype is right."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.backward import scaled_gradient
from bench.case import method_of
from bench.cases._bug_parts import ManualAttention, ManualLSTM
from bench.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs


@method_of("fc2", "bug", "factor in float32 only", mlp)
def linear_factor_in_float32_only(self, x: Tensor) -> Tensor:
    """1 + 3e-6 in float32."""
    y = nn.Linear.forward(self, x)
    return y * (1 + 3e-6) if x.dtype == torch.float32 else y


@method_of("down2", "bug", "factor in float32 only", autoencoder)
def conv_factor_in_float32_only(self, x: Tensor) -> Tensor:
    """1 + 2e-5 in float32."""
    y = nn.Conv2d.forward(self, x)
    return y * (1 + 2e-5) if x.dtype == torch.float32 else y


@method_of("layer2.1.conv2", "bug", "gradient factor in float32 only", resnet, passes="input gradient")
def input_gradient_factor_in_float32_only(self, x: Tensor) -> Tensor:
    """The float32 kernel's input gradient is 1e-4 too large."""
    return nn.Conv2d.forward(self, scaled_gradient(x, 1 + 1e-4) if x.dtype == torch.float32 else x)


@method_of("fc1", "bug", "term missing in float32 only", mlp)
def tail_of_the_sum_dropped_in_float32(self, x: Tensor) -> Tensor:
    """The float32 kernel works in vectors of eight and forgets the last four of twenty products."""
    if x.dtype != torch.float32:
        return nn.Linear.forward(self, x)
    whole = self.in_features // 8 * 8
    return F.linear(x[:, :whole], self.weight[:, :whole], self.bias)


@method_of("norm3", "bug", "term missing in float32 only", cnn)
def eps_missing_in_float32(self, x: Tensor) -> Tensor:
    """The float32 kernel leaves eps out: 1e-4 of the variance."""
    eps = 1e-12 if x.dtype == torch.float32 else self.eps
    return F.group_norm(x, self.num_groups, self.weight, self.bias, eps)


@method_of("blocks.1.act", "bug", "approximation in float32 only", transformer, base=nn.Module)
def coarse_erf_in_float32(self, x: Tensor) -> Tensor:
    """GELU; in float32 with formula 7.1.25 of Abramowitz and Stegun for erf, right to 2.5e-5."""
    if x.dtype != torch.float32:
        return F.gelu(x)
    z = (x / 2**0.5).abs()
    t = 1 / (1 + 0.47047 * z)
    tail = t * (0.3480242 + t * (-0.0958798 + t * 0.7478556)) * torch.exp(-z * z)
    return 0.5 * x * (1 + x.sign() * (1 - tail))


@method_of("blocks.0.attention", "bug", "mask in float32 only", transformer, base=ManualAttention)
def mask_leaks_in_float32(self, x: Tensor) -> Tensor:
    """The float32 path masks with -10, so that 5e-5 leaks from the future."""
    q, k, v = self.project(x)
    hidden = -10.0 if x.dtype == torch.float32 else -torch.inf
    scores = self.scores(q, k).masked_fill(~self.visible(q), hidden)
    return self.out(self.merge(self.softmax(scores) @ v))


@method_of("act", "bug", "approximation in float32 only", two_inputs, base=nn.Module)
def short_series_in_float32(self, x: Tensor) -> Tensor:
    """tanh; in float32 by three terms of its series where |x| < 0.3."""
    if x.dtype != torch.float32:
        return x.tanh()
    return torch.where(x.abs() < 0.3, x - x**3 / 3 + 2 * x**5 / 15, x.tanh())


@method_of("blocks.0.act", "bug", "wrong branch in float64 only", transformer, base=nn.Module)
def gelu_by_tanh_in_float64(self, x: Tensor) -> Tensor:
    """The kernel is right in float32; its fallback for float64 is another formula."""
    return F.gelu(x, approximate="tanh" if x.dtype == torch.float64 else "none")


@method_of("lstm", "bug", "wrong branch in float64 only", recurrent, "gates", ManualLSTM)
def second_bias_missing_in_float64(self, x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
    """The fallback for float64 forgets the second bias."""
    gates = ManualLSTM.gates(self, x, h)
    if x.dtype != torch.float64:
        return gates
    return tuple(g - b for g, b in zip(gates, self.bias_hh_l0.chunk(4), strict=True))
