"""The stepping loop: all arms see the same batch at every step, one after the other.

Plain PyTorch. ``forward_backward(step)`` runs every arm and measures it, ``update(step)`` moves its
weights; an arm with horizon H is measured at the steps 0..H and updated after 0..H-1, so row 0 of its
curves stands before any update and row H after the last. The activations of one arm at a time are
alive. What is measured stays on the device until ``flush``: no synchronisation a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from driftlab.arm import DTYPES, Arm
from driftlab.calling import Call, whole
from driftlab.distance import Folded, Layout, outputs_as_vector, relative_distance
from driftlab.kinks import KinkSides, kink_sides, sign_flips

Loss = Callable[[object, object], Tensor]
Row = dict[str, float]

# How many steps a GPU may run ahead of the host before its measurements are fetched, and so how late
# the host learns of a NaN. The record does not depend on it.
FLUSH_EVERY = {"cpu": 1, "cuda": 25}


def cast(inputs: object, dtype: torch.dtype) -> object:
    """The floating tensors of a batch (tensor, tuple, list or dict) in ``dtype``; the rest as it is."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, inputs
    )


def own_batch(inputs: object, dtype: torch.dtype) -> object:
    """As ``cast``, in tensors of its own: a network may write into its batch before the next arm sees it."""
    return torch.utils._pytree.tree_map_only(
        Tensor, lambda t: t.detach().to(dtype, copy=True) if t.is_floating_point() else t, inputs
    )


@contextmanager
def evaluation_mode(module: nn.Module):
    """Eval mode and no gradients inside; every submodule's own mode as it was afterwards."""
    modes = {m: m.training for m in module.modules()}
    module.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for submodule, training in modes.items():
            submodule.training = training


def seed_random_layers(seed: int) -> None:
    """As ``torch.manual_seed``, which keeps a stack trace a call for a GPU that nobody has started."""
    torch.default_generator.manual_seed(seed)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(seed)


def step_seed(seed: int, step: int) -> int:
    """Of the random layers at one step."""
    return (seed << 32) + step


