"""Optimizers with something of their own, for the tests of updates."""

import torch


class Late(torch.optim.SGD):
    def __init__(self, parameters, start):
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.start, self.count = start, 0

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] = 0.1 if self.count < self.start else 0.11
        self.count += 1
        return super().step(closure)


class Normed(torch.optim.SGD):
    """By the norm of each tensor, as in LARS."""

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad = p.grad * (p.detach().norm() / p.grad.norm())
        return super().step(closure)


class Narrow(torch.optim.SGD):
    """Keeps its momentum in bfloat16."""

    def step(self, closure=None):
        loss = super().step(closure)
        for state in self.state.values():
            buffer = state["momentum_buffer"]
            state["momentum_buffer"] = buffer.bfloat16().to(buffer.dtype)
        return loss


class Kept(torch.optim.SGD):
    """Momentum in buffers that it makes itself."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("kept", torch.zeros(p.shape, dtype=p.dtype))
                p.sub_(buffer.mul_(0.9).add_(p.grad), alpha=0.1)


class Seen(torch.optim.SGD):
    """Plain descent that keeps the weights and gradients of its first step."""

    def step(self, closure=None):
        (group,) = self.param_groups
        self.first = [(p.detach().clone(), p.grad.clone()) for p in group["params"]]
        return super().step(closure)
