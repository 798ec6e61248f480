"""Watching a training of one's own: is the candidate still the same function, wherever the training has got?

The curves of two trainings that only rounding tells apart part for good after some hundred steps. So the
candidate is not trained beside: at some steps it is made from the reference as it then is, with its weights,
buffers and optimizer state, and the two are diagnosed from there. A right rewrite passes each time, however
long the training; a fault that sets in late shows at the first look after it.
"""

from __future__ import annotations

import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice
from types import TracebackType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

from driftlab.along import look_briefly
from driftlab.arguments import clipped_by, is_above_0, stepping, the_batches
from driftlab.arithmetic.counters import Counters
from driftlab.arithmetic.passes import on_batch
from driftlab.diagnosis import Diagnosis, made_pair, of_pair
from driftlab.lockstep.carried import Carried
from driftlab.lockstep.window import Batch
from driftlab.network.otherwise import accumulating, gathered
from driftlab.network.pair import Pair, Rewrite, judged_in, precision_in, the_pair
from driftlab.precision import trained_in
from driftlab.process import measuring
from driftlab.record.seed_record import Row
from driftlab.refusing import shown, told, whole_number
from driftlab.threads import threads_for
from driftlab.words import DiagnoseError, Verdict

# The next look is due where the training is this much longer than at the last one: evenly in the logarithm.
GROWTH = 1.5
# From the worst on: what a whole training is, where its looks differ.
WORST_FIRST = (
    Verdict.BUG,
    Verdict.NONDETERMINISTIC,
    Verdict.REDUCED_PRECISION,
    Verdict.INCONCLUSIVE,
    Verdict.UNSTABLE,
    Verdict.ROUND_OFF,
    Verdict.BIT_IDENTICAL,
)
RIGHT = (Verdict.ROUND_OFF, Verdict.BIT_IDENTICAL)


@dataclass(frozen=True)
class Look:
    """One diagnosis on the way.

    Attributes:
        step: the update before which it was made, from 0.
        seconds: what it took.
    """

    step: int
    diagnosis: Diagnosis
    seconds: float


