"""A net that integrates and a net whose loss differentiates it, with optimizers written by hand."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from bench.case import case
from bench.held_back._fifth_equations import (
    STEPS,
    Continuous,
    ForeachNesterov,
    Informed,
    Lamb,
    OneVectorAdamW,
)
from bench.held_back._fifth_tables import SAME, fault, layer_norm, named, right
from bench.held_back._fourth_ports import Port, leaf, pile
from bench.tasks import _task

CLASSICAL = ((0, 0.5, 0.5, 1), ((), (0.5,), (0, 0.5), (0, 0, 1)), (1 / 6, 1 / 3, 1 / 3, 1 / 6))
EIGHTHS = ((0, 1 / 3, 2 / 3, 1), ((), (1 / 3,), (-1 / 3, 1), (1, -1, 1)), (1 / 8, 3 / 8, 3 / 8, 1 / 8))


class Tableau(Port):
    """States by columns, the stages' weights stacked, the method read from a table."""

    kept = False

    def take(self, model: Continuous) -> None:
        fields = [stage.field for stage in model.stages]
        self.lift = leaf(torch.cat([model.lift.weight, model.lift.bias[:, None]], 1))
        self.norm = pile(torch.stack([s.norm.weight, s.norm.bias]) for s in model.stages)
        self.w1, self.b1 = pile(f.fc1.weight for f in fields), pile(f.fc1.bias for f in fields)
        self.w2, self.b2 = pile(f.fc2.weight for f in fields), pile(f.fc2.bias for f in fields)
        self.head, self.head_shift = leaf(model.head.weight), leaf(model.head.bias)

    def field(self, at: int, time: float, x: Tensor) -> Tensor:
        w1, b1 = self.w1[at], self.b1[at]
        hidden = torch.tanh(w1[:, :-1] @ x + (b1 + time * w1[:, -1])[:, None])
        return self.w2[at] @ hidden + self.b2[at][:, None]

    def stage(self, at: int, x: Tensor) -> Tensor:
        nodes, table, weights = CLASSICAL
        if at == 1 and self.fault == "rule_of_three_eighths":
            nodes, table, weights = EIGHTHS
        if at == 2 and self.fault == "last_slope_at_half_the_step":
            nodes = (0, 0.5, 0.5, 0.5)
        x, h = layer_norm(x.T, *self.norm[at]).T, 1 / STEPS
        for step in range(STEPS):
            slopes: list[Tensor] = []
            for node, row in zip(nodes, table, strict=True):
                moved = x + h * sum((a * k for a, k in zip(row, slopes, strict=True)), torch.zeros_like(x))
                slopes.append(self.field(at, (step + node) * h, moved))
            x = x + h * sum(weight * slope for weight, slope in zip(weights, slopes, strict=True))
        return x

    def forward(self, x: Tensor) -> Tensor:
        x = self.lift[:, :-1] @ x.T + self.lift[:, -1:]
        for at in range(3):
            x = checkpoint(self.stage, at, x, use_reentrant=False) if self.kept else self.stage(at, x)
        return x.T @ self.head.T + self.head_shift


class Jets(Port):
    """Values and derivatives carried through the layers together; no gradient is asked for in the net."""

    def take(self, model: Informed) -> None:
        trunk = model.trunk
        self.first = leaf(torch.cat([trunk[0].weight, trunk[0].bias[:, None]], 1))
        self.inner = pile(trunk[at].weight.T for at in (2, 4))
        self.inner_shift = pile(trunk[at].bias for at in (2, 4))
        self.last, self.last_shift = leaf(model.head.weight[0]), leaf(model.head.bias)
        self.viscosity = leaf(model.equation.viscosity[None])

    def bent(self, jet: Tensor, at: int) -> Tensor:
        """The hyperbolic tangent of a value, its two slopes and its curvature."""
        y = jet[0].tanh()
        slope = 1 - y.square()
        curved = 0.0 if at == 1 and self.fault == "curvature_of_a_middle_layer" else 2 * y * jet[1].square()
        return torch.stack([y, slope * jet[1], slope * jet[2], slope * (jet[3] - curved)])

    def forward(self, points: Tensor) -> tuple[Tensor, Tensor]:
        value = points @ self.first[:, :2].T + self.first[:, 2]
        place, time = (column.expand_as(value) for column in (self.first[:, 0], self.first[:, 1]))
        jet = self.bent(torch.stack([value, place, time, torch.zeros_like(value)]), 0)
        for at, (weight, shift) in enumerate(zip(self.inner, self.inner_shift, strict=True), 1):
            jet = jet @ weight
            jet = self.bent(torch.cat([jet[:1] + shift, jet[1:]]), at)
        u, place, time, bend = jet @ self.last
        u = u + self.last_shift
        carried = u.detach() if self.fault == "carried_speed_held" else u
        return time + carried * place - self.viscosity * bend, u


