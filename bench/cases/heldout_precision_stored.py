"""Reduced precision in what is kept between the steps: weights, running statistics, the optimizer's state."""

from __future__ import annotations

import torch
from torch import nn

from bench.case import case, method_of
from bench.cases._heldout_fault_parts import low
from bench.cases._heldout_fault_tasks import mixture, preact, vgg
from bench.optimizers import UsualSGD, adam, apart, everywhere, of
from bench.surgery import recast
from bench.tasks import mlp


@case("reduced_precision", "weights stored in bfloat16", vgg, module="conv3")
def weights_stored_in_bfloat16(model):
    """A conv's parameters are bfloat16 tensors, cast up to the input's dtype where they are used."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight.to(x.dtype), bias.to(x.dtype))

    model = recast(model, "conv3", Conv)
    model.conv3.to(torch.bfloat16)
    return model


@method_of("stages.1.norm2", "reduced_precision", "running statistics", preact, passes="buffer")
def running_statistics_kept_in_bfloat16(self, x):
    """After each batch the running statistics are rounded to bfloat16."""
    y = nn.BatchNorm2d.forward(self, x)
    if self.training:
        for kept in (self.running_mean, self.running_var):
            kept.data.copy_(low(kept))
    return y


class LowSecondMoment(torch.optim.Adam):
    """Adam that keeps its second moments in float16's eleven bits (the range is float32's)."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            fraction, exponent = torch.frexp(state["exp_avg_sq"])
            state["exp_avg_sq"].copy_(torch.ldexp((fraction * 2048).round() / 2048, exponent))


LOW = {"optimizer": adam(3e-3), "candidate_optimizer": of(LowSecondMoment, lr=3e-3)}


@case("reduced_precision", "optimizer state", mixture, module=everywhere(mixture), passes="update", **LOW)
def second_moments_in_eleven_bits(model):
    """The second moments are rounded after each step, so that the second step is the first to feel it."""
    return model


class LowWeights(UsualSGD):
    """SGD whose last group is stored in bfloat16 between the steps, with no full copy kept."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[-1]["params"]:
            p.copy_(low(p))


ROUNDED = {"module": "fc2", "candidate_optimizer": apart("fc2", LowWeights)}


@case("reduced_precision", "weights rounded by the update", mlp, passes="update", **ROUNDED)
def middle_layer_rounded_after_each_update(model):
    """One layer's weights are rounded to bfloat16 by each update."""
    return model
