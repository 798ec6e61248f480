"""Reduced precision in what is kept between the steps: weights, running statistics, the optimizer's state."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import everywhere, low, recast
from experiments.calibration.cases._heldout_fault_tasks import mixture, preact, vgg
from experiments.calibration.tasks import mlp


@case("reduced_precision", "weights stored in bfloat16", vgg, module="conv3", passes="forward")
def weights_stored_in_bfloat16(model):
    """A conv's parameters are bfloat16 tensors, cast up to the input's dtype where they are used."""

    class Conv(nn.Conv2d):
        def _conv_forward(self, x, weight, bias):
            return super()._conv_forward(x, weight.to(x.dtype), bias.to(x.dtype))

    model = recast(model, "conv3", Conv)
    model.conv3.to(torch.bfloat16)
    return model


@case("reduced_precision", "running statistics", preact, module="stages.1.norm2", passes="buffer")
def running_statistics_kept_in_bfloat16(model):
    """After each batch the running statistics are rounded to bfloat16."""

    class Norm(nn.BatchNorm2d):
        def forward(self, x):
            y = super().forward(x)
            if self.training:
                for kept in (self.running_mean, self.running_var):
                    kept.data.copy_(low(kept))
            return y

    return recast(model, "stages.1.norm2", Norm)


class LowSecondMoment(torch.optim.Adam):
    """Adam that keeps its second moments in float16's eleven bits (the range is float32's)."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for state in self.state.values():
            fraction, exponent = torch.frexp(state["exp_avg_sq"])
            state["exp_avg_sq"].copy_(torch.ldexp((fraction * 2048).round() / 2048, exponent))


@case(
    "reduced_precision",
    "optimizer state",
    mixture,
    module=everywhere(mixture),
    passes="update",
    optimizer=lambda params: torch.optim.Adam(params, lr=3e-3),
    candidate_optimizer=lambda model: LowSecondMoment(model.parameters(), lr=3e-3),
)
def second_moments_in_eleven_bits(model):
    """The second moments are rounded after each step, so that the second step is the first to feel it."""
    return model


class LowWeights(torch.optim.SGD):
    """SGD whose last group is stored in bfloat16 between the steps, with no full copy kept."""

    @torch.no_grad()
    def step(self, closure=None):
        super().step(closure)
        for p in self.param_groups[-1]["params"]:
            p.copy_(low(p))


def _low_middle(model: nn.Module) -> torch.optim.Optimizer:
    middle: list[Tensor] = list(model.fc2.parameters())
    rest = [*model.fc1.parameters(), *model.fc3.parameters()]
    return LowWeights([{"params": rest}, {"params": middle}], lr=0.1, momentum=0.9)


@case(
    "reduced_precision",
    "weights rounded by the update",
    mlp,
    module="fc2",
    passes="update",
    candidate_optimizer=_low_middle,
)
def middle_layer_rounded_after_each_update(model):
    """One layer's weights are rounded to bfloat16 by each update."""
    return model
