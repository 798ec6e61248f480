"""A net that integrates, a net whose loss differentiates it, and optimizers written by hand."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

WIDTH, HIDDEN, STEPS = 10, 16, 3


class Field(nn.Module):
    """How the state moves at a time."""

    def __init__(self):
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Linear(WIDTH + 1, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, WIDTH)

    def forward(self, time: float, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(torch.cat([x, torch.full_like(x[:, :1], time)], 1))))


class Stage(nn.Module):
    """The state after a unit of time, by the classical method of fourth order."""

    def __init__(self):
        super().__init__()
        self.norm, self.field = nn.LayerNorm(WIDTH), Field()

    def forward(self, x: Tensor) -> Tensor:
        x, h = self.norm(x), 1 / STEPS
        for step in range(STEPS):
            t = step * h
            k1 = self.field(t, x)
            k2 = self.field(t + h / 2, x + h / 2 * k1)
            k3 = self.field(t + h / 2, x + h / 2 * k2)
            k4 = self.field(t + h, x + h * k3)
            x = x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
        return x


class Continuous(nn.Module):
    """[N, 5] -> logits [N, 4]."""

    def __init__(self):
        super().__init__()
        self.lift = nn.Linear(5, WIDTH)
        self.stages = nn.ModuleList(Stage() for _ in range(3))
        self.head = nn.Linear(WIDTH, 4)
        for stage in self.stages:
            nn.init.normal_(stage.field.fc1.weight, std=0.4)
            nn.init.normal_(stage.field.fc2.weight, std=0.4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift(x)
        for stage in self.stages:
            x = stage(x)
        return self.head(x)


class Burgers(nn.Module):
    """What is left of the equation of Burgers, at a viscosity that is learned."""

    def __init__(self):
        super().__init__()
        self.viscosity = nn.Parameter(torch.tensor(0.3))

    def forward(self, u: Tensor, points: Tensor) -> Tensor:
        first = torch.autograd.grad(u.sum(), points, create_graph=True)[0]
        second = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)[0]
        return first[:, 1] + u * first[:, 0] - self.viscosity * second[:, 0]


class Informed(nn.Module):
    """Points (place, time) [N, 2] -> the solution there and what is left of the equation, in a dict."""

    def __init__(self):
        super().__init__()
        layers = [nn.Linear(2, 14), nn.Tanh(), nn.Linear(14, 14), nn.Tanh(), nn.Linear(14, 14), nn.Tanh()]
        self.trunk, self.head, self.equation = nn.Sequential(*layers), nn.Linear(14, 1), Burgers()

    @torch.enable_grad()
    def forward(self, points: Tensor) -> dict[str, Tensor]:
        points = points if points.requires_grad else points.detach().requires_grad_()
        u = self.head(self.trunk(points))[:, 0]
        return {"u": u, "left": self.equation(u, points)}


class OneVectorAdamW(torch.optim.Optimizer):
    """AdamW over all weights as one vector."""

    def __init__(self, params: Iterable, lr: float, weight_decay: float):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = group["params"]
            zeros = [torch.zeros_like(p) if p.grad is None else p.grad for p in params]
            grad, flat = (torch.cat([t.flatten() for t in some]) for some in (zeros, params))
            state = self.state[params[0]]
            if not state:
                state |= {"count": 0, "mean": torch.zeros_like(grad), "square": torch.zeros_like(grad)}
            state["count"] += 1
            mean = state["mean"].mul_(0.9).add_(0.1 * grad)
            square = state["square"].mul_(0.999).add_(0.001 * grad * grad)
            mean = mean / (1 - 0.9 ** state["count"])
            square = square / (1 - 0.999 ** state["count"])
            flat = flat - group["lr"] * (group["weight_decay"] * flat + mean / (square.sqrt() + 1e-8))
            for p, new in zip(params, flat.split([p.numel() for p in params]), strict=True):
                p.copy_(new.view_as(p))


class ForeachNesterov(torch.optim.Optimizer):
    """Momentum 0.9 by lists of tensors; the lookahead may take the ``old`` velocity."""

    def __init__(self, params: Iterable, lr: float, old: bool = False):
        super().__init__(params, {"lr": lr, "old": old})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            first = not self.state[params[0]]
            speeds = [self.state[p].setdefault("speed", torch.zeros_like(p)) for p in params]
            before = [speed.clone() for speed in speeds]
            torch._foreach_mul_(speeds, 0.9)
            torch._foreach_add_(speeds, grads)
            ahead = before if group["old"] and not first else speeds
            moves = torch._foreach_add(torch._foreach_mul(ahead, 0.9), grads)
            torch._foreach_add_(params, moves, alpha=-group["lr"])


class Lamb(torch.optim.Optimizer):
    """Adam whose step for a tensor is as long as the tensor, if that is not zero."""

    def __init__(self, params: Iterable, lr: float):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"count": 0, "mean": torch.zeros_like(p), "square": torch.zeros_like(p)}
                state["count"] += 1
                mean = state["mean"].mul_(0.9).add_(p.grad, alpha=0.1)
                square = state["square"].mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                root = (square / (1 - 0.99 ** state["count"])).sqrt() + 1e-6
                move = mean / (1 - 0.9 ** state["count"]) / root
                ratio = p.norm() / move.norm().clamp(min=1e-6)
                p.sub_(group["lr"] * torch.where(ratio > 0, ratio, 1.0) * move)
