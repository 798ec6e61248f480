"""True rewrites by kernels: several modules in one, and kernels that know only float32."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case, in_place_of
from bench.cases._rewritten import SAME, ConvWeights, LinearWeights, rewritten
from bench.tasks import cnn, mlp, resnet, transformer


class ConvNormAct(nn.Module):
    """What three modules did; the other two places hold an identity."""

    def __init__(self, conv: nn.Conv2d, norm: nn.BatchNorm2d, act: nn.Module):
        super().__init__()
        self.conv, self.norm, self.act = conv, norm, act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.norm(self.conv(x)))


class FoldedInEval(ConvNormAct):
    """Out of training the norm's scale and shift go into the conv's weight and bias."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return super().forward(x)
        conv, norm = self.conv, self.norm
        scale = norm.weight / torch.sqrt(norm.running_var + norm.eps)
        weight, bias = conv.weight * scale[:, None, None, None], norm.bias - norm.running_mean * scale
        if conv.bias is not None:
            bias = bias + conv.bias * scale
        return self.act(F.conv2d(x, weight, bias, conv.stride, conv.padding))


class LinearAct(LinearWeights):
    def forward(self, x: Tensor) -> Tensor:
        return F.relu(F.linear(x, self.weight, self.bias))


class BiasGelu(nn.Module):
    """The bias of the layer before and the activation."""

    def __init__(self, bias: nn.Parameter):
        super().__init__()
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(x + self.bias)


class LayerNormInFloat32(nn.Module):
    """As the norms of LLaMA and others are written."""

    def __init__(self, norm: nn.LayerNorm):
        super().__init__()
        self.weight, self.bias, self.eps = norm.weight, norm.bias, norm.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        centred = wide - wide.mean(-1, keepdim=True)
        standard = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * standard.to(x.dtype) + self.bias


def _fuse(parent: nn.Module, conv: str, norm: str, act: str, kind: type[ConvNormAct]) -> None:
    """Put the three modules of ``parent`` into the place of the first."""
    setattr(parent, conv, kind(*(getattr(parent, name) for name in (conv, norm, act))))
    setattr(parent, norm, nn.Identity())
    setattr(parent, act, nn.Identity())


@case("bit_identical", "modules fused", on=cnn)
def conv_norm_act_in_one(model: nn.Module) -> nn.Module:
    """Conv, BatchNorm and ReLU in one module, identities in the other two places; twice."""
    _fuse(model, "conv1", "bn1", "act1", ConvNormAct)
    _fuse(model, "conv2", "bn2", "act2", ConvNormAct)
    return model


@case(SAME, "modules fused", on=resnet)
def conv_norm_act_folded_in_eval(model: nn.Module) -> nn.Module:
    """The stem in one module, which out of training is one conv with the norm folded in."""
    _fuse(model, "conv1", "bn1", "act1", FoldedInEval)
    return model


@case(SAME, "modules fused", on=mlp)
def linear_act_in_one(model: nn.Module) -> nn.Module:
    """Linear and ReLU in one module, an identity in the other place; twice."""
    for i in (1, 2):
        rewritten(model, f"fc{i}", LinearAct)
        setattr(model, f"act{i}", nn.Identity())
    return model


@case(SAME, "modules fused", on=transformer)
def bias_moved_into_activation(model: nn.Module) -> nn.Module:
    """The bias of ``up`` is added in the activation's module, as Megatron fuses it."""
    for block in model.blocks:
        block.act = BiasGelu(block.up.bias)
        block.up.bias = None
    return model


@in_place_of("conv2", "round_off", "kernel in float32 only", cnn, "conv_always_in_float32")
class ConvInFloat32(ConvWeights):
    """im2col in float32, then cast back: no loss in float32, and its own precision in float64."""

    def forward(self, x: Tensor) -> Tensor:
        columns = F.unfold(x.float(), self.kernel, padding=self.padding, stride=self.stride)
        side = (x.shape[2] + 2 * self.padding - self.kernel) // self.stride + 1
        y = (self.weight.float().flatten(1) @ columns).unflatten(2, (side, -1))
        return self.with_bias(y.to(x.dtype))


@case("round_off", "kernel in float32 only", on=transformer)
def all_layer_norms_in_float32(model: nn.Module) -> nn.Module:
    """Every LayerNorm casts to float32 and back."""
    for name in ("blocks.0.norm1", "blocks.0.norm2", "blocks.1.norm1", "blocks.1.norm2", "norm"):
        rewritten(model, name, LayerNormInFloat32)
    return model


@in_place_of("fc2", "round_off", "kernel without float64", mlp, "linear_without_float64")
class NoFloat64(LinearWeights):
    """A right kernel that raises in float64; it sums in another order."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype not in (torch.float32, torch.float16):
            raise RuntimeError(f"fused_linear: expected float or half, got {x.dtype}")
        half = x.shape[-1] // 2
        return x[..., :half] @ self.weight[:, :half].T + F.linear(
            x[..., half:], self.weight[:, half:], self.bias
        )