def _points() -> tuple[Tensor, Tensor]:
    points = torch.rand(24, 2) * 2 - 1
    return points, -torch.sin(torch.pi * points[:, 0]) * torch.exp(-points[:, 1])


def _residual(outputs: dict | tuple, targets: Tensor) -> Tensor:
    left, u = named(outputs, "left", "u") if isinstance(outputs, dict) else outputs
    return F.mse_loss(u, targets.to(u)) + 0.1 * left.square().mean()


def _spirals() -> tuple[Tensor, Tensor]:
    return torch.randn(20, 5), torch.randint(4, (20,))


continuous = _task("fifth_continuous", Continuous, _spirals)
informed = _task("fifth_informed", Informed, _points, _residual)
SLOW = {"optimizer": partial(torch.optim.SGD, lr=0.01, momentum=0.9)}
ADAMW = {"optimizer": partial(torch.optim.AdamW, lr=3e-3, weight_decay=0.1)}
STACKED = ("norm", "field.fc1", "field.fc2")
NESTEROV = {"optimizer": partial(torch.optim.SGD, lr=0.02, momentum=0.9, nesterov=True)}


def by_hand(make: Callable, **settings: object) -> dict[str, Callable]:
    """The optimizer of the candidate."""
    return {"candidate_optimizer": lambda module: make(module.parameters(), **settings)}


@case(SAME, "port, checkpoints", continuous, **SLOW)
def stages_computed_again(model: Continuous) -> Tableau:
    """Each stage is computed once more in the backward pass."""
    port = Tableau(model)
    port.kept = True
    return port


fault(continuous, Tableau, "rule_of_three_eighths", "another method of the same order", "stages.1", **SLOW)
fault(continuous, Tableau, "last_slope_at_half_the_step", "another time", "stages.2", **SLOW)
right(informed, Jets, "jets_of_the_informed_net", "port, no gradient in the net")
fault(informed, Jets, "curvature_of_a_middle_layer", "a term missing", "equation")
fault(informed, Jets, "carried_speed_held", "a detach too many", "equation", "input gradient")


@case(SAME, "optimizer by hand", continuous, **ADAMW, **by_hand(OneVectorAdamW, lr=3e-3, weight_decay=0.1))
def adamw_on_one_vector(model: Continuous) -> Tableau:
    """The weights of the port as one vector."""
    return Tableau(model)


@case(SAME, "optimizer by hand", informed, **NESTEROV, **by_hand(ForeachNesterov, lr=0.02))
def nesterov_by_lists(model: Informed) -> Informed:
    """The same net, all its tensors updated at once."""
    return model


@case(
    "bug",
    "lookahead by the old velocity",
    continuous,
    passes="update",
    step=1,
    **NESTEROV,
    **by_hand(ForeachNesterov, lr=0.02, old=True),
)
def nesterov_of_the_old_velocity(model: Continuous) -> Tableau:
    """The lookahead takes the velocity from before the step; the first step is right."""
    return Tableau(model)


@case(
    "bug",
    "trust ratio of stacked weights",
    continuous,
    module=("lift", *[f"stages.{at}.{part}" for at in range(3) for part in STACKED]),
    passes="update",
    optimizer=partial(Lamb, lr=0.02),
    **by_hand(Lamb, lr=0.02),
)
def one_trust_ratio_for_all_stages(model: Continuous) -> Tableau:
    """Stacked tensors share one length; the lift with its bias in one tensor too."""
    return Tableau(model)
