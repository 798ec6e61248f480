"""The lockstep window: the first steps of training, in both dtypes, beside an ensemble of controls.

Nine time steps of an ensemble of tiny perturbations are how climate science accepts a port of its codes
(Milroy, Baker, Hammerling, Jessup, "Nine time steps", GMD 2018). The controls here are the reference with one
weight moved by one ulp, with every weight so moved, and with every weight so moved again after each update,
since a rewrite rounds otherwise at every step.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import nn

from driftlab.arm import DTYPES, Arm, nudge, nudge_all, unfolded
from driftlab.copying import copied
from driftlab.distance import Folded, outputs_as_vector, relative_distance
from driftlab.lockstep import Lockstep, evaluation_mode, own_batch, seed_random_layers
from driftlab.records import Row, SeedRecord
from driftlab.subject import Subject

# Those that move every weight go as far as this; what they showed stands for the rest, beside the first.
ENSEMBLE_STEPS = 9
# How often in the window eval mode is looked at, besides before the first step and after the last.
EVALUATE_EVERY = 5
Batches = Sequence[tuple[object, object]]
Control = tuple[str, bool, bool]
# Name, whether every weight is moved, whether again after each update.
CONTROLS: tuple[Control, ...] = (
    ("control", False, False),
    ("control_all", True, False),
    ("control_each", True, True),
)


class Window:
    """Reference, candidate and controls over some steps.

    Args:
        steps: updates.
        float64: whether the candidate takes part in float64 too.
        controls: which of ``CONTROLS``; none for a second run that only has to repeat the first.
    """

    def __init__(
        self,
        subject: Subject,
        batches: Batches,
        steps: int,
        *,
        dtypes: Sequence[str] = ("float64", "float32"),
        float64: bool = True,
        controls: Sequence[Control] = CONTROLS,
    ):
        self.subject, self.batches, self.steps = subject, batches, steps
        arms = [a for d in dtypes for a in self._arms(d, float64, controls)]
        wide = next((a for a in arms if a.name == "reference.float64"), None)
        for arm in arms:
            if arm.name == "reference.float32":
                arm.against = wide
        self.lockstep = Lockstep(arms, subject.loss, seed=subject.seed, call=subject.call)
        self.evaluations: dict[int, Row] = {}

    def arm(self, name: str) -> Arm:
        return next(a for a in self.lockstep.arms if a.name == name)

    def batch(self, step: int) -> tuple[object, object]:
        return self.batches[step % len(self.batches)]

    def run(self) -> SeedRecord:
        """All steps, and the row after the last update."""
        for step in self.walk():
            if step in self._evaluated():
                self.evaluations[step] = self._evaluate(step)
        return self.record()

    def walk(self) -> Iterator[int]:
        """Before each step its number, with the arms as they stand; the last comes after the last update."""
        for step in range(self.steps + 1):
            yield step
            self.lockstep.forward_backward(step, *self.batch(step))
            if step < self.steps:
                self.lockstep.update(step)
        self.lockstep.flush()

    def record(self) -> SeedRecord:
        rows = [{"step": s, **row} for s, row in sorted(self.lockstep.rows.items())]
        evaluations = [{"step": s, **row} for s, row in sorted(self.evaluations.items())]
        arms = {
            a.name: {"blown_up_at": a.blown_up_at, "against": a.against.name if a.against else None}
            for a in self.lockstep.arms
        }
        return SeedRecord(self.subject.seed, rows, evaluations, {"arms": arms})

    def _evaluated(self) -> set[int]:
        return {*range(0, self.steps, EVALUATE_EVERY), self.steps}

    def _arms(self, dtype: str, float64: bool, controls: Sequence[Control]) -> list[Arm]:
        s = self.subject
        reference = self._arm("reference", dtype, s.reference)
        arms = [reference]
        if dtype == "float32" or float64:
            candidate = self._arm("candidate", dtype, s.candidate)
            arms.append(candidate)
        for name, every, again in controls:
            arms.append(self._control(name, dtype, every, again))
        for arm in arms[1:]:
            arm.against = reference
        return arms

    def _arm(self, role: str, dtype: str, module: nn.Module) -> Arm:
        s, twin = self.subject, copied(module)
        # a candidate may keep some weights in fewer bits: those are its own
        twin = twin if dtype == "float32" and role == "candidate" else twin.to(DTYPES[dtype])
        make = s.candidate_optimizer if role == "candidate" else s.optimizer
        fold = s.comparable if role == "candidate" else unfolded
        return Arm(role, dtype, twin, make(twin), fold, self.steps)

    def _control(self, name: str, dtype: str, every: bool, again: bool) -> Arm:
        arm = self._arm(name, dtype, self.subject.reference)
        arm.horizon = min(self.steps, ENSEMBLE_STEPS) if every else self.steps
        generator = torch.Generator().manual_seed(self.subject.seed)
        if every:
            nudge_all(arm.module, generator)
        else:
            nudge(arm.module, self.subject.seed)
        arm.after_update = (lambda: nudge_all(arm.module, generator)) if again else None
        return arm

    @torch.no_grad()
    def _evaluate(self, step: int) -> Row:
        """Buffers, and the outputs in eval mode on the first batch, against the reference's."""
        view, row, seen = Folded(self.lockstep.layouts), {}, {}
        for arm in (a for a in self.lockstep.live(step) if a.blown_up_at is None):
            seed_random_layers(self.subject.seed)
            with evaluation_mode(arm.module):
                inputs = own_batch(self.batches[0][0], DTYPES[arm.dtype])
                seen[arm.name] = outputs_as_vector(self.subject.call(arm.module, inputs))
            if arm.against is None or arm.against.name not in seen:
                continue
            mine, other = seen[arm.name], seen[arm.against.name]
            row[f"buffer_distance/{arm.name}"] = view.distance(arm, "buffer")
            if mine.shape == other.shape:
                row[f"eval_logit_distance/{arm.name}"] = relative_distance(mine, other)
        return {column: float(value) for column, value in row.items() if value is not None}


def same_rows(first: SeedRecord, second: SeedRecord) -> int | None:
    """The first step at which two runs differ in any number that both measured; None where there is none."""
    for one, other in itertools.zip_longest(first.curves, second.curves, fillvalue={}):
        common = one.keys() & other.keys()
        if any(one[c] != other[c] and not (one[c] != one[c] and other[c] != other[c]) for c in common):
            return int(one["step"])
    return None