class Lockstep:
    """Steps the arms together and keeps the rows of their curves.

    Args:
        arms: each behind its against, as ``driftlab.arm.grow`` returns them.
        loss: ``loss(outputs, targets)``, a scalar.
        seed: of the random layers (dropout): reset to the same state before each arm at each step.
        logged: which steps leave a row; the last step of every arm always does.
        call: how a module takes its inputs.

    Attributes:
        rows: step -> column -> value, columns named as in ``curves.csv``; complete up to the last flush.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        loss: Loss,
        seed: int = 0,
        logged: Callable[[int], bool] | None = None,
        call: Call = whole,
    ):
        self.arms, self.loss, self.seed, self.call = list(arms), loss, seed, call
        self.rows: dict[int, Row] = {}
        self.layouts: dict[tuple[str, str], Layout] = {}
        self._sides: dict[str, KinkSides] = {}
        self._logged = logged or (lambda step: True)
        self._pending: list[tuple[int, list[str], Tensor]] = []
        device = next(self.arms[0].module.parameters()).device
        self._flush_every = FLUSH_EVERY.get(device.type, 1)

    @property
    def steps(self) -> int:
        """The longest horizon among the arms."""
        return max(arm.horizon for arm in self.arms)

    def is_logged(self, step: int) -> bool:
        return self._logged(step) or any(step == arm.horizon for arm in self.arms)

    def live(self, step: int) -> list[Arm]:
        return [arm for arm in self.arms if arm.measured_at(step)]

    def forward_backward(self, step: int, inputs: object, targets: object) -> None:
        """Run every living arm on the batch, leave its gradients, and measure where the step is logged."""
        logged = self.is_logged(step)
        measured: dict[str, Tensor] = {}
        seen: dict[str, tuple[Tensor, KinkSides]] = {}
        for arm in self.live(step):
            outputs, loss, sides = self._run(arm, step, inputs, targets, logged)
            measured[f"loss/{arm.name}"] = loss.detach()
            if logged:
                vector = outputs_as_vector(outputs)
                measured |= self._against_outputs(arm, vector, sides, seen)
                measured |= _accuracy(arm, outputs, targets)
                seen[arm.name] = (vector, sides)
        if logged:
            measured |= self._against_tensors(step)
        self._keep(step, measured)

    def update(self, step: int) -> None:
        """One step of every arm's optimizer and scheduler, where its horizon and its loss allow it."""
        for arm in self.arms:
            if arm.updated_at(step):
                arm.optimizer.step()
                if arm.scheduler is not None:
                    arm.scheduler.step()
                if arm.after_update is not None:
                    arm.after_update()

    def flush(self) -> None:
        """Fetch what was measured since the last time; mark the arms whose loss became NaN or inf."""
        for step, columns, values in self._pending:
            numbers = dict(zip(columns, values.tolist(), strict=True))
            self._mark_blown_up(step, numbers)
            if self.is_logged(step):
                self.rows[step] = {c: v for c, v in numbers.items() if self._counts(c, step)}
        self._pending.clear()

    def _counts(self, column: str, step: int) -> bool:
        """Whether a value stands: a GPU runs on for some steps before the host sees that an arm blew up."""
        kind, name = column.split("/")
        arm = next(a for a in self.arms if a.name == name)
        compared = arm.against is None or arm.against.measured_at(step)
        return arm.measured_at(step) and (compared or kind in ("loss", "accuracy"))

    @torch.no_grad()
    def predictions(self, arm: Arm, batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Eval-mode logits of ``arm``, float64 [N, classes], and the targets [N], over ``batches``."""
        with evaluation_mode(arm.module):
            pairs = [(arm.module(cast(x, DTYPES[arm.dtype])).double(), y) for x, y in batches]
        return torch.cat([p for p, _ in pairs]), torch.cat([y for _, y in pairs])

    def _run(self, arm: Arm, step: int, inputs: object, targets: object, logged: bool):
        seed_random_layers(step_seed(self.seed, step))
        arm.optimizer.zero_grad(set_to_none=True)
        outputs = self.call(arm.module, own_batch(inputs, DTYPES[arm.dtype]))
        loss = self.loss(outputs, cast(targets, DTYPES[arm.dtype]))
        sides = None
        if logged:
            sides = self._sides[arm.name] = kink_sides(loss, self._sides.get(arm.name))
        loss.backward()
        return outputs, loss, sides

    def _against_outputs(self, arm: Arm, vector: Tensor, sides: KinkSides, seen: dict) -> dict[str, Tensor]:
        if arm.against is None or arm.against.name not in seen:
            return {}
        vector_against, sides_against = seen[arm.against.name]
        measured = {f"sign_flips/{arm.name}": sign_flips(sides, sides_against)}
        if vector.shape == vector_against.shape:
            measured[f"logit_distance/{arm.name}"] = relative_distance(vector, vector_against)
        return {column: value for column, value in measured.items() if value is not None}

    def _against_tensors(self, step: int) -> dict[str, Tensor]:
        view, measured = Folded(self.layouts), {}
        for arm in self.live(step):
            if arm.against is None or not arm.against.measured_at(step):
                continue
            for kind in ("weight", "gradient"):
                measured[f"{kind}_distance/{arm.name}"] = view.distance(arm, kind)
        return {column: value for column, value in measured.items() if value is not None}

    def _keep(self, step: int, measured: dict[str, Tensor]) -> None:
        device = next(iter(measured.values())).device if measured else None
        values = [v.to(device=device, dtype=torch.float64) for v in measured.values()]
        self._pending.append((step, list(measured), torch.stack(values) if values else torch.zeros(0)))
        if len(self._pending) >= self._flush_every:
            self.flush()

    def _mark_blown_up(self, step: int, numbers: Row) -> None:
        for arm in self.arms:
            loss = numbers.get(f"loss/{arm.name}", 0.0)
            if arm.blown_up_at is None and not math.isfinite(loss):
                arm.blown_up_at = step


def _accuracy(arm: Arm, outputs: object, targets: object) -> dict[str, Tensor]:
    """The share of the batch classified rightly; nothing where this is no classification."""
    if not (isinstance(outputs, Tensor) and isinstance(targets, Tensor)):
        return {}
    if outputs.dim() != 2 or targets.is_floating_point() or targets.shape != outputs.shape[:1]:
        return {}
    return {f"accuracy/{arm.name}": (outputs.detach().argmax(1) == targets).double().mean()}
