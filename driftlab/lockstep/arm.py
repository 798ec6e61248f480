"""The arms of an experiment: reference, candidate and control, in each dtype, as a tree.

Every arm but the root is compared with exactly one other, its *against*: candidate and control with
the reference of their own dtype, and the float32 reference with the float64 one. So each distance
belongs to one arm and needs no second name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driftlab.arithmetic.units import unless_zero
from driftlab.blame import theirs
from driftlab.fold.layout import AnyFold
from driftlab.network.calling import copied
from driftlab.network.pair import in_its_own_mode
from driftlab.words import DiagnoseError

DTYPES = {"float32": torch.float32, "float64": torch.float64}
ROLES = ("reference", "candidate", "control")


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
        clip: bounds the module's gradients before each update, where there is one.
        after_update: called after each update, where there is one (a control that is nudged again and again).
        blown_up_at: the step whose loss was NaN or inf, None while there was none.
    """

    role: str
    dtype: str
    module: nn.Module
    optimizer: Optimizer
    fold: AnyFold
    horizon: int
    against: Arm | None = None
    scheduler: LRScheduler | None = None
    clip: Callable[[nn.Module], object] | None = None
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
        DiagnoseError: where no parameter has a non-zero entry.
    """
    generator = torch.Generator().manual_seed(seed)
    parameters = list(module.named_parameters())
    choices = [(n, p) for n, p in parameters if p.dim() > 1 and bool(p.any())] or [
        (n, p) for n, p in parameters if bool(p.any())
    ]
    if not choices:
        raise DiagnoseError("the control cannot be nudged: the network has no parameter that is not zero")
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
        parameter.copy_(unless_zero(parameter, generator))


@dataclass(frozen=True)
class Control:
    """The reference moved by one ulp: in one weight, in ``every`` weight, ``again`` after each update."""

    role: str
    every: bool = False
    again: bool = False

    @property
    def longest(self) -> float:
        """Updates after which it ends: what the larger ensemble showed by then stands for the rest."""
        return ENSEMBLE_STEPS if self.every else math.inf

    def move(self, arm: Arm, seed: int) -> None:
        """Nudge the arm's weights, now and as often as this control does."""
        generator = torch.Generator().manual_seed(seed)
        if self.every:
            nudge_all(arm.module, generator)
        else:
            nudge(arm.module, seed)
        arm.after_update = (lambda: nudge_all(arm.module, generator)) if self.again else None


ENSEMBLE_STEPS = 9
ONE_WEIGHT = Control("control")
# Rounding as a rewrite makes it: otherwise in every weight, and at every step.
ENSEMBLE = (ONE_WEIGHT, Control("control_all", every=True), Control("control_each", every=True, again=True))


def make_arm(
    role: str,
    dtype: str,
    network: nn.Module,
    optimizer: Callable[[nn.Module], Optimizer],
    horizon: int,
    *,
    fold: AnyFold = unfolded,
    scheduler: Callable[[Optimizer], LRScheduler | None] | None = None,
    clip: Callable[[nn.Module], object] | None = None,
    device: torch.device | str | None = None,
) -> Arm:
    """An arm of a copy of ``network``, compared with nothing yet.

    A candidate may keep some weights in fewer bits: in float32 they stay as they are.
    """
    keep = role == "candidate" and dtype == "float32"
    module = copied(network).to(device=device, dtype=None if keep else DTYPES[dtype])
    in_its_own_mode(module)
    steps = theirs(optimizer, module)
    moves = scheduler(steps) if scheduler else None
    return Arm(role, dtype, module, steps, fold, horizon, scheduler=moves, clip=clip)


def grow(
    reference: nn.Module,
    candidate: nn.Module | None,
    *,
    optimizer: Callable[[nn.Module], Optimizer],
    horizons: Mapping[str, int],
    candidate_optimizer: Callable[[nn.Module], Optimizer] | None = None,
    controls: Iterable[Control] = (ONE_WEIGHT,),
    fold: AnyFold = unfolded,
    scheduler: Callable[[Optimizer], LRScheduler | None] | None = None,
    clip: Callable[[nn.Module], object] | None = None,
    nudge_seed: int = 0,
    device: torch.device | str | None = None,
    float64_candidate: bool = True,
) -> list[Arm]:
    """The tree of arms, each behind the one that it is compared with.

    Args:
        reference, candidate: float32 networks that start from the same weights; they are copied.
        optimizer: makes an arm's optimizer of its network; ``candidate_optimizer`` the
            candidate's, if it differs.
        horizons: for each dtype the number of updates, for example ``{"float32": 200, "float64": 40}``.
        scheduler: makes an arm's learning-rate scheduler of its optimizer, or None.
        clip: bounds the gradients of a module.
        device: where the arms lie; where the networks do if None.
        float64_candidate: False for a candidate that cannot run in float64.
    """
    arms: list[Arm] = []
    wide = None
    for dtype in sorted(horizons, key=lambda d: DTYPES[d].itemsize, reverse=True):
        horizon, shared = horizons[dtype], {"scheduler": scheduler, "clip": clip, "device": device}
        own = make_arm("reference", dtype, reference, optimizer, horizon, **shared)
        own.against, wide = wide, wide or (own if dtype == "float64" else None)
        others = []
        if candidate is not None and (dtype == "float32" or float64_candidate):
            steps = candidate_optimizer or optimizer
            others.append(make_arm("candidate", dtype, candidate, steps, horizon, fold=fold, **shared))
        for control in controls:
            ends = int(min(horizon, control.longest))
            others.append(make_arm(control.role, dtype, reference, optimizer, ends, **shared))
            control.move(others[-1], nudge_seed)
        for arm in others:
            arm.against = own
        arms += [own, *others]
    return arms
