"""More rewrites that look wrong and are right: biases that cancel, float32 kernels, dropout, settings."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.case import case, in_place_of, method_of
from bench.cases._same import HalvedLinear
from bench.optimizers import adam, of, sgd
from bench.surgery import recast
from bench.tasks import CNN, TransformerBlock, autoencoder, cnn, dropout_transformer, mlp, transformer

EQUAL = ("bit_identical", "round_off")


@method_of("blocks.0.attention", "round_off", "bias that cancels", transformer, "project")
def key_bias_left_out(self, x):
    """The keys' bias adds the same number to all scores of a query, so softmax never sees it."""
    q, _, v = self.qkv.bias.chunk(3)
    return self.by_head(F.linear(x, self.qkv.weight, torch.cat([q, torch.zeros_like(q), v])))


@in_place_of("", "round_off", "bias that cancels", cnn, "conv_bias_moved_into_the_running_mean")
class ConvBiasMovedIntoTheRunningMean(CNN):
    """Training leaves the conv's bias out, which BatchNorm would cancel; running mean and eval keep it."""

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


@method_of("blocks.0.norm1", EQUAL, "always in float32", transformer)
def layer_norm_always_in_float32(self, x):
    """LayerNorm computes in float32 whatever it is given, as large language models do."""
    weight, bias = self.weight.float(), self.bias.float()
    return F.layer_norm(x.float(), self.normalized_shape, weight, bias, self.eps).type_as(x)


@case(("round_off", "reduced_precision"), "constant in float32", transformer)
def gelu_with_a_float32_constant(model):
    """GELU by ``erf``, with the root of two held as a float32 tensor: right in float32, short in float64."""
    root = torch.tensor(2.0).sqrt()

    class GELU(nn.GELU):
        def forward(self, x):
            return 0.5 * x * (1 + torch.erf(x / root))

    return recast(model, "blocks.0.act", GELU)


@method_of("blocks.1.attention", "round_off", "softmax without the maximum", transformer)
def softmax_without_subtracting_the_maximum(self, x):
    """Exponentials over their sum, nothing subtracted first: the scores are small enough."""
    n, t, d = x.shape
    qkv = self.qkv(x).view(n, t, 3, self.heads, d // self.heads)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    past = torch.ones(t, t, dtype=x.dtype, device=x.device).tril()
    weights = torch.exp(q @ k.transpose(-2, -1) / (d // self.heads) ** 0.5) * past
    mixed = weights @ v / weights.sum(-1, keepdim=True)
    return self.out(mixed.transpose(1, 2).reshape(n, t, d))


@method_of("act2", EQUAL, "guard that never acts", autoencoder)
def guard_against_infinities(self, x):
    """A guard replaces NaN and infinities after a layer; none ever occurs."""
    return torch.nan_to_num(nn.SiLU.forward(self, x))


@method_of("blocks.0.drop", EQUAL, "dropout, same draws", dropout_transformer)
def dropout_by_an_in_place_bernoulli(self, x):
    """Dropout by hand whose mask draws the same numbers in the same order as torch's."""
    if not self.training:
        return x
    keep = 1 - self.p
    return x * torch.empty_like(x).bernoulli_(keep).div_(keep)


@method_of("blocks.1.drop", EQUAL, "dropout, same draws", dropout_transformer)
def dropout_on_a_transposed_view(self, x):
    """Dropout on a transposed view, whose mask is drawn in the order of memory all the same."""
    return nn.Dropout.forward(self, x.transpose(1, 2)).transpose(1, 2)


@method_of("blocks.0", EQUAL, "checkpoint", dropout_transformer)
def checkpointed_block(self, x):
    """A block is computed again in the backward pass, with the same dropout mask."""
    return checkpoint(TransformerBlock.forward, self, x, use_reentrant=False)


STILL = {"optimizer": sgd(0.0), "candidate_optimizer": of(sgd(0.0, 0.5), weight_decay=0.1)}


@case("round_off", "setting without effect", mlp, **STILL)
def other_settings_at_rate_zero(model):
    """Momentum and weight decay differ, but the rate is zero and no weight ever moves."""
    return recast(model, "fc1", HalvedLinear)


def _undecayed(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([{"params": [p]} for p in model.parameters()], lr=1e-2, weight_decay=0.0)


@case(EQUAL, "setting without effect", mlp, optimizer=adam(1e-2), candidate_optimizer=_undecayed)
def adamw_without_decay(model):
    """AdamW without weight decay, one group per weight, is Adam."""
    return model
