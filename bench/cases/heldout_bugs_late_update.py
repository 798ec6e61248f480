"""Updates that go wrong at one step or from one step on: what an optimizer does only then."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bench.case import Names, case
from bench.cases._heldout_fault_tasks import masked, recommender, siamese, translator, unet
from bench.cases._heldout_rewritten_sequence import PackedEncoder
from bench.optimizers import UsualSGD, apart, everywhere, of
from bench.tasks import Task


def late(kind: str, on: Task, step: int, optimizer: Callable, module: Names = ()) -> Callable:
    """A case of an update that goes wrong at ``step``; everywhere, where no module is named."""
    where = {"module": module or everywhere(on), "passes": "update", "step": step}
    return case("bug", kind, on, candidate_optimizer=optimizer, **where)


class Lookahead(UsualSGD):
    """SGD that after every fifth step goes back half-way to where it was five steps ago."""

    taken = 0

    @torch.no_grad()
    def step(self, closure=None):
        params = self.all_params()
        if self.taken % 5 == 0:
            self.slow = [p.clone() for p in params]
        super().step(closure)
        self.taken += 1
        if self.taken % 5 == 0:
            for p, slow in zip(params, self.slow, strict=True):
                p.lerp_(slow, 0.5)


@late("lookahead", unet, 4, of(Lookahead))
def lookahead_left_in(model):
    """The optimizer of an experiment was left in: nothing is wrong before the fifth update."""
    return model


class SkipsLargeGradients(UsualSGD):
    """SGD that leaves a step out where the gradient's norm is over a bound, as after an overflow."""

    bound = 0.7

    def step(self, closure=None):
        grads = [p.grad for p in self.all_params() if p.grad is not None]
        if torch.cat([g.flatten() for g in grads]).norm() < self.bound:
            return super().step(closure)
        return None


@late("step left out", siamese, 4, of(SkipsLargeGradients))
def step_left_out_for_a_large_gradient(model):
    """A guard against overflow is set so low that it acts on a gradient of the usual kind."""
    return model


class SparseMomentum(UsualSGD):
    """SGD that leaves alone the rows of a table that have no gradient, momentum included."""

    @torch.no_grad()
    def step(self, closure=None):
        tables = self.param_groups[1]["params"]
        before = [(p, p.clone(), (p.grad != 0).any(1, keepdim=True)) for p in tables]
        super().step(closure)
        for p, old, touched in before:
            p.copy_(torch.where(touched, p, old))


@late("momentum of untouched rows", recommender, 1, apart("user.weight", SparseMomentum), "user")
def rows_without_a_gradient_stand_still(model):
    """Rows of users that are not in the batch no longer move by their momentum."""
    return model


class Clipped(UsualSGD):
    """SGD after a clipping of the whole gradient's norm."""

    def step(self, closure=None):
        nn.utils.clip_grad_norm_(self.all_params(), 1.2)
        return super().step(closure)


@late("gradient clipped", masked, 7, of(Clipped))
def clipping_left_on(model):
    """The candidate's gradient is clipped at a norm of 1.2, which the eighth is the first to exceed."""
    return PackedEncoder(model)


@late("dampening", translator, 1, of(UsualSGD, dampening=1e-4))
def slight_dampening(model):
    """The momentum takes 0.9999 of each gradient from the second step on."""
    return model
