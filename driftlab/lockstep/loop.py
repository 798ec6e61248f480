"""The stepping loop: all arms see the same batch at every step, one after the other.

Plain PyTorch. ``forward_backward(step)`` runs every arm and measures it, ``update(step)`` moves its
weights; an arm with horizon H is measured at the steps 0..H and updated after 0..H-1, so row 0 of its
curves stands before any update and row H after the last. The activations of one arm at a time are
alive. What is measured (``driftlab.measures``) stays on the device until ``flush``: no
synchronisation a step.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from driftlab.arithmetic.draws import Draws
from driftlab.arithmetic.kinks import KinkSides, kink_sides
from driftlab.blame import theirs
from driftlab.lockstep.arm import Arm
from driftlab.lockstep.distance import Folded, Layout
from driftlab.lockstep.seen import Seen
from driftlab.measures import Measure, Moment, measures_at
from driftlab.measures.loss import MEASURE as LOSS
from driftlab.network.calling import (
    Call,
    cast,
    copied,
    evaluation_mode,
    named_leaves,
    own_batch,
    seed_random_layers,
    step_seed,
    whole,
)
from driftlab.network.loss import Loss, loss_in, loss_of, one_number
from driftlab.network.outputs import Outputs
from driftlab.process import float64_convolutions

Row = dict[str, float]

# How many steps a GPU may run ahead of the host before its measurements are fetched, and so how late
# the host learns of a NaN. The record does not depend on it.
FLUSH_EVERY = {"cpu": 1, "cuda": 25}


class Lockstep:
    """Steps the arms together and keeps the rows of their curves.

    Args:
        arms: each behind its against, as ``driftlab.lockstep.arm.grow`` returns them.
        loss: ``loss(outputs, targets)``, a scalar, where an arm carries none of its own (``carry_loss``); a
            module is copied, into each arm's dtype.
        seed: of the random layers (dropout): reset to the same state before each arm at each step.
        logged: which steps leave a row; the last step of every arm always does.
        call: how a module takes its inputs.
        outputs: which output of the candidate stands for which of the reference's.
        beside: another lockstep, which has some of these very arms and takes each step first: what it saw of
            them is taken from it. So several candidates train beside one reference.

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
        outputs: Outputs | None = None,
        beside: Lockstep | None = None,
    ):
        self.arms, self.loss, self.seed, self.call = list(arms), loss, seed, call
        self.outputs = outputs or Outputs()
        self.rows: dict[int, Row] = {}
        self.layouts: dict[tuple[int, str], Layout] = beside.layouts if beside else {}
        others = {id(arm) for arm in beside.arms} if beside else set()
        self._own = [arm for arm in self.arms if id(arm) not in others]
        self._shared = {arm.name for arm in self.arms if id(arm) in others}
        self._beside, self._look, self._is_followed = beside, _Look(), False
        if beside:
            beside._is_followed = True
        self._sides: dict[str, KinkSides] = {}
        self._draws: dict[tuple[str, bool], Draws] = defaultdict(Draws)
        self.logged = logged or (lambda step: True)
        self._losses = {arm.name: _loss_of(arm, loss) for arm in self._own}
        self._compared = {measure.name: measure.compared for measure in measures_at(Moment.STEP)}
        self._pending: list[tuple[int, list[str], Tensor]] = []
        device = next(self.arms[0].module.parameters()).device
        self._flush_every = FLUSH_EVERY.get(device.type, 1)

    @property
    def steps(self) -> int:
        """The longest horizon among the arms."""
        return max(arm.horizon for arm in self.arms)

    def is_logged(self, step: int) -> bool:
        return self.logged(step) or any(step == arm.horizon for arm in self.arms)

    def live(self, step: int) -> list[Arm]:
        """Of the arms that it steps itself."""
        return [arm for arm in self._own if arm.measured_at(step)]

    def forward_backward(self, step: int, inputs: object, targets: object) -> None:
        """Run every living arm on the batch, leave its gradients, and measure where the step is logged."""
        # the loss tells at every step whether the arm has blown up
        measures = measures_at(Moment.STEP) if self.is_logged(step) else (LOSS,)
        look = self._begun()
        for arm in self.live(step):
            seen = self._run(arm, look.folded, step, inputs, targets)
            look.add(seen, measures, self.outputs)
        self._keep(step, look.measured)
        self._leave(look)

    def update(self, step: int) -> None:
        """One step of every arm's optimizer and scheduler, where its horizon and its loss allow it."""
        for arm in self._own:
            if arm.updated_at(step):
                arm.update()

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
        against = arm.against if self._compared[kind] else None
        return arm.measured_at(step) and (against is None or against.measured_at(step))

    def evaluate(self, step: int, batches: Sequence[tuple[object, object]]) -> Row:
        """What is measured in eval mode over ``batches``, of every arm that still trains at ``step``."""
        self.flush()
        look = self._begun()
        for arm in (a for a in self.live(step) if a.blown_up_at is None):
            with arm.otherwise(step):
                outputs, targets = self.predictions(arm, batches)
            seen = Seen(arm, look.folded, outputs, targets)
            look.add(seen, measures_at(Moment.EVALUATION), self.outputs)
        self._leave(look)
        return {column: float(value) for column, value in look.measured.items()}

    def _begun(self) -> _Look:
        """A look at a step, with what the lockstep beside has seen of the arms that are its too."""
        if self._beside is None:
            return _Look(Folded(self.layouts))
        first = self._beside._look
        seen = {name: s for name, s in first.seen.items() if name in self._shared}
        measured = {c: v for c, v in first.measured.items() if c.partition("/")[2] in self._shared}
        return _Look(first.folded, seen, measured)

    def _leave(self, look: _Look) -> None:
        """To whoever follows; else nothing of a step outlives it."""
        if self._is_followed:
            self._look = look

    def predictions(self, arm: Arm, batches: Iterable[tuple[object, object]]) -> tuple[object, object]:
        """Eval-mode outputs of ``arm`` over ``batches``, in float64, and the targets.

        Those of several batches are joined along the first dimension of each tensor in them.
        """
        seed_random_layers(self.seed)
        precision = arm.precision
        with (
            evaluation_mode(arm.module),
            self._in_its_dtype(arm, training=False),
            precision.forward(arm.module),
        ):
            pairs = [(self.call(arm.module, own_batch(x, precision.dtype)), y) for x, y in batches]
        outputs, targets = pairs[0] if len(pairs) == 1 else map(_joined, zip(*pairs, strict=True))
        return cast(outputs, torch.float64), targets

    def _run(self, arm: Arm, folded: Folded, step: int, inputs: object, targets: object) -> Seen:
        seed_random_layers(step_seed(self.seed, step))
        theirs(arm.optimizer.zero_grad, set_to_none=True)
        sides, precision = None, arm.precision
        with self._in_its_dtype(arm, training=True), arm.otherwise(step):
            with precision.forward(arm.module):
                outputs = self.call(arm.module, own_batch(inputs, precision.dtype))
                loss = one_number(theirs(self._losses[arm.name], outputs, cast(targets, precision.dtype)))
            if self.is_logged(step):
                sides = self._sides[arm.name] = kink_sides(loss, self._sides.get(arm.name))
            arm.backward(loss)
        outputs = pytree.tree_map_only(Tensor, Tensor.detach, outputs)
        return Seen(arm, folded, outputs, targets, loss=loss.detach(), sides=sides)

    @contextmanager
    def _in_its_dtype(self, arm: Arm, training: bool) -> Iterator[None]:
        """Inside, a float64 arm draws its random numbers as its float32 arm does, and has its own kernels."""
        if arm.precision.dtype is not torch.float64:
            yield
            return
        with self._draws[arm.name, training].as_float32(), float64_convolutions.computing():
            yield

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