class Watch:
    """Watches the training of ``model``: would it be the same with ``candidate`` in its place?

        with driftlab.watching(model, my_rewrite, optimizer, loss) as watch:
            for inputs, targets in batches:
                watch.step(inputs, targets)
                ...  # the training's own forward, backward and update
        watch.diagnosis

    The training is bit for bit what it is without: nothing that is handed over is changed, nor torch's,
    NumPy's or Python's random state. What is judged is the training in float32 and float64 at the learning
    rate of that step, its gradients clipped by ``clip``, those of ``accumulate`` batches an update; in a
    mixed ``precision`` there as well. What the candidate counts for itself (a number that moves alike with
    each call) is where this many calls would have brought it; of what else it alone would have kept since the
    first step, a look knows nothing.

    Args:
        model: the network in training.
        candidate: makes the rewritten network from a deep copy of ``model``.
        optimizer: that of the training, in use. The candidate's has its groups, settings and state.
        loss: as in ``diagnose``.
        budget: the share of the training's own time that looks may take, above 1 too. The first look is
            always taken.
        updates: that each look follows both for, on its step's batch and those before it, which are kept in
            memory. The first look is all of ``diagnose``; a later one is a local window, and all of
            ``diagnose`` where that leaves its controls.
        begins: the updates that the training has made before, of one that goes on.
        accumulate: how many batches' gradients one update gathers, as in ``diagnose``.
        fold, seed, clip, candidate_inputs, candidate_loss, precision: as in ``diagnose``.
        configured: makes both optimizers of the first look, of a training that has not begun; else a look
            goes on with the groups of the one in use.

    Attributes:
        looks: so far. They are due at steps spread evenly in the logarithm, and taken when they are paid.
        steps: how many updates the training has made.
        gathered: of how many batches the next one has gathered gradients.

    Raises:
        DiagnoseError: an argument is not what it should be.
    """

    def __init__(
        self,
        model: nn.Module,
        candidate: Rewrite,
        optimizer: Optimizer,
        loss: Callable[[Any, Any], Tensor] = F.cross_entropy,
        *,
        budget: float = 0.05,
        updates: int = 6,
        begins: int = 0,
        accumulate: int = 1,
        fold: Callable[[dict[str, Tensor]], Mapping[str, Tensor]] | None = None,
        seed: int = 0,
        clip: float | Callable[[Iterable[nn.Parameter]], object] | None = None,
        candidate_inputs: Callable[[Any], object] | None = None,
        candidate_loss: Callable[[Any, Any], Tensor] | None = None,
        precision: str | None = None,
        configured: Callable[[nn.Module], Optimizer] | None = None,
    ):
        if isinstance(candidate, nn.Module) or not callable(candidate):
            kind = type(candidate).__name__
            raise DiagnoseError(f"candidate is a {kind}: give the function that rewrites a copy of the model")
        if not isinstance(optimizer, Optimizer):
            raise DiagnoseError(f"optimizer is a {type(optimizer).__name__}: give the model's, in use")
        if not is_above_0(budget):
            raise DiagnoseError(
                f"budget is {shown(budget)}: give a share of the training's time, such as 0.05"
            )
        self.model, self.candidate, self.optimizer, self.loss = model, candidate, optimizer, loss
        self.budget, self.fold, self.seed = budget, fold, seed
        self.updates = whole_number("updates", updates, 1, 10_000)
        self.accumulate, self.gathered = whole_number("accumulate", accumulate, 1), 0
        with told("watching stops", outermost=True):
            run_in = precision_in(precision, model, trained_in)
        self._options: dict[str, Any] = {
            "precision": run_in,
            "clip": clipped_by(clip),
            "candidate_inputs": candidate_inputs,
            "candidate_loss": candidate_loss,
        }
        self.looks: list[Look] = []
        self.steps = self._due = whole_number("begins", begins, 0)
        self._began = time.perf_counter()
        most = self.accumulate * (self.updates + 1)
        self._batches: deque[tuple[object, object]] = deque(maxlen=most)  # the last one first
        self._counters: Counters | None = None
        self._left_out = ""
        self._counted: list[str] = []  # which of them were set at a later look
        self._configured = configured

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()

    def step(self, inputs: object, targets: object = None) -> bool:
        """Say that the training now computes on this batch. True where a look was taken.

        Looks are taken before the first batch of an update.

        A later look that fails costs no training: it is said, and ``inconclusive``.

        Raises:
            DiagnoseError: at the first step, the rewrite, the loss or the optimizer cannot be judged.
        """
        self._batches.appendleft((inputs, targets))
        due = self.gathered == 0 and self.steps >= self._due
        look = due and (not self.looks or self._is_paid())
        if look:
            self._take(self.steps)
        self.gathered = (self.gathered + 1) % self.accumulate
        self.steps += self.gathered == 0
        return look

    def end(self) -> bool:
        """A last look at where the training has got, where it is paid. True where it was taken."""
        look = bool(self.looks) and self.looks[-1].step < self.steps and self._is_paid()
        if look:
            self._take(self.steps)
        return look

    @property
    def seconds(self) -> float:
        """What all looks took."""
        return sum(look.seconds for look in self.looks)

    @property
    def diagnosis(self) -> Diagnosis | None:
        """The worst that was found, the first of its kind; None before the first step."""
        if not self.looks:
            return None
        at = min(range(len(self.looks)), key=lambda i: WORST_FIRST.index(self.looks[i].diagnosis.verdict))
        look, last = self.looks[at], self.looks[-1].step
        if look.diagnosis.verdict in RIGHT:
            said = f"at step {last}, the only one that was looked at"
            if len(self.looks) > 1:
                first = self.looks[0].step
                said = f"at each step that was looked at, {len(self.looks)} from {first} to {last}"
            if GROWTH * last + 1 < self.steps:
                said += f"; nothing is known of the rest of {self.steps}, for which a larger budget pays"
        elif at == 0:
            said = f"found at step {look.step}, the first that was looked at"
        else:
            said = f"found at step {look.step}, and not yet at step {self.looks[at - 1].step}"
        if self._left_out:
            said += f"; {self._left_out}"
        if self._counted:
            said += f"; what it counts is taken as counted since step 0: {', '.join(self._counted)}"
        return look.diagnosis.along(f"{look.diagnosis.headline}; {said}", self._windows())

    def _windows(self) -> list[Row]:
        """Of all looks, as in ``local.csv``."""
        return [
            {**row, "step": look.step + int(row["step"]), "updates": int(row["step"])}
            for look in self.looks
            for row in look.diagnosis.curves
        ]

    def _is_paid(self) -> bool:
        """Whether one more look, as long as the longest, keeps to the share of the training's own time."""
        trained = time.perf_counter() - self._began - self.seconds
        return self.seconds + max(look.seconds for look in self.looks) <= self.budget * trained

    def _take(self, step: int) -> None:
        began = time.perf_counter()
        try:
            found = self._look(step)
        except DiagnoseError as error:
            if not self.looks:
                raise
            warnings.warn(f"driftlab: no look at step {step}: {error}", stacklevel=3)
            found = Diagnosis(Verdict.INCONCLUSIVE, f"no look at step {step}: {error}", None, [])
        self.looks.append(Look(step, found, time.perf_counter() - began))
        self._due = max(step + 1, int(step * GROWTH))

    @measuring()
    def _look(self, step: int) -> Diagnosis:
        """The diagnosis of a pair that begins where the training is."""
        with torch.inference_mode(False), torch.enable_grad(), told("watching stops", outermost=True):
            run_in = self._options["precision"]
            both = the_pair(self.model, self.candidate, self.fold, run_in)
            carried = Carried(self.optimizer, self.model, *both[1:])
            by = self._as_configured(both) or (carried.of_reference, carried.of_candidate)
            batches = the_batches(list(self._batches), len(self._batches))
            options = self._options | {"judged": judged_in(self.model, run_in)}
            pair = made_pair(both, batches[0], self.loss, by, self.seed, **options)
            if self.accumulate > 1:
                pair, batches = accumulating(pair, self.accumulate), gathered(batches, self.accumulate)
            self._count(pair, batches[0], step)
            found = self._briefly(pair, batches, step) if self.looks else None
            if found is None:
                found = of_pair(pair, batches, self.updates, begins=step, part=True)
        said = found.headline
        if carried.dropped:
            said += f"; both without the optimizer's state, which cannot be carried over: {carried.dropped}"
        return replace(found, headline=said)

    def _as_configured(self, both: tuple) -> tuple | None:
        """The optimizers that both networks make for themselves; None where they do not, or not any more."""
        if self.looks or self._configured is None:
            return None
        make = stepping("configure_optimizers", self._configured)
        try:
            make(both[0]), make(both[1])
        except DiagnoseError as error:
            self._left_out = f"{error}, so it was not compared"
            return None
        return make, make

    def _count(self, pair: Pair, batch: Batch, step: int) -> None:
        """Puts the counters of the candidate's own where this many calls would have brought them."""
        if self._counters is None:
            self._counters = Counters(pair.candidate, on_batch(pair, batch))
        if step and (counted := self._counters.advance(pair.candidate, step)):
            self._counted = counted

    def _briefly(self, pair: Pair, batches: Sequence[Batch], step: int) -> Diagnosis | None:
        """A window alone, of code that the first look has examined; None where that does not tell."""
        batches = list(islice(cycle(batches), self.updates + 1))
        with threads_for(batches[0], pair.reference, pair.candidate):
            return look_briefly(pair, batches, step)


watching = Watch
