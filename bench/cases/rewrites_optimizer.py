"""True rewrites of the update: parameter groups, implementations, and rewrites trained by Adam and AdamW."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from bench.case import case
from bench.cases._rewritten import SAME, rewritten
from bench.cases.rewrites_attention import ThreeProjections
from bench.cases.rewrites_conv import OutSplit
from bench.cases.rewrites_dense import Transposed
from bench.optimizers import ByHand, adam, of, sgd
from bench.tasks import cnn, dropout_transformer, mlp, recurrent, transformer

ADAM = adam(1e-3)
adamw = partial(AdamW, lr=1e-3, weight_decay=0.05)


def _biases_first(model: nn.Module) -> Optimizer:
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    return sgd()([{"params": biases}, {"params": weights}])


def _group_each(model: nn.Module) -> Optimizer:
    return adamw([{"params": [p], "name": name} for name, p in reversed(list(model.named_parameters()))])


class PlainAdam(ByHand):
    """Adam written out."""

    def __init__(self, params):
        super().__init__(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8)

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        beta1, beta2 = group["betas"]
        state["t"] += 1
        state["m"] = beta1 * state["m"] + (1 - beta1) * grad
        state["v"] = beta2 * state["v"] + (1 - beta2) * grad**2
        mean = state["m"] / (1 - beta1 ** state["t"])
        square = state["v"] / (1 - beta2 ** state["t"])
        p -= group["lr"] * mean / (square.sqrt() + group["eps"])


class VelocitySGD(ByHand):
    """Momentum with the learning rate inside the velocity, as the older textbooks have it."""

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        velocity = state.setdefault("velocity", torch.zeros_like(p))
        velocity.mul_(group["momentum"]).sub_(grad, alpha=group["lr"])
        p.add_(velocity)


@case(SAME, "parameter groups", on=mlp, candidate_optimizer=_biases_first)
def biases_in_a_group_of_their_own(model: nn.Module) -> nn.Module:
    """Two groups with the same settings, biases first."""
    return model


@case(SAME, "parameter groups", on=transformer, optimizer=adamw, candidate_optimizer=_group_each)
def a_group_for_each_parameter(model: nn.Module) -> nn.Module:
    """AdamW with a named group for each parameter, the last first."""
    return model


@case(SAME, "optimizer's implementation", on=cnn, candidate_optimizer=of(sgd(), foreach=True))
def sgd_foreach(model: nn.Module) -> nn.Module:
    """All parameters in one call."""
    return model


@case(
    SAME, "optimizer's implementation", on=recurrent, optimizer=ADAM, candidate_optimizer=of(ADAM, fused=True)
)
def adam_fused(model: nn.Module) -> nn.Module:
    """The fused kernel."""
    return model


@case(
    SAME,
    "optimizer's implementation",
    on=dropout_transformer,
    optimizer=adamw,
    candidate_optimizer=of(adamw, foreach=True),
)
def adamw_foreach(model: nn.Module) -> nn.Module:
    """All parameters in one call."""
    return model


@case(SAME, "optimizer by hand", on=mlp, optimizer=ADAM, candidate_optimizer=of(PlainAdam))
def adam_by_hand(model: nn.Module) -> nn.Module:
    """The equations of the paper."""
    return model


@case(SAME, "optimizer by hand", on=mlp, candidate_optimizer=of(VelocitySGD, lr=0.1, momentum=0.9))
def momentum_with_the_rate_inside(model: nn.Module) -> nn.Module:
    """v = 0.9 v - 0.1 g, p = p + v: the same at a constant rate."""
    return model


@case(SAME, "rewrite trained by Adam", on=cnn, optimizer=ADAM)
def conv_out_split_under_adam(model: nn.Module) -> nn.Module:
    """conv1 in two; its bias, which BatchNorm takes out again, has a gradient of rounding alone."""
    return rewritten(model, "conv1", lambda conv: OutSplit(conv, 5))


@case(SAME, "rewrite trained by Adam", on=transformer, optimizer=adamw)
def three_projections_under_adamw(model: nn.Module) -> nn.Module:
    """q, k and v apart; a bias of the keys has a gradient of rounding alone."""
    return rewritten(model, "blocks.0.attention", ThreeProjections)


@case(SAME, "rewrite trained by Adam", on=mlp, optimizer=adamw)
def linear_stored_transposed_under_adamw(model: nn.Module) -> nn.Module:
    """The weight is kept as [inputs, outputs]."""
    return rewritten(model, "fc1", Transposed)
