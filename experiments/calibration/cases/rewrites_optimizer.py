"""True rewrites of the update: parameter groups, implementations, and rewrites trained by Adam and AdamW."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from experiments.calibration.case import case
from experiments.calibration.cases._rewritten import SAME, rewritten
from experiments.calibration.cases.rewrites_attention import ThreeProjections
from experiments.calibration.cases.rewrites_conv import OutSplit
from experiments.calibration.cases.rewrites_dense import Transposed
from experiments.calibration.tasks import cnn, dropout_transformer, mlp, recurrent, transformer

sgd = partial(SGD, lr=0.1, momentum=0.9)
adam = partial(Adam, lr=1e-3)
adamw = partial(AdamW, lr=1e-3, weight_decay=0.05)


def _of(make: Callable) -> Callable[[nn.Module], Optimizer]:
    """The optimizer ``make(params)`` of a module's parameters."""
    return lambda model: make(model.parameters())


def _biases_first(model: nn.Module) -> Optimizer:
    biases = [p for p in model.parameters() if p.ndim == 1]
    weights = [p for p in model.parameters() if p.ndim > 1]
    return sgd([{"params": biases}, {"params": weights}])


def _group_each(model: nn.Module) -> Optimizer:
    return adamw([{"params": [p], "name": name} for name, p in reversed(list(model.named_parameters()))])


class PlainAdam(Optimizer):
    """Adam written out."""

    def __init__(
        self, params, lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8
    ):
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(p, group["lr"], *group["betas"], group["eps"])

    def _update(self, p: nn.Parameter, lr: float, beta1: float, beta2: float, eps: float) -> None:
        state = self.state[p]
        if not state:
            state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["t"] += 1
        state["m"] = beta1 * state["m"] + (1 - beta1) * p.grad
        state["v"] = beta2 * state["v"] + (1 - beta2) * p.grad**2
        mean = state["m"] / (1 - beta1 ** state["t"])
        square = state["v"] / (1 - beta2 ** state["t"])
        p -= lr * mean / (square.sqrt() + eps)


class VelocitySGD(Optimizer):
    """Momentum with the learning rate inside the velocity, as the older textbooks have it."""

    def __init__(self, params, lr: float, momentum: float):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                velocity = self.state[p].setdefault("velocity", torch.zeros_like(p))
                velocity.mul_(group["momentum"]).sub_(p.grad, alpha=group["lr"])
                p.add_(velocity)


@case(SAME, "parameter groups", on=mlp, candidate_optimizer=_biases_first)
def biases_in_a_group_of_their_own(model: nn.Module) -> nn.Module:
    """Two groups with the same settings, biases first."""
    return model


@case(SAME, "parameter groups", on=transformer, optimizer=adamw, candidate_optimizer=_group_each)
def a_group_for_each_parameter(model: nn.Module) -> nn.Module:
    """AdamW with a named group for each parameter, the last first."""
    return model


@case(SAME, "optimizer's implementation", on=cnn, candidate_optimizer=_of(partial(sgd, foreach=True)))
def sgd_foreach(model: nn.Module) -> nn.Module:
    """All parameters in one call."""
    return model


@case(
    SAME,
    "optimizer's implementation",
    on=recurrent,
    optimizer=adam,
    candidate_optimizer=_of(partial(adam, fused=True)),
)
def adam_fused(model: nn.Module) -> nn.Module:
    """The fused kernel."""
    return model


@case(
    SAME,
    "optimizer's implementation",
    on=dropout_transformer,
    optimizer=adamw,
    candidate_optimizer=_of(partial(adamw, foreach=True)),
)
def adamw_foreach(model: nn.Module) -> nn.Module:
    """All parameters in one call."""
    return model


@case(SAME, "optimizer by hand", on=mlp, optimizer=adam, candidate_optimizer=_of(PlainAdam))
def adam_by_hand(model: nn.Module) -> nn.Module:
    """The equations of the paper."""
    return model


@case(
    SAME,
    "optimizer by hand",
    on=mlp,
    candidate_optimizer=_of(partial(VelocitySGD, lr=0.1, momentum=0.9)),
)
def momentum_with_the_rate_inside(model: nn.Module) -> nn.Module:
    """v = 0.9 v - 0.1 g, p = p + v: the same at a constant rate."""
    return model


@case(SAME, "rewrite trained by Adam", on=cnn, optimizer=adam)
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
