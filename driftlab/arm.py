"""The arms of an experiment: reference, candidate and control, in each dtype, as a tree.

Every arm but the root is compared with exactly one other, its *against*: candidate and control with
the reference of their own dtype, and the float32 reference with the float64 one. So each distance
belongs to one arm and needs no second name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driftlab.copying import copied

DTYPES = {"float32": torch.float32, "float64": torch.float64}
ROLES = ("reference", "candidate", "control")

Fold = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], Optimizer]
MakeScheduler = Callable[[Optimizer, int], LRScheduler]


def unfolded(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The fold of an arm that has the reference's own names and shapes."""
    return tensors


@dataclass(eq=False)
class Arm:
    """One network in training.

    Attributes:
        role: one of ``ROLES``.
        dtype: a key of ``DTYPES``.
        module: the network, its floating tensors in ``dtype``.
        optimizer: over the parameters of ``module`` alone.
        fold: from the module's tensor names to the reference's names and shapes.
        horizon: the number of updates after which the arm ends.
        against: the arm it is compared with; None at the root of the tree.
        scheduler: moves the learning rate after each update, where there is one.
        after_update: called after each update, where there is one (a control that is nudged again and again).
        blown_up_at: the step whose loss was NaN or inf, None while there was none.
    """

    role: str
    dtype: str
    module: nn.Module
    optimizer: Optimizer
    fold: Fold
    horizon: int
    against: Arm | None = None
    scheduler: LRScheduler | None = None
    after_update: Callable[[], None] | None = None
    blown_up_at: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        # walking the tree of modules at every logged step would cost as much as the distances
        self.parameters = dict(self.module.named_parameters())
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}

    @property
    def name(self) -> str:
        return f"{self.role}.{self.dtype}"

    def measured_at(self, step: int) -> bool:
        """Whether the arm still runs forward and backward at ``step`` (its last, ``horizon``, included)."""
        return step <= self.horizon and (self.blown_up_at is None or step <= self.blown_up_at)

    def updated_at(self, step: int) -> bool:
        return step < self.horizon and self.blown_up_at is None


def nudge(module: nn.Module, seed: int) -> str:
    """Move one weight of ``module`` to the next number of its own dtype, away from zero, in place.

    The weight is drawn by ``seed`` among the non-zero entries of the parameters with two dimensions
    or more, so that the same one is moved whatever the dtype. Returns its name, ``layer.weight[123]``.

    Raises:
        ValueError: where no parameter has a non-zero entry.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list(module.named_parameters())
    choices = [(n, p) for n, p in parameters if p.dim() > 1 and bool(p.any())] or [
        (n, p) for n, p in parameters if bool(p.any())
    ]
    if not choices:
        raise ValueError("the control cannot be nudged: the network has no parameter that is not zero")
    sizes = torch.tensor([p.numel() for _, p in choices], dtype=torch.float64)
    name, parameter = choices[int(torch.multinomial(sizes, 1, generator=generator))]
    flat = parameter.detach().reshape(-1)
    nonzero = flat.nonzero().flatten()
    index = int(nonzero[int(torch.randint(len(nonzero), (1,), generator=generator))])
    position = tuple(int(i) for i in np.unravel_index(index, parameter.shape))
    with torch.no_grad():
        parameter[position] = torch.nextafter(flat[index], flat[index] * torch.inf)
    return f"{name}[{index}]"


@torch.no_grad()
def nudge_all(module: nn.Module, generator: torch.Generator) -> None:
    """Move every weight that is not zero by one ulp, up or down by chance, in place."""
    for parameter in module.parameters():
        up = torch.rand(parameter.shape, generator=generator).to(parameter.device) < 0.5
        infinite = torch.full_like(parameter, torch.inf)
        moved = torch.nextafter(parameter, torch.where(up, infinite, -infinite))
        parameter.copy_(torch.where(parameter == 0, parameter, moved))


def grow(
    reference: nn.Module,
    candidate: nn.Module | None,
    *,
    optimizer: MakeOptimizer,
    horizons: Mapping[str, int],
    roles: Iterable[str] = ROLES,
    fold: Fold = unfolded,
    scheduler: MakeScheduler | None = None,
    nudge_seed: int = 0,
    device: torch.device | str = "cpu",
    float64_candidate: bool = True,
) -> list[Arm]:
    """The tree of arms, each behind the one that it is compared with.

    Args:
        reference, candidate: float32 networks that start from the same weights; they are copied.
        optimizer: makes an arm's optimizer from its parameters.
        horizons: for each dtype the number of updates, for example ``{"float32": 200, "float64": 40}``.
        roles: which of ``ROLES`` take part; the reference always does.
        scheduler: makes an arm's learning-rate scheduler from its optimizer and the longest horizon.
        float64_candidate: False for a candidate that cannot run in float64.
    """
    arms: list[Arm] = []
    longest = max(horizons.values())
    for dtype in sorted(horizons, key=lambda d: DTYPES[d].itemsize, reverse=True):
        base = next((a for a in arms if a.role == "reference" and a.dtype == "float64"), None)
        own: Arm | None = None
        for role in (r for r in ROLES if r in set(roles) | {"reference"}):
            if role == "candidate" and dtype == "float64" and not float64_candidate:
                continue
            module = copied(candidate if role == "candidate" else reference)
            # a candidate may keep some weights in fewer bits: in float32 they stay as they are
            keep = role == "candidate" and dtype == "float32"
            module = module.to(device=device) if keep else module.to(device=device, dtype=DTYPES[dtype])
            if role == "control":
                nudge(module, nudge_seed)
            steps = optimizer(module.parameters())
            arm = Arm(role, dtype, module, steps, fold if role == "candidate" else unfolded, horizons[dtype])
            arm.against = base if role == "reference" else own
            arm.scheduler = scheduler(steps, longest) if scheduler else None
            own = arm if role == "reference" else own
            arms.append(arm)
    return arms
