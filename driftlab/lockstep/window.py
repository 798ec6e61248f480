"""The lockstep window: the first steps of training, in both dtypes, beside an ensemble of controls.

Nine time steps of an ensemble of tiny perturbations are how climate science accepts a port of its codes
(Milroy, Baker, Hammerling, Jessup, "Nine time steps", GMD 2018). The controls here are the reference with one
weight moved by one ulp, with every weight so moved, and with every weight so moved again after each update,
since a rewrite rounds otherwise at every step.

``Snapshots`` keeps the pair of any float32 training at its steps. At a later step drift has parted the
weights, so they are made equal: the reference gets the candidate's, by the fold. Then the probes of one step
serve again.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from torch import nn

from driftlab.fold.layout import relative_distance
from driftlab.lockstep.arm import Arm, grow
from driftlab.lockstep.control import ENSEMBLE, Control
from driftlab.lockstep.loop import Lockstep
from driftlab.network.calling import step_seed
from driftlab.network.pair import Pair, without_gradients
from driftlab.record.seed_record import Row, SeedRecord
from driftlab.words import Place

Batch = tuple[object, object]


class Run(Protocol):
    """A float32 training of both networks that can be walked through step by step."""

    steps: int

    def walk(self) -> Iterator[int]: ...

    def arm(self, name: str) -> Arm: ...

    def batch(self, step: int) -> Batch: ...


class Snapshots:
    """Copies of both networks before each step that ``run.walk()`` comes by."""

    def __init__(self, pair: Pair, run: Run):
        self.pair, self._run = pair, run
        self.put_back = False  # see ``Pair.in_step``
        self._kept: dict[int, tuple[nn.Module, nn.Module]] = {}
        for step in run.walk():
            both = (run.arm(f"{role}.float32").module for role in ("reference", "candidate"))
            self._kept[step] = tuple(without_gradients(m) for m in both)

    @property
    def last(self) -> int:
        """The last step; of a reference that blew up the last before, since of NaN any two make another."""
        blown_up = self._run.arm("reference.float32").blown_up_at
        return max(self._kept) if blown_up is None else max(0, blown_up - 1)

    def at(self, step: int) -> tuple[Pair, Batch]:
        """Both on the weights that the candidate has before ``step``, and that step's batch."""
        pair = self.pair.in_step(*self._kept[step], put_back=self.put_back)
        # random layers as lockstep seeds them at this step
        return replace(pair, seed=step_seed(pair.seed, step)), self._run.batch(step)

    def strays(self, step: int) -> list[str]:
        """See ``Pair.strays``."""
        return self.pair.strays(self._kept[step][0])

    def with_strays_put_back(self) -> Snapshots:
        """The same steps, at which what has no place in the other is as it was at the start."""
        other = copy.copy(self)
        other.put_back = True
        return other

    def moved_apart(self, step: int) -> Place:
        """The module whose weights the update before ``step`` parted most, in units of their own size."""
        mine, theirs = self._kept[step]
        folded = self.pair.comparable(dict(theirs.named_parameters()))
        apart = {
            n: float(relative_distance(folded[n].detach(), p.detach()))
            for n, p in mine.named_parameters()
            if n in folded
        }
        name = max(apart, key=apart.__getitem__)
        return Place(name.rpartition(".")[0], "update", max(0, step - 1))


# How often in the window eval mode is looked at, besides before the first step and after the last.
EVALUATE_EVERY = 5
Batches = Sequence[tuple[object, object]]


class Window:
    """Reference, candidate and controls over some steps.

    Args:
        steps: updates.
        dtypes: the precisions; None for float64, float32 and, where it is another one, the pair's own.
        float64: whether the candidate takes part in float64 too.
        controls: which of ``ENSEMBLE``; none for a second run that only has to repeat the first.
    """

    def __init__(
        self,
        pair: Pair,
        batches: Batches,
        steps: int,
        *,
        dtypes: Sequence[str] | None = None,
        float64: bool = True,
        controls: Sequence[Control] = ENSEMBLE,
    ):
        self.pair, self.batches, self.steps = pair, batches, steps
        arms = grow(
            pair.reference,
            pair.candidate,
            optimizer=pair.optimizer,
            candidate_optimizer=pair.candidate_optimizer,
            horizons=dict.fromkeys(dtypes or pair.trained_in(), steps),
            scheduler=pair.scheduler,
            clip=pair.clip,
            controls=controls,
            fold=pair.comparable,
            nudge_seed=pair.seed,
            float64_candidate=float64,
        )
        self.lockstep = Lockstep(arms, pair.loss, seed=pair.seed, call=pair.call, outputs=pair.outputs)
        self.evaluations: dict[int, Row] = {}

    def arm(self, name: str) -> Arm:
        return next(a for a in self.lockstep.arms if a.name == name)

    def batch(self, step: int) -> tuple[object, object]:
        return self.batches[step % len(self.batches)]

    def run(self) -> SeedRecord:
        """All steps, and the row after the last update."""
        for _ in self.walk():
            pass
        return self.record()

    def walk(self) -> Iterator[int]:
        """Before each step its number, with the arms as they stand; the last comes after the last update.

        Every walk evaluates where the others do: a network may keep something of an evaluation.
        """
        for step in range(self.steps + 1):
            yield step
            if step % EVALUATE_EVERY == 0 or step == self.steps:
                # on the first batch; its targets are those of training, and tell nothing here
                self.evaluations[step] = self.lockstep.evaluate(step, [(self.batches[0][0], None)])
            self.lockstep.forward_backward(step, *self.batch(step))
            if step < self.steps:
                self.lockstep.update(step)

    def record(self) -> SeedRecord:
        """Of all steps so far, those included that a device still holds."""
        self.lockstep.flush()
        rows = [{"step": s, **row} for s, row in sorted(self.lockstep.rows.items())]
        evaluations = [{"step": s, **row} for s, row in sorted(self.evaluations.items())]
        arms = {
            a.name: {"blown_up_at": a.blown_up_at, "against": a.against.name if a.against else None}
            for a in self.lockstep.arms
        }
        return SeedRecord(self.pair.seed, rows, evaluations, {"arms": arms})


def same_rows(first: SeedRecord, second: SeedRecord) -> int | None:
    """The first step at which two runs differ in any number that both measured; None where there is none."""
    for one, other in itertools.zip_longest(first.curves, second.curves, fillvalue={}):
        common = one.keys() & other.keys()
        if any(one[c] != other[c] and not (one[c] != one[c] and other[c] != other[c]) for c in common):
            return int(one["step"])
    return None
