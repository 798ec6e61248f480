"""Rules of TensorFlow and Keras written out, and SGD whose rate falls."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.optimizers import ByHand


class Falling(torch.optim.SGD):
    """SGD whose rate is a fifth from the sixth step on."""

    def __init__(self, params, lr: float = 0.05, **settings: object):
        super().__init__(params, lr=lr, momentum=0.9, **settings)
        for group in self.param_groups:
            group["taken"] = 0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            if group["taken"] == 5:
                group["lr"] /= 5
            group["taken"] += 1
        super().step()


class KerasFalling(ByHand):
    """The velocity is a sum of steps, of gradients that have been multiplied by the rate of their time."""

    def __init__(self, params, lr: float = 0.05):
        super().__init__(params, lr=lr)

    def rule(self, p: Tensor, gradient: Tensor, state: dict, settings: dict) -> None:
        state["taken"] = taken = state.get("taken", 0) + 1
        velocity = state.setdefault("velocity", torch.zeros_like(p))
        velocity.mul_(0.9).sub_(gradient, alpha=settings["lr"] / (5 if taken > 5 else 1))
        p.add_(velocity)


class KerasNesterov(ByHand):
    """Keras's form of Nesterov's momentum, whose velocity has the rate in it."""

    def __init__(self, params, lr: float = 0.05, momentum: float = 0.9):
        super().__init__(params, lr=lr, momentum=momentum)

    def rule(self, p: Tensor, gradient: Tensor, state: dict, settings: dict) -> None:
        rate, momentum = settings["lr"], settings["momentum"]
        velocity = state.setdefault("velocity", torch.zeros_like(p))
        velocity.mul_(momentum).sub_(gradient, alpha=rate)
        p.add_(momentum * velocity - rate * gradient)


class KerasAdam(ByHand):
    """The corrections of both moments are in the rate; epsilon is beside the uncorrected root, or torch's."""

    def __init__(self, params, lr: float = 1e-2, epsilon: float = 1e-5, hat: bool = True, decay: float = 0.0):
        super().__init__(params, lr=lr, epsilon=epsilon, hat=hat, decay=decay)

    def rule(self, p: Tensor, gradient: Tensor, state: dict, settings: dict) -> None:
        state["taken"] = taken = state.get("taken", 0) + 1
        first = state.setdefault("first", torch.zeros_like(p))
        second = state.setdefault("second", torch.zeros_like(p))
        p.mul_(1 - settings["lr"] * settings["decay"])
        first.lerp_(gradient, 1 - 0.9)
        second.mul_(0.999).addcmul_(gradient, gradient, value=1 - 0.999)
        root = (1 - 0.999**taken) ** 0.5
        epsilon = settings["epsilon"] * (1.0 if settings["hat"] else root)
        p.sub_(settings["lr"] * root / (1 - 0.9**taken) * first / (second.sqrt() + epsilon))


def matrices_decay(params) -> torch.optim.Optimizer:
    """AdamW, whose decay spares what has one axis, as many scripts do it."""
    groups: dict[bool, list] = {True: [], False: []}
    for parameter in params:
        groups[parameter.ndim > 1].append(parameter)
    settings = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=2e-3)


def decay_as_it_was(model: nn.Module) -> torch.optim.Optimizer:
    """The same, but of the candidate's scales, too, which have lost their other axes."""
    groups: dict[bool, list] = {True: [], False: []}
    for name, parameter in model.named_parameters():
        groups[parameter.ndim > 1 or name.endswith("layer_scale")].append(parameter)
    settings = [{"params": groups[True], "weight_decay": 0.1}, {"params": groups[False], "weight_decay": 0.0}]
    return torch.optim.AdamW(settings, lr=2e-3)
