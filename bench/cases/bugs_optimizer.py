"""Right rewrites that are trained with other settings than the reference."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bench.case import case, in_place_of
from bench.cases._bug_parts import Halves
from bench.optimizers import adam, apart, everywhere, of, sgd
from bench.tasks import Task, autoencoder, cnn, mlp, recurrent, resnet, transformer, two_inputs

ADAM = adam(1e-2)
DECAYED = sgd(weight_decay=5e-4)
RATE, MOMENTUM = "other learning rate", "other momentum"


def halved(name: str, at: str, kind: str, on: Task, part: str, step: int | None = None, **settings) -> None:
    """A case whose layer ``at`` is split, rightly; ``settings`` hold for names with ``part`` in them."""
    truth = {"passes": "update", "step": step, "candidate_optimizer": apart(part, **settings)}
    in_place_of(at, "bug", kind, on, name, **truth)(lambda layer: Halves(layer))


# The new layer's group has half the learning rate.
halved("split_conv_at_half_the_rate", "layer1.1.conv2", RATE, resnet, "layer1.1.conv2", lr=0.05)
# The first half's learning rate is 1e-5 too large.
halved("half_at_a_rate_off_by_1e_5", "down2", RATE, autoencoder, "down2.first", lr=0.1 * (1 + 1e-5))
# The new layer's group has a momentum of 0.85; the first step does not show it.
halved("split_conv_with_other_momentum", "conv", MOMENTUM, two_inputs, "conv.", 1, momentum=0.85)
# The new layer's group has Nesterov momentum.
halved("split_linear_with_nesterov", "blocks.1.up", MOMENTUM, transformer, "blocks.1.up", nesterov=True)

APART = {"optimizer": DECAYED, "candidate_optimizer": apart("conv2.second", DECAYED, weight_decay=0)}
KERAS = {"module": everywhere(mlp), "optimizer": ADAM, "candidate_optimizer": of(ADAM, eps=1e-7)}
BETAS = {"optimizer": ADAM, "candidate_optimizer": apart("cell.", ADAM, betas=(0.9, 0.99))}


@in_place_of("conv2", "bug", "weight decay missing", cnn, passes="update", **APART)
def half_without_weight_decay(conv):
    """The second half of the split landed in the group that is not decayed."""
    return Halves(conv)


@in_place_of("fc2", "bug", "other Adam settings", mlp, passes="update", **KERAS)
def adam_with_the_eps_of_keras(linear):
    """eps 1e-7 for 1e-8."""
    return Halves(linear)


@case("bug", "other Adam settings", recurrent, module="cell", passes="update", step=1, **BETAS)
def cell_with_other_betas(model):
    """The second beta is 0.99 in one group; bias correction hides it in the first step."""
    return model


def _decay_by_name(model: nn.Module) -> Optimizer:
    named = list(model.named_parameters())
    kernels = [p for name, p in named if name.endswith(("weight", "bias"))]
    rest = [p for name, p in named if not name.endswith(("weight", "bias"))]
    return AdamW([{"params": kernels}, {"params": rest, "weight_decay": 0}], lr=1e-3)


NAMED = {"optimizer": partial(AdamW, lr=1e-3), "candidate_optimizer": _decay_by_name}


@in_place_of(
    "fc2", "bug", "weight decay missing", mlp, "renamed_weight_without_weight_decay", passes="update", **NAMED
)
class NamedKernel(nn.Module):
    """The rule that picks what is decayed goes by name; the new weight is called kernel."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.kernel, self.bias = linear.weight, linear.bias

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.kernel, self.bias)


def _decay_matrices(params) -> Optimizer:
    """The common rule: what has two dimensions or more is decayed."""
    params = list(params)
    matrices, rest = [p for p in params if p.ndim > 1], [p for p in params if p.ndim < 2]
    return sgd()([{"params": matrices, "weight_decay": 0.01}, {"params": rest}])


BY_SHAPE = {"passes": "update", "optimizer": _decay_matrices}


@in_place_of("fc2", "bug", "group by shape", mlp, "bias_decayed_as_a_matrix", **BY_SHAPE)
class BiasAsRow(nn.Module):
    """The bias is stored as [1, 32], so that the rule by shape decays it."""

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.weight, self.bias = linear.weight, nn.Parameter(linear.bias.detach()[None].clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.T + self.bias
