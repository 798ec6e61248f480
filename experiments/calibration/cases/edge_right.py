"""More rewrites that look wrong and are right: biases that cancel, float32 kernels, dropout, settings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from experiments.calibration.case import case
from experiments.calibration.cases._lowbits import recast
from experiments.calibration.cases._same import HalvedLinear
from experiments.calibration.tasks import (
    CNN,
    SelfAttention,
    TransformerBlock,
    autoencoder,
    cnn,
    dropout_transformer,
    mlp,
    transformer,
)


@case("round_off", "bias that cancels", transformer)
def key_bias_left_out(model):
    """The keys' bias adds the same number to all scores of a query, so softmax never sees it."""

    class Attention(SelfAttention):
        def forward(self, x):
            n, t, d = x.shape
            bias = torch.cat([self.qkv.bias[:d], x.new_zeros(d), self.qkv.bias[2 * d :]])
            qkv = F.linear(x, self.qkv.weight, bias).view(n, t, 3, self.heads, d // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            return self.out(mixed.transpose(1, 2).reshape(n, t, d))

    return recast(model, "blocks.0.attention", Attention)


@case("round_off", "bias that cancels", cnn)
def conv_bias_moved_into_the_running_mean(model):
    """Training leaves the conv's bias out, which BatchNorm would cancel; running mean and eval keep it."""

    class Fused(CNN):
        def forward(self, x):
            bn, bias = self.bn1, None if self.training else self.conv1.bias
            y = F.conv2d(x, self.conv1.weight, bias, padding=1)
            if not self.training:
                return self.tail(bn(y))
            with torch.no_grad():
                variance, mean = torch.var_mean(y, (0, 2, 3))
                bn.running_mean.lerp_(mean + self.conv1.bias, bn.momentum)
                bn.running_var.lerp_(variance, bn.momentum)
                bn.num_batches_tracked += 1
            return self.tail(F.batch_norm(y, None, None, bn.weight, bn.bias, True, 0.0, bn.eps))

        def tail(self, x):
            x = self.act2(self.bn2(self.conv2(self.pool(self.act1(x)))))
            x = self.act3(self.norm3(self.conv3(x)))
            return self.fc(self.avg(x).flatten(1))

    return recast(model, "", Fused)


@case(("bit_identical", "round_off"), "always in float32", transformer)
def layer_norm_always_in_float32(model):
    """LayerNorm computes in float32 whatever it is given, as large language models do."""

    class Norm(nn.LayerNorm):
        def forward(self, x):
            weight, bias = self.weight.float(), self.bias.float()
            return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)

    return recast(model, "blocks.0.norm1", Norm)


@case(("round_off", "reduced_precision"), "constant in float32", transformer)
def gelu_with_a_float32_constant(model):
    """GELU by ``erf``, with the root of two held as a float32 tensor: right in float32, short in float64."""
    root = torch.tensor(2.0).sqrt()

    class GELU(nn.GELU):
        def forward(self, x):
            return 0.5 * x * (1 + torch.erf(x / root))

    return recast(model, "blocks.0.act", GELU)


@case("round_off", "softmax without the maximum", transformer)
def softmax_without_subtracting_the_maximum(model):
    """Exponentials over their sum, nothing subtracted first: the scores are small enough."""

    class Attention(SelfAttention):
        def forward(self, x):
            n, t, d = x.shape
            qkv = self.qkv(x).view(n, t, 3, self.heads, d // self.heads)
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            past = torch.ones(t, t, dtype=x.dtype, device=x.device).tril()
            weights = torch.exp(q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5) * past
            mixed = weights @ v / weights.sum(-1, keepdim=True)
            return self.out(mixed.transpose(1, 2).reshape(n, t, d))

    return recast(model, "blocks.1.attention", Attention)


@case(("bit_identical", "round_off"), "guard that never acts", autoencoder)
def guard_against_infinities(model):
    """A guard replaces NaN and infinities after a layer; none ever occurs."""

    class SiLU(nn.SiLU):
        def forward(self, x):
            return torch.nan_to_num(super().forward(x))

    return recast(model, "act2", SiLU)


@case(("bit_identical", "round_off"), "dropout, same draws", dropout_transformer)
def dropout_by_an_in_place_bernoulli(model):
    """Dropout by hand whose mask draws the same numbers in the same order as torch's."""

    class Dropout(nn.Dropout):
        def forward(self, x):
            if not self.training:
                return x
            keep = 1 - self.p
            return x * torch.empty_like(x).bernoulli_(keep).div_(keep)

    return recast(model, "blocks.0.drop", Dropout)


@case(("bit_identical", "round_off"), "dropout, same draws", dropout_transformer)
def dropout_on_a_transposed_view(model):
    """Dropout on a transposed view, whose mask is drawn in the order of memory all the same."""

    class Dropout(nn.Dropout):
        def forward(self, x):
            return super().forward(x.transpose(1, 2)).transpose(1, 2)

    return recast(model, "blocks.1.drop", Dropout)


@case(("bit_identical", "round_off"), "checkpoint", dropout_transformer)
def checkpointed_block(model):
    """A block is computed again in the backward pass, with the same dropout mask."""

    class Block(TransformerBlock):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    return recast(model, "blocks.0", Block)


@case(
    "round_off",
    "setting without effect",
    mlp,
    optimizer=lambda params: torch.optim.SGD(params, lr=0.0, momentum=0.9),
    candidate_optimizer=lambda net: torch.optim.SGD(net.parameters(), lr=0.0, momentum=0.5, weight_decay=0.1),
)
def other_settings_at_rate_zero(model):
    """Momentum and weight decay differ, but the rate is zero and no weight ever moves."""
    return recast(model, "fc1", HalvedLinear)


@case(
    ("bit_identical", "round_off"),
    "setting without effect",
    mlp,
    optimizer=lambda params: torch.optim.Adam(params, lr=1e-2),
    candidate_optimizer=lambda net: torch.optim.AdamW(
        [{"params": [p]} for p in net.parameters()], lr=1e-2, weight_decay=0.0
    ),
)
def adamw_without_decay(model):
    """AdamW without weight decay, one group per weight, is Adam."""
    return model
