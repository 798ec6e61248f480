"""Optimizers of the held-out cases, as people write them for themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.optimizers import ByHand, UsualSGD


class ClippedSGD(UsualSGD):
    """SGD that first scales all gradients together to a norm of at most a quarter."""

    def step(self, closure=None) -> None:
        nn.utils.clip_grad_norm_(self.all_params(), 0.25)
        super().step(closure)


class WarmSGD(UsualSGD):
    """SGD whose rate rises from a tenth to the whole over ten steps."""

    count = 0

    def step(self, closure=None) -> None:
        for group in self.param_groups:
            group["lr"] = self.defaults["lr"] * min(1.0, 0.1 + 0.09 * self.count)
        self.count += 1
        super().step(closure)


class Lion(ByHand):
    """The sign of an interpolated momentum is the step."""

    def __init__(self, params, lr: float, beta1: float = 0.9, beta2: float = 0.99):
        super().__init__(params, lr=lr, beta1=beta1, beta2=beta2)

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        momentum = state.setdefault("momentum", torch.zeros_like(p))
        p.sub_(group["lr"] * torch.sign(momentum.lerp(grad, 1 - group["beta1"])))
        momentum.lerp_(grad, 1 - group["beta2"])


class CenteredRMSprop(ByHand):
    """RMSprop by the variance of the gradient, with momentum."""

    def __init__(self, params, lr: float, alpha: float, momentum: float, eps: float = 1e-8):
        super().__init__(params, lr=lr, alpha=alpha, momentum=momentum, eps=eps)

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        if not state:
            state.update(square=torch.zeros_like(p), mean=torch.zeros_like(p), velocity=torch.zeros_like(p))
        alpha = group["alpha"]
        state["square"] = alpha * state["square"] + (1 - alpha) * grad * grad
        state["mean"] = alpha * state["mean"] + (1 - alpha) * grad
        spread = (state["square"] - state["mean"] ** 2).sqrt() + group["eps"]
        state["velocity"] = group["momentum"] * state["velocity"] + grad / spread
        p -= group["lr"] * state["velocity"]


class DecayingAdagrad(ByHand):
    """Adagrad whose rate decays with the number of steps."""

    def __init__(self, params, lr: float, lr_decay: float):
        super().__init__(params, lr=lr, lr_decay=lr_decay)

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        count = state["count"] = state.get("count", -1) + 1
        total = state["total"] = state.get("total", 0) + grad.square()
        p -= group["lr"] / (1 + count * group["lr_decay"]) * grad / (total.sqrt() + 1e-10)


class NesterovByLookahead(ByHand):
    """Nesterov's momentum and L2 decay written out."""

    def __init__(self, params, lr: float, momentum: float, decay: float):
        super().__init__(params, lr=lr, momentum=momentum, decay=decay)

    def rule(self, p: Tensor, grad: Tensor, state: dict, group: dict) -> None:
        grad = grad + group["decay"] * p
        velocity = state["velocity"] = group["momentum"] * state.get("velocity", 0) + grad
        p -= group["lr"] * grad + group["lr"] * group["momentum"] * velocity


class MasterSGD(UsualSGD):
    """SGD on copies of the weights, which are copied back after each step, as mixed precision does."""

    def __init__(self, params):
        self.model_params = list(params)
        self.masters = [nn.Parameter(p.detach().clone()) for p in self.model_params]
        super().__init__(self.masters)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for p in self.model_params:
            p.grad = None

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for master, p in zip(self.masters, self.model_params, strict=True):
            master.grad = None if p.grad is None else p.grad.clone()
        super().step(closure)
        for master, p in zip(self.masters, self.model_params, strict=True):
            p.copy_(master)


class FlatAdamW(ByHand):
    """AdamW on one long vector of all weights."""

    def __init__(self, params, lr: float, decay: float):
        super().__init__(params, lr=lr, decay=decay)
        self.mean = self.square = self.count = 0

    @torch.no_grad()
    def step(self, closure=None) -> None:
        (group,) = self.param_groups
        params = [p for p in group["params"] if p.grad is not None]
        weights, grads = (torch.cat([t.flatten() for t in ts]) for ts in (params, [p.grad for p in params]))
        self.count += 1
        self.mean = 0.9 * self.mean + 0.1 * grads
        self.square = 0.999 * self.square + 0.001 * grads.square()
        spread = (self.square / (1 - 0.999**self.count)).sqrt() + 1e-8
        weights -= group["lr"] * (self.mean / (1 - 0.9**self.count) / spread + group["decay"] * weights)
        for p, new in zip(params, weights.split([p.numel() for p in params]), strict=True):
            p.copy_(new.view_as(p))
