"""Update rules written out, each with its fault or without."""

from __future__ import annotations

import torch
from torch import Tensor

from bench.optimizers import ByHand


class RMSprop(ByHand):
    def rule(self, p: Tensor, gradient: Tensor, state: dict, settings: dict) -> None:
        square = state.setdefault("square", torch.zeros_like(p))
        square.mul_(0.99).add_((1 - 0.99) * gradient * gradient)
        eps = settings["eps"]
        p.sub_(
            settings["lr"] * gradient / ((square + eps).sqrt() if settings["inside"] else square.sqrt() + eps)
        )


class Adam(ByHand):
    """AdamW written out; ``fault`` names what is wrong, if anything."""

    def rule(self, p: Tensor, gradient: Tensor, state: dict, settings: dict) -> None:
        fault, lr, decay, eps = (settings[key] for key in ("fault", "lr", "weight_decay", "eps"))
        state["step"] = t = state.get("step", 0) + 1
        first = state.setdefault("first", torch.zeros_like(p))
        second = state.setdefault("second", torch.zeros_like(p))
        if fault == "coupled":
            gradient = gradient + decay * p
        elif fault != "late":
            p.mul_(1 - lr * decay)
        first.lerp_(gradient, 1 - 0.9)
        second.mul_(0.999).add_((1 - 0.999) * gradient * gradient)
        size, correction = 1 / (1 - 0.9**t), (1 - 0.999**t) ** 0.5
        if fault == "uncorrected":
            p.sub_(lr * first / (second.sqrt() + eps))
        elif fault == "scaled eps":
            p.sub_(lr * size * correction * first / (second.sqrt() + eps))
        else:
            p.sub_(lr * size * first / (second.sqrt() / correction + eps))
        if fault == "late":
            p.mul_(1 - lr * decay)


class Dampened(ByHand):
    def rule(self, p: Tensor, gradient: Tensor, state: dict, settings: dict) -> None:
        kept, share = 0.9, 1 - 0.5
        if "velocity" in state:
            state["velocity"] = kept * state["velocity"] + share * gradient
        else:
            state["velocity"] = gradient.clone() if settings["plain_start"] else share * gradient
        p.sub_(0.1 * state["velocity"])


class Clipped(torch.optim.SGD):
    """Clips before each step, by the norm of everything or of each weight alone."""

    def __init__(self, parameters, globally: bool):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.globally = globally

    def step(self, closure=None):
        weights = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for together in [weights] if self.globally else [[p] for p in weights]:
            size = sum(p.grad.square().sum() for p in together).sqrt()
            for p in together:
                p.grad.mul_((0.2 / (size + 1e-6)).clamp(max=1))
        return super().step(closure)
