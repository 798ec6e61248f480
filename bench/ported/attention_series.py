"""PatchTST's batch norms between attention against norms by hand over the last axis, in Flax's manner."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.case import case
from bench.cases._rewritten import SAME
from bench.optimizers import sgd
from bench.ported._attention_series import series
from bench.ported._text import dense, kept, stacked
from bench.ported._text_towers import HEADS


class LastAxisNorm(nn.Module):
    """Over all axes but the last; a running mean keeps 0.9 of what it was."""

    def __init__(self, norm: nn.BatchNorm1d, biased: bool):
        super().__init__()
        self.scale, self.offset, self.biased = kept(norm.weight), kept(norm.bias), biased
        self.register_buffer("mean", norm.running_mean.clone())
        self.register_buffer("var", norm.running_var.clone())

    def forward(self, x: Tensor) -> Tensor:
        mean, var = self.mean, self.var
        if self.training:
            flat = x.flatten(0, 1)
            mean, var = flat.mean(0), flat.var(0, correction=0)
            with torch.no_grad():
                share = 1 if self.biased else len(flat) / (len(flat) - 1)
                self.mean.copy_(0.9 * self.mean + 0.1 * mean)
                self.var.copy_(0.9 * self.var + 0.1 * share * var)
        return (x - mean) * torch.rsqrt(var + 1e-5) * self.scale + self.offset


class Encoder(nn.Module):
    def __init__(self, layer: nn.Module, biased: bool):
        super().__init__()
        own = layer.self_attn
        self.to_qkv, self.to_out = (
            stacked(own.q_proj, own.k_proj, own.v_proj),
            dense(own.out_proj.weight, own.out_proj.bias),
        )
        self.bn_a, self.bn_b = LastAxisNorm(layer.batchnorm1, biased), LastAxisNorm(layer.batchnorm2, biased)
        self.wide, self.narrow = (dense(layer.ff[i].weight, layer.ff[i].bias) for i in (0, 2))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.to_qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = self.bn_a(x + self.to_out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.bn_b(x + self.narrow(F.gelu(self.wide(x))))


class Forecaster(nn.Module):
    """Patches by a strided convolution, the head's weights as [patches, D, horizon]."""

    def __init__(self, model: nn.Module, biased: bool = False):
        super().__init__()
        self.patch = nn.Conv1d(1, model.input_embedding.out_features, 4, stride=4)
        self.patch.weight = kept(model.input_embedding.weight[:, None])
        self.patch.bias, self.where = kept(model.input_embedding.bias), kept(model.position_enc.T)
        self.encoders = nn.ModuleList(Encoder(layer, biased) for layer in model.layers)
        self.out, self.out_bias = kept(model.head.weight.T.unflatten(0, (6, -1))), kept(model.head.bias)

    def forward(self, past_values: Tensor) -> Tensor:
        x = (self.patch(past_values[:, None]) + self.where).mT
        for encoder in self.encoders:
            x = encoder(x)
        return torch.einsum("npd,pdo->no", x, self.out) + self.out_bias


@case(SAME, "batch norms over the last axis", series, optimizer=sgd(0.005))
def patchtst_with_norms_over_the_last_axis(model: nn.Module) -> nn.Module:
    return Forecaster(model)


NORMS = tuple(f"layers.{i}.batchnorm{j}" for i in (0, 1) for j in (1, 2))


@case("bug", "running statistics", series, module=NORMS, passes="buffer", optimizer=sgd(0.005))
def patchtst_running_variance_biased(model: nn.Module, wrong: bool = True) -> nn.Module:
    """The running variance takes the batch's biased variance, as Flax does; torch takes the unbiased one."""
    return Forecaster(model, biased=wrong)
