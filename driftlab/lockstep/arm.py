"""The arms of an experiment: reference, candidate and control, in each precision, as a tree.

Every arm but the root is compared with exactly one other, its *against*: candidate and control with
the reference of their own precision, the float32 reference with the float64 one, and a reference in 16 bits
with the float32 one. So each distance belongs to one arm and needs no second name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from driftlab.blame import theirs
from driftlab.fold.layout import AnyFold
from driftlab.lockstep.control import IN_16_BITS, ONE_WEIGHT, Control
from driftlab.network.calling import copied
from driftlab.network.pair import dtype_of, in_its_own_mode
from driftlab.precision import PRECISIONS, Precision

ROLES = ("reference", "candidate", "control")


def unfolded(tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The fold of an arm that has the reference's own names and shapes."""
    return tensors


@dataclass(eq=False)
class Arm:
    """One network in training.

    Attributes:
        role: one of ``ROLES``.
        dtype: the name of its precision, one of ``TRAINED_IN``.
        module: the network, its floating tensors as the precision holds them.
        optimizer: over the parameters of ``module`` alone.
        fold: from the module's tensor names to the reference's names and shapes.
        horizon: the number of updates after which the arm ends.
        against: the arm it is compared with; None at the root of the tree.
        scheduler: moves the learning rate after each update, where there is one.
        clip: bounds the module's gradients before each update, where there is one.
        after_update: called after each update, where there is one (a control that is nudged again and again).
        otherwise: a context, given the step, in which the network computes otherwise than its weights say (a
            control in 16 bits).
        scaler: of the loss, where the precision needs one.
        skipped: how many updates the scaler has left out, their gradients being NaN or inf.
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
    otherwise: Callable[[int], AbstractContextManager] = lambda step: nullcontext()
    skipped: int = field(default=0, init=False)
    blown_up_at: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.scaler = self.precision.scaler(self.module)
        # walking the tree of modules at every logged step would cost as much as the distances
        self.parameters = dict(self.module.named_parameters())
        self.trained = {n: p for n, p in self.parameters.items() if p.requires_grad}

    @property
    def name(self) -> str:
        return f"{self.role}.{self.dtype}"

    @property
    def precision(self) -> Precision:
        return PRECISIONS[self.dtype]

    def measured_at(self, step: int) -> bool:
        """Whether the arm still runs forward and backward at ``step`` (its last, ``horizon``, included)."""
        return step <= self.horizon and (self.blown_up_at is None or step <= self.blown_up_at)

    def updated_at(self, step: int) -> bool:
        return step < self.horizon and self.blown_up_at is None

    def backward(self, loss: Tensor) -> None:
        """Leaves the gradients of the loss, whatever it was scaled by on the way."""
        if self.scaler is None:
            loss.backward()
            return
        self.scaler.scale(loss).backward()
        if self._has_gradients():
            self.scaler.unscale_(self.optimizer)

    def update(self) -> None:
        """One step of clip, optimizer and scheduler; the scheduler moves where the scaler skips, too."""
        if self.clip is not None:
            theirs(self.clip, self.module)
        skips = self.scaler is not None and self._has_gradients() and not self._step_scaled()
        if self.scaler is None:
            theirs(self.optimizer.step)
        self.skipped += skips
        if self.scheduler is not None:
            # torch warns of a scheduler that moves before the first update
            with warnings.catch_warnings(action="ignore") if skips else nullcontext():
                theirs(self.scheduler.step)
        if self.after_update is not None:
            self.after_update()

    def _step_scaled(self) -> bool:
        """Whether the scaler let the optimizer step."""
        before = self.scaler.get_scale()
        theirs(self.scaler.step, self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale() >= before

    def _has_gradients(self) -> bool:
        return any(p.grad is not None for p in self.trained.values())


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
    as_it_is: bool | None = None,
) -> Arm:
    """An arm of a copy of ``network``, compared with nothing yet.

    Args:
        as_it_is: whether each weight keeps its dtype. None: a candidate's where weights are float32, since it
            may keep some in fewer bits.
    """
    held = PRECISIONS[dtype].dtype
    if as_it_is is None:
        as_it_is = role == "candidate" and held is torch.float32
    module = copied(network).to(device=device, dtype=None if as_it_is else held)
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
        reference, candidate: networks in float32, or as they are handed over in bfloat16, that start from
            the same weights; they are copied.
        optimizer: makes an arm's optimizer of its network; ``candidate_optimizer`` the
            candidate's, if it differs.
        horizons: for each precision the number of updates, for example ``{"float32": 200, "float64": 40}``.
        controls: of float32 and float64. In 16 bits there is one where there are any: a weight by itself,
            moved by one unit, is lost there (``driftlab.lockstep.control``).
        scheduler: makes an arm's learning-rate scheduler of its optimizer, or None.
        clip: bounds the gradients of a module.
        device: where the arms lie; where the networks do if None.
        float64_candidate: False for a candidate that cannot run in float64.
    """
    arms: list[Arm] = []
    wider, controls, handed_over = None, list(controls), dtype_of(reference)
    for dtype in sorted(horizons, key=lambda d: PRECISIONS[d].bits, reverse=True):
        horizon, shared = horizons[dtype], {"scheduler": scheduler, "clip": clip, "device": device}
        if handed_over is not torch.float32:  # a norm of float32 stays one among weights of bfloat16
            shared["as_it_is"] = handed_over is PRECISIONS[dtype].dtype
        own = make_arm("reference", dtype, reference, optimizer, horizon, **shared)
        own.against = wider
        if not own.precision.in_16_bits:
            wider = own
        others = []
        if candidate is not None and (dtype != "float64" or float64_candidate):
            steps = candidate_optimizer or optimizer
            others.append(make_arm("candidate", dtype, candidate, steps, horizon, fold=fold, **shared))
        for control in [IN_16_BITS] if controls and own.precision.in_16_bits else controls:
            ends = int(min(horizon, control.longest))
            others.append(make_arm(control.role, dtype, reference, optimizer, ends, **shared))
            control.move(others[-1], nudge_seed)
        for arm in others:
            arm.against = own
        arms += [own, *others]
    return arms
