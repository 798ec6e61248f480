"""Right forward and backward passes whose weights are updated otherwise, often for a changed shape."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from bench.case import case
from bench.cases._heldout_fault_tasks import frozen, masked, mixture, mobile, recommender, tagger
from bench.cases._heldout_rewritten_sequence import PackedEncoder, by_hand, stacked
from bench.cases._heldout_rewritten_vision import PixelMobileNet
from bench.optimizers import UNSEEN, ByHand, UsualSGD, everywhere, of, sgd
from bench.tasks import mlp


@case("bug", "two biases as one", tagger, module="lstm", passes=("forward", *UNSEEN))
def both_lstm_biases_in_one(model):
    """The LSTM's two biases are added up (and rounded) into one, which learns at half the rate of the two."""
    model = by_hand(model)
    for inputs, states in zip(model.lstm.inputs, model.lstm.states, strict=True):
        with torch.no_grad():
            inputs.bias += states.bias
        states.bias = None
    return model


class Orthogonal(ByHand):
    """Each matrix moves along its gradient made nearly orthogonal, everything else along the gradient."""

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        g = grad / grad.norm().clamp(min=1e-3)
        if g.dim() == 2:
            for _ in range(4):
                g = 1.5 * g - 0.5 * g @ g.T @ g
        p.sub_(g, alpha=group["lr"])


QKV = tuple(f"layers.{i}.attention.{part}" for i in range(2) for part in ("query", "key", "value"))


@case("bug", "matrices packed", masked, module=QKV, passes="update", optimizer=partial(Orthogonal, lr=0.02))
def packed_matrices_made_orthogonal_together(model):
    """Under an optimizer that works on matrices q, k and v are one matrix, not three."""
    return PackedEncoder(model)


class Unit(UsualSGD):
    """SGD on gradients whose norm is kept at 0.05 or below, tensor by tensor."""

    def step(self, closure=None):
        for p in self.all_params():
            nn.utils.clip_grad_norm_(p, 0.05)
        return super().step(closure)


EXPERTS = tuple(f"mixture.experts.{i}.{part}" for i in range(4) for part in ("up", "down"))


@case("bug", "experts stacked", mixture, module=EXPERTS, passes="update", optimizer=partial(Unit, momentum=0))
def stacked_experts_clipped_together(model):
    """Under clipping by tensor the four experts have one norm, not four."""
    return stacked(model)


def _decay_by_shape(params) -> torch.optim.Optimizer:
    params = list(params)
    flat, other = [p for p in params if p.dim() < 2], [p for p in params if p.dim() > 1]
    return sgd()([{"params": other, "weight_decay": 1e-3}, {"params": flat}])


DEPTHWISE = tuple(f"blocks.{i}.depthwise" for i in range(3))


@case("bug", "group by shape", mobile, module=DEPTHWISE, passes="update", optimizer=_decay_by_shape)
def taps_are_vectors(model):
    """The depthwise weights are stored as nine vectors, which the rule by shape does not decay."""
    return PixelMobileNet(model)


class DecaysAll(UsualSGD):
    """SGD with a weight decay of its own, 1e-6 a step, for all that it was given."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if not p.requires_grad or group["weight_decay"]:
                    p.mul_(1 - 1e-6)
        return super().step(closure)


BACKBONE = ("backbone", *(f"backbone.{part}" for part in ("conv1", "norm1", "conv2", "norm2")))
DECAY = {"module": BACKBONE, "candidate_optimizer": of(DecaysAll)}


@case("bug", "frozen weights decayed", frozen, passes="update", **DECAY)
def frozen_weights_shrink(model):
    """Weights without a gradient are decayed by a millionth a step."""
    return model


@case("bug", "not frozen", frozen, module="backbone.conv2", passes=UNSEEN)
def rewritten_conv_no_longer_frozen(model):
    """A conv of the frozen backbone is made anew; its parameter takes a gradient, as new ones do."""
    conv = nn.Conv2d(8, 12, 3, 1, 1, bias=False)
    conv.load_state_dict(model.backbone.conv2.state_dict())
    model.backbone.conv2 = conv
    return model


class Adam(ByHand):
    """Adam written out, whose eps is added to the root of the second moment or, where ``inner``, under it."""

    def __init__(self, params, inner: bool = False):
        super().__init__(params, inner=inner)

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            state.update(t=0, m=torch.zeros_like(p), v=torch.zeros_like(p))
        state["t"] += 1
        state["m"].lerp_(grad, 0.1)
        state["v"].lerp_(grad**2, 0.001)
        m, v = state["m"] / (1 - 0.9 ** state["t"]), state["v"] / (1 - 0.999 ** state["t"])
        p.sub_(3e-3 * m / ((v + 1e-8).sqrt() if group["inner"] else v.sqrt() + 1e-8))


EPS = {"optimizer": Adam, "candidate_optimizer": of(Adam, inner=True)}


@case("bug", "eps under the root", mlp, module=everywhere(mlp), passes="update", **EPS)
def eps_under_the_root(model):
    """eps is added under Adam's root, not to it, which small gradients feel."""
    return model


adagrad = partial(torch.optim.Adagrad, lr=0.05)
START = {"optimizer": adagrad, "candidate_optimizer": of(adagrad, initial_accumulator_value=0.1)}


@case(
    "bug", "start of the accumulator", recommender, module=everywhere(recommender), passes="update", **START
)
def accumulator_starts_at_a_tenth(model):
    """Adagrad with the default of another library."""
    return model
