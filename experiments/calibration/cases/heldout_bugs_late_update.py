"""Updates that go wrong at one step or from one step on: what an optimizer does only then."""

from __future__ import annotations

import torch
from torch import nn

from experiments.calibration.case import case
from experiments.calibration.cases._heldout_fault_parts import everywhere, sgd
from experiments.calibration.cases._heldout_fault_tasks import masked, recommender, siamese, translator, unet
from experiments.calibration.cases._heldout_rewritten_sequence import PackedEncoder


class Lookahead(torch.optim.SGD):
    """SGD that after every fifth step goes back half-way to where it was five steps ago."""

    taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        params = [p for group in self.param_groups for p in group["params"]]
        if self.taken % 5 == 0:
            self.slow = [p.clone() for p in params]
        super().step(closure)
        self.taken += 1
        if self.taken % 5 == 0:
            for p, slow in zip(params, self.slow, strict=True):
                p.lerp_(slow, 0.5)


@case(
    "bug",
    "lookahead",
    unet,
    module=everywhere(unet),
    passes="update",
    step=4,
    candidate_optimizer=lambda model: Lookahead(model.parameters(), lr=0.1, momentum=0.9),
)
def lookahead_left_in(model):
    """The optimizer of an experiment was left in: nothing is wrong before the fifth update."""
    return model


class SkipsLargeGradients(torch.optim.SGD):
    """SGD that leaves a step out where the gradient's norm is over a bound, as after an overflow."""

    bound = 0.7

    def step(self, closure=None):
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if torch.cat([g.flatten() for g in grads]).norm() < self.bound:
            return super().step(closure)
        return None


@case(
    "bug",
    "step left out",
    siamese,
    module=everywhere(siamese),
    passes="update",
    step=4,
    candidate_optimizer=lambda model: SkipsLargeGradients(model.parameters(), lr=0.1, momentum=0.9),
)
def step_left_out_for_a_large_gradient(model):
    """A guard against overflow is set so low that it acts on a gradient of the usual kind."""
    return model


class SparseMomentum(torch.optim.SGD):
    """SGD that leaves alone the rows of a table that have no gradient, momentum included."""

    @torch.no_grad()
    def step(self, closure=None):
        tables = self.param_groups[1]["params"]
        before = [(p, p.clone(), (p.grad != 0).any(1, keepdim=True)) for p in tables]
        super().step(closure)
        for p, old, touched in before:
            p.copy_(torch.where(touched, p, old))


def _sparse_users(model: nn.Module) -> torch.optim.Optimizer:
    rest = [p for name, p in model.named_parameters() if name != "user.weight"]
    return SparseMomentum([{"params": rest}, {"params": [model.user.weight]}], lr=0.1, momentum=0.9)


@case(
    "bug",
    "momentum of untouched rows",
    recommender,
    module="user",
    passes="update",
    step=1,
    candidate_optimizer=_sparse_users,
)
def rows_without_a_gradient_stand_still(model):
    """Rows of users that are not in the batch no longer move by their momentum."""
    return model


class Clipped(torch.optim.SGD):
    """SGD after a clipping of the whole gradient's norm."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.2)
        return super().step(closure)


@case(
    "bug",
    "gradient clipped",
    masked,
    module=everywhere(masked),
    passes="update",
    step=7,
    candidate_optimizer=lambda model: Clipped(model.parameters(), lr=0.1, momentum=0.9),
)
def clipping_left_on(model):
    """The candidate's gradient is clipped at a norm of 1.2, which the eighth is the first to exceed."""
    return PackedEncoder(model)


@case(
    "bug",
    "dampening",
    translator,
    module=everywhere(translator),
    passes="update",
    step=1,
    candidate_optimizer=lambda model: sgd(model.parameters(), dampening=1e-4),
)
def slight_dampening(model):
    """The momentum takes 0.9999 of each gradient from the second step on."""
    return model
