"""What a seed leaves on disk while it trains, and how it is picked up again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from driftlab.lockstep.checkpoint import read_checkpoint, save_checkpoint
from driftlab.lockstep.loop import Lockstep
from driftlab.record.differing import elsewhere
from driftlab.record.environment import environment
from driftlab.record.seed_record import (
    CURVES,
    EVALUATIONS,
    LOCAL,
    RecordError,
    Row,
    columns,
    local_columns,
    read_local,
    read_table,
    table_sha256,
    write_table,
)
from suite.data.batches import Batches
from suite.running.pace import Pace
from suite.running.spent import Spent
from suite.showing.loggers import MetricsLogger

if TYPE_CHECKING:
    from suite.running.local_windows import LocalWindows

TABLES = {"curves.csv": CURVES, "evaluations.csv": EVALUATIONS}


def is_evaluated(step: int, every: int) -> bool:
    """Whether the test set is looked at before a step that ends no arm."""
    return every > 0 and step > 0 and step % every == 0


class Recorder:
    """Evaluates, checkpoints and logs between the steps of a lockstep run.

    Args:
        home: the folder of this seed.
        eval_every: steps between evaluations, 0 for none but at the end of each arm.
        checkpoint_every: seconds, or ``auto``: by what they cost.
        progress: called after every step with the step and the newest row.
        spent: is told what evaluations, local windows and files take.
        still_owner: asked before every checkpoint; raises where another process works on this seed by now.

    Attributes:
        files: the SHA-256 of each table as it was last written.
        parts: the environments in which the steps were made, each with the step that it began ``from``: one,
            unless the run was resumed elsewhere.
    """

    def __init__(
        self,
        lockstep: Lockstep,
        batches: Batches,
        logger: MetricsLogger,
        home: Path,
        *,
        eval_every: int,
        eval_images: int | None,
        checkpoint_every: float | str,
        progress: Callable[[int, Row], None],
        still_owner: Callable[[], None] = lambda: None,
        spent: Spent | None = None,
    ):
        self.lockstep, self.batches, self.logger, self.home = lockstep, batches, logger, home
        self.eval_every, self.eval_images = eval_every, eval_images
        self.pace, self.progress = Pace(checkpoint_every), progress
        self.still_owner, self._spent = still_owner, spent or Spent()
        self.evaluations: dict[int, dict[str, float]] = {}
        self.files: dict[str, str] = {}
        self.parts = [{"from": 0, "environment": environment(batches.device)}]
        self._local: LocalWindows | None = None
        self._local_stored: tuple[int, list[Row], dict] | None = None
        self._last_logged = -1

    def follow(self, local: LocalWindows) -> None:
        """Takes these local windows between the steps, from where the checkpoint stands."""
        self._local = local
        if self._local_stored is not None:
            local.resume(*self._local_stored)

    def resume(self) -> int:
        """Restore arms and rows; the step to go on with. Raises RecordError where they are damaged."""
        checkpoint = read_checkpoint(self.home / "checkpoint")
        if checkpoint is None:
            return 0
        checkpoint.restore(self.lockstep)
        step, notes = checkpoint.next_step, checkpoint.notes
        # the tables may be newer than the checkpoint: a crash came between the two
        stored = {name: read_table(self.home / name) for name in TABLES}
        self.lockstep.rows, self.evaluations = (
            {int(r["step"]): r for r in table if r["step"] < step} for table in stored.values()
        )
        expected = [s for s in range(step) if self.lockstep.is_logged(s)]
        if list(self.lockstep.rows) != expected:
            raise RecordError(f"{self.home / 'curves.csv'} is damaged: rows before step {step} are missing")
        self._resume_local(step, notes)
        for name, _, rows in self._tables():
            # in the columns that it has: a curve may have been declared since
            if table_sha256(stored[name].header, rows) != notes["files"][name]:
                raise RecordError(f"{self.home / name} is damaged: it is not what the checkpoint says")
        here = self.parts[0]["environment"]
        self.parts = list(notes["parts"])
        if elsewhere(self.parts[-1]["environment"], here):
            self.parts.append({"from": step, "environment": here})
        return step

    def _resume_local(self, step: int, notes: dict) -> None:
        """Of the windows that began before ``step``; a checkpoint without any goes on without those."""
        rows: list[Row] = []
        if LOCAL in notes["files"]:
            stored = read_local(self.home / LOCAL)
            rows = [row for row in stored if row["step"] - row["updates"] < step]
            if table_sha256(stored.header, rows) != notes["files"][LOCAL]:
                raise RecordError(f"{self.home / LOCAL} is damaged: it is not what the checkpoint says")
        self._local_stored = step, rows, notes.get("local", {})

    def before_step(self, step: int) -> None:
        """Evaluate and follow the pair from here where it is time to."""
        if step in {arm.horizon for arm in self.lockstep.arms} or is_evaluated(step, self.eval_every):
            self.evaluate(step)
        if self._local:
            with self._spent.on("local windows"):
                self._local.before_step(step)

    def after_step(self, step: int) -> None:
        """Log, show and store where it is time to."""
        self.show(step)
        if self.pace.is_due():
            self.checkpoint(step + 1)

    def show(self, step: int) -> None:
        """To the logger and the terminal."""
        rows = self.lockstep.rows
        self.log_new_rows()
        self.progress(step + 1, rows[max(rows)] if rows else {})

    def checkpoint(self, next_step: int) -> None:
        """The tables first: a checkpoint must never be ahead of the rows that lead to it."""
        self.lockstep.flush()  # waits for a GPU: no cost of what follows
        with self._spent.on("files"), self.pace.writing():
            self.still_owner()
            self.write_tables()
            notes = {"files": self.files, "parts": self.parts}
            notes |= {"local": self._local.notes} if self._local else {}
            save_checkpoint(self.lockstep, next_step, self.home / "checkpoint", notes)

    def write_tables(self) -> None:
        self.files = {name: write_table(self.home / name, *table) for name, *table in self._tables()}
        if self._local and (rows := self._local.rows):
            arms = dict.fromkeys(c.partition("/")[2] for row in rows for c in row if "/" in c)
            full = [{"epoch": self.batches.epoch(int(row["step"])), **row} for row in rows]
            self.files[LOCAL] = write_table(self.home / LOCAL, local_columns(arms), full)

    def _tables(self) -> Iterator[tuple[str, list[str], Iterable[Row]]]:
        """Name, columns and rows of each."""
        arms = [arm.name for arm in self.lockstep.arms]
        for name, rows in zip(TABLES, (self.lockstep.rows, self.evaluations), strict=True):
            full = ({"step": s, "epoch": self.batches.epoch(s), **rows[s]} for s in sorted(rows))
            yield name, columns(TABLES[name], arms), full

    def log_new_rows(self) -> None:
        rows, local = self.lockstep.rows, self._local.logged if self._local else {}
        known = max(rows, default=-1)  # a GPU tells of its rows late
        for step in sorted(s for s in {*rows, *local} if self._last_logged < s <= known):
            row = {"epoch": self.batches.epoch(step), **rows.get(step, {}), **local.get(step, {})}
            self.logger.log(step, row | self.evaluations.get(step, {}))
            self._last_logged = step

    def evaluate(self, step: int) -> None:
        """Test accuracy of the living arms; disagreement and distances from their against, in eval mode."""
        with self._spent.on("evaluations"):
            tested = list(self.batches.test_batches(self.eval_images, self.batches.batch_size))
            self.evaluations[step] = self.lockstep.evaluate(step, tested)


class Recorders:
    """The recorders of several experiments that train together, as one: they store the same steps."""

    def __init__(self, recorders: Sequence[Recorder]):
        self._all = list(recorders)

    def before_step(self, step: int) -> None:
        for each in self._all:
            each.before_step(step)

    def after_step(self, step: int) -> None:
        for each in self._all:
            each.show(step)
        if self._all[0].pace.is_due():
            self.checkpoint(step + 1)

    def checkpoint(self, next_step: int) -> None:
        with self._all[0].pace.writing():
            for each in self._all:
                each.checkpoint(next_step)

    def evaluate(self, step: int) -> None:
        for each in self._all:
            each.evaluate(step)

    def log_new_rows(self) -> None:
        for each in self._all:
            each.log_new_rows()

    def write_tables(self) -> None:
        for each in self._all:
            each.write_tables()
