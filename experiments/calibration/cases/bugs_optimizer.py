"""Right rewrites that are trained with other settings than the reference."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from experiments.calibration.case import case
from experiments.calibration.cases._bug_parts import Halves
from experiments.calibration.cases._swap import replace
from experiments.calibration.cases.bugs_update import DECAYED, SGD, apart, everywhere
from experiments.calibration.tasks import autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs

ADAM = partial(torch.optim.Adam, lr=1e-2)


@case(
    "bug",
    "weight decay missing",
    cnn,
    module="conv2",
    passes="update",
    optimizer=DECAYED,
    candidate_optimizer=apart("conv2.second", DECAYED, weight_decay=0),
)
def half_without_weight_decay(model):
    """The second half of the split landed in the group that is not decayed."""
    return replace(model, "conv2", Halves(model.conv2))


def _decay_by_name(model: nn.Module) -> torch.optim.Optimizer:
    named = list(model.named_parameters())
    kernels = [p for name, p in named if name.endswith(("weight", "bias"))]
    rest = [p for name, p in named if not name.endswith(("weight", "bias"))]
    return torch.optim.AdamW([{"params": kernels}, {"params": rest, "weight_decay": 0}], lr=1e-3)


class NamedKernel(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.kernel, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.kernel, self.bias)


@case(
    "bug",
    "weight decay missing",
    mlp,
    module="fc2",
    passes="update",
    optimizer=partial(torch.optim.AdamW, lr=1e-3),
    candidate_optimizer=_decay_by_name,
)
def renamed_weight_without_weight_decay(model):
    """The rule that picks what is decayed goes by name; the new weight is called kernel."""
    return replace(model, "fc2", NamedKernel(model.fc2))


def _decay_matrices(params) -> torch.optim.Optimizer:
    """The common rule: what has two dimensions or more is decayed."""
    params = list(params)
    groups = [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.01},
        {"params": [p for p in params if p.ndim < 2]},
    ]
    return SGD(groups)


class BiasAsRow(nn.Module):
    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, nn.Parameter(linear.bias.detach()[None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias


@case("bug", "group by shape", mlp, module="fc2", passes="update", optimizer=_decay_matrices)
def bias_decayed_as_a_matrix(model):
    """The bias is stored as [1, 32], so that the rule by shape decays it."""
    return replace(model, "fc2", BiasAsRow(model.fc2))


@case(
    "bug",
    "other learning rate",
    resnet,
    module="layer1.1.conv2",
    passes="update",
    candidate_optimizer=apart("layer1.1.conv2", lr=0.05),
)
def split_conv_at_half_the_rate(model):
    """The new layer's group has half the learning rate."""
    return replace(model, "layer1.1.conv2", Halves(model.layer1[1].conv2))


@case(
    "bug",
    "other learning rate",
    autoencoder,
    module="down2",
    passes="update",
    candidate_optimizer=apart("down2.first", lr=0.1 * (1 + 1e-5)),
)
def half_at_a_rate_off_by_1e_5(model):
    """The first half's learning rate is 1e-5 too large."""
    return replace(model, "down2", Halves(model.down2))


@case(
    "bug",
    "other momentum",
    two_inputs,
    module="conv",
    passes="update",
    step=1,
    candidate_optimizer=apart("conv.", momentum=0.85),
)
def split_conv_with_other_momentum(model):
    """The new layer's group has a momentum of 0.85; the first step does not show it."""
    return replace(model, "conv", Halves(model.conv))


@case(
    "bug",
    "other momentum",
    transformer,
    module="blocks.1.up",
    passes="update",
    candidate_optimizer=apart("blocks.1.up", nesterov=True),
)
def split_linear_with_nesterov(model):
    """The new layer's group has Nesterov momentum."""
    return replace(model, "blocks.1.up", Halves(model.blocks[1].up))


@case(
    "bug",
    "other Adam settings",
    mlp,
    module=everywhere(mlp),
    passes="update",
    optimizer=ADAM,
    candidate_optimizer=lambda model: ADAM(model.parameters(), eps=1e-7),
)
def adam_with_the_eps_of_keras(model):
    """eps 1e-7 for 1e-8."""
    return replace(model, "fc2", Halves(model.fc2))


@case(
    "bug",
    "other Adam settings",
    recurrent,
    module="cell",
    passes="update",
    step=1,
    optimizer=ADAM,
    candidate_optimizer=apart("cell.", ADAM, betas=(0.9, 0.99)),
)
def cell_with_other_betas(model):
    """The second beta is 0.99 in one group; bias correction hides it in the first step."""
    return model
