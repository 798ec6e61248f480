"""The local windows of a seed: taken between its steps, stored with them, looked into where one is bad."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator

from omegaconf import DictConfig

from driftlab.along import all_stay, leaves_its_controls, look_on_the_spot
from driftlab.blame import is_ours
from driftlab.inquiry import Examined
from driftlab.lockstep.arm import Arm, make_arm
from driftlab.lockstep.carried import no_way_back
from driftlab.lockstep.local import local_rows, pair_at
from driftlab.lockstep.loop import Lockstep
from driftlab.lockstep.window import Batch
from driftlab.network.pair import Pair
from driftlab.probes.local_windows import PROBE
from driftlab.record.local_windows import growth, windows_of
from driftlab.record.seed_record import Row
from driftlab.words import Finding, settled_by
from suite.command.users_code import ROOMS
from suite.data.batches import Batches
from suite.running.building import Built
from suite.running.recorder import is_evaluated
from suite.running.updates import make_scheduler

_PAIR = ("reference.float32", "candidate.float32")


class LocalWindows:
    """Of one seed. It watches the training (``before_step``) and leaves it as it was.

    Attributes:
        rows: of ``local.csv``.
        logged: the step at which a window begins -> what a logger is told of it.
        finding: what a look on the spot found, where a window left its controls.
        seconds: what all of it took.
    """

    def __init__(self, settings: DictConfig, built: Built, found: Examined):
        self._settings, self._built, self._found = settings, built, found
        self._begins, self._updates = set(settings.local.windows), settings.local.updates
        self.rows: list[Row] = []
        self.logged: dict[int, dict[str, float]] = {}
        self.finding: Finding | None = None
        self.seconds = 0.0
        self.why_not = _why_not(built, found) if self._begins else "none were asked for (local.windows)"
        self._good: int | None = None  # the last window that stayed with its controls
        # the float32 pair as it was before that step, or where the seed was resumed
        self._kept: tuple[int, list[Arm]] | None = None

    def resume(self, step: int, rows: list[Row], notes: dict) -> None:
        """Goes on from a checkpoint: ``rows`` of the windows that began before ``step``."""
        self.rows = rows
        self.logged = {begins: _logged(window) for begins, window in windows_of(rows).items()}
        self.seconds = notes.get("seconds", 0.0)
        self.finding = Finding.from_dict(notes["finding"]) if notes.get("finding") else None
        self._good = max((w for w, r in windows_of(rows).items() if not self._is_bad(r)), default=None)
        if not self.why_not:
            self._keep(step)

    @property
    def notes(self) -> dict:
        """What a checkpoint, and ``run.json``, hold of it beside the rows."""
        found = {"finding": self.finding.as_dict()} if self.finding else {}
        return {"updates": self._updates, "seconds": round(self.seconds, 3), **found}

    def before_step(self, step: int) -> None:
        """Takes a window where one begins."""
        if self.why_not or step not in self._begins or self._blown_up():
            return
        began = time.perf_counter()
        try:
            self._take(step)
        except Exception as error:  # costs no training: it is said in the place of the answer
            self.finding = PROBE.failed(error) if is_ours(error, ROOMS) else PROBE.refused(error)
        self.seconds += time.perf_counter() - began

    def _take(self, step: int) -> None:
        rows = self._window(step, *(self._arm(name) for name in _PAIR))
        self.rows += rows
        self.logged[step] = _logged(rows)
        if not self._is_bad(rows):
            self._good = step
            self._keep(step)
        elif self.finding is None or not settled_by([self.finding]):
            self.finding = self._look(step)

    def ended(self) -> dict:
        """What ``run.json`` says of them."""
        begun = sorted(windows_of(self.rows))
        return {**self.notes, "windows": begun, "finding": self.after().as_dict()}

    def after(self) -> Finding:
        """What all windows together say."""
        if self.finding:
            return self.finding
        if self.why_not:
            return PROBE.not_applicable(self.why_not)
        if not self.rows:
            return PROBE.not_applicable("the reference blew up before the first window")
        return all_stay(self.rows, self._found)

    def _arm(self, name: str) -> Arm:
        return next(a for a in self._built.lockstep.arms if a.name == name)

    def _blown_up(self) -> bool:
        self._built.lockstep.flush()
        return self._arm(_PAIR[0]).blown_up_at is not None

    def _is_bad(self, rows: list[Row]) -> bool:
        return leaves_its_controls(rows, self._found)

    def _batches(self, step: int) -> list[Batch]:
        return [self._built.batches.batch(step + k) for k in range(self._updates + 1)]

    def _pair(self, step: int, reference: Arm, candidate: Arm) -> Pair:
        return pair_at(self._built.pair, reference, candidate.module, step)

    def _window(self, step: int, reference: Arm, candidate: Arm) -> list[Row]:
        pair = self._pair(step, reference, candidate)
        return local_rows(pair, self._batches(step), step, float64=self._found.float64)

    def _keep(self, step: int) -> None:
        self._kept = step, [_twin(self._arm(name), self._built.pair, self._settings) for name in _PAIR]

    def _look(self, bad: int) -> Finding:
        """At the first step from which on a window is bad, by bisection since the last that was good."""
        first, arms = bad, [self._arm(name) for name in _PAIR]
        if self._kept is not None:
            first, arms = self._first_bad(bad, arms)
        rows = self._window(first, *arms)
        found = look_on_the_spot(self._pair(first, *arms), self._batches(first), first, rows, self._found)
        since = "" if self._good is None else f"; the window from step {self._good} stays with its controls"
        if self._kept and first == self._kept[0]:
            since += f", and from there to step {first}, where the seed was resumed, nobody looked"
        return found.adding(since)

    def _first_bad(self, bad: int, at_bad: list[Arm]) -> tuple[int, list[Arm]]:
        """The first window that leaves its controls, and the float32 pair before its first step."""
        good, arms = self._kept
        if good == bad or (good != self._good and self._is_bad(self._window(good, *arms))):
            return good, arms  # resumed behind the step at which it set in
        while bad - good > 1:
            middle = (good + bad) // 2
            trained = self._trained(arms, good, middle)
            if self._is_bad(self._window(middle, *trained)):
                bad, at_bad = middle, trained
            else:
                good, arms = middle, trained
        return bad, at_bad

    def _trained(self, arms: list[Arm], start: int, stop: int) -> list[Arm]:
        """Copies of the pair, trained and evaluated from ``start`` to ``stop`` as this seed does."""
        twins = [_twin(arm, self._built.pair, self._settings) for arm in arms]
        mine = self._built.lockstep
        lockstep = Lockstep(twins, mine.loss, mine.seed, logged=lambda step: False, call=mine.call)
        for _ in walked(lockstep, self._built.batches, self._settings, start, stop):
            pass
        return twins


def walked(
    lockstep: Lockstep, batches: Batches, settings: DictConfig, start: int, stop: int
) -> Iterator[int]:
    """Trains and evaluates as a seed does; before each step from ``start`` to ``stop`` its number."""
    for step in range(start, stop + 1):
        yield step
        if step == stop:
            return
        if is_evaluated(step, settings.eval_every):  # a network may keep something of an evaluation
            tested = batches.test_batches(settings.eval_images, batches.batch_size)
            lockstep.evaluate(step, list(tested))
        lockstep.forward_backward(step, *batches.batch(step))
        lockstep.update(step)


def _why_not(built: Built, found: Examined) -> str:
    if built.pair is None or not {*_PAIR} <= {arm.name for arm in built.lockstep.arms}:
        return "there is no pair in float32 to follow"
    if settled_by(found.findings):
        return "the probes have settled it before any update"
    back = no_way_back(built.pair.fold, built.pair.candidate)
    return f"the candidate cannot be put where the reference is: {back}" if back else ""


def _twin(arm: Arm, pair: Pair, settings: DictConfig) -> Arm:
    """The arm as it stands, to be trained apart from it."""
    optimizer = pair.candidate_optimizer if arm.role == "candidate" else pair.optimizer
    moved = {"fold": arm.fold, "scheduler": make_scheduler(settings), "clip": arm.clip}
    twin = make_arm(arm.role, arm.dtype, arm.module, optimizer, arm.horizon, **moved)
    twin.optimizer.load_state_dict(copy.deepcopy(arm.optimizer.state_dict()))
    if arm.scheduler is not None:
        twin.scheduler.load_state_dict(copy.deepcopy(arm.scheduler.state_dict()))
    return twin


def _logged(rows: list[Row]) -> dict[str, float]:
    """``local/<kind>/<arm>``: distances at its end; ``local/growth/<arm>``: of weights, an update."""
    last = {f"local/{c}": v for c, v in rows[-1].items() if "distance" in c}
    arms = (c.partition("/")[2] for c in rows[-1] if c.startswith("weight_distance/"))
    grown = {f"local/growth/{arm}": growth(rows, f"weight_distance/{arm}") for arm in arms}
    return last | {c: v for c, v in grown.items() if v is not None}