@dataclass
class _Look:
    """What is seen and measured of the arms at one step."""

    folded: Folded | None = None
    seen: dict[str, Seen] = field(default_factory=dict)
    measured: dict[str, Tensor] = field(default_factory=dict)

    def add(self, own: Seen, measures: Iterable[Measure], outputs: Outputs) -> None:
        """An arm behind its against, with its outputs by the names of the reference's of its dtype."""
        arm = own.arm
        against = self.seen.get(arm.against.name) if arm.against else None
        own.leaves = named_leaves(own.outputs)
        if arm.role == "candidate" and against:
            own.leaves = outputs.of(own.leaves, against.leaves)
        self.seen[arm.name] = own
        for measure in measures:
            if (against or not measure.compared) and (value := measure.measure(own, against)) is not None:
                self.measured[f"{measure.name}/{arm.name}"] = value


def _loss_of(arm: Arm, loss: Loss) -> Loss:
    """What the arm is trained on, its tensors as the arm's precision holds them."""
    loss, dtype = loss_of(arm.module, loss), arm.precision.dtype
    return loss_in(loss, lambda module: copied(module).to(dtype), lambda held: cast(held, dtype))


def _joined(parts: Sequence[object]) -> object:
    """Structures of tensors as one; what has no dimension, as a mean, has one then, and what is no tensor is
    the first one's."""

    def joined(*leaves: object) -> object:
        if not isinstance(leaves[0], Tensor):
            return leaves[0]
        return torch.cat(leaves) if leaves[0].dim() else torch.stack(leaves)

    return pytree.tree_map(joined, *parts)
