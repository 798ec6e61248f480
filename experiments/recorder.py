"""What a seed leaves on disk while it trains, and how it is picked up again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from driftlab.checkpoint import read_checkpoint, save_checkpoint
from driftlab.distance import Folded, relative_distance
from driftlab.environment import environment
from driftlab.lockstep import Lockstep
from driftlab.records import (
    CURVES,
    EVALUATIONS,
    RecordError,
    Row,
    columns,
    read_table,
    table_sha256,
    write_table,
)
from experiments.data.batches import Batches
from experiments.loggers import MetricsLogger

TABLES = {"curves.csv": CURVES, "evaluations.csv": EVALUATIONS}


class Recorder:
    """Evaluates, checkpoints and logs between the steps of a lockstep run.

    Args:
        home: the folder of this seed.
        eval_every: steps between evaluations, 0 for none but at the end of each arm.
        checkpoint_every: seconds.
        progress: called after every step with the step and the newest row.
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
        checkpoint_every: float,
        progress: Callable[[int, Row], None],
        still_owner: Callable[[], None] = lambda: None,
    ):
        self.lockstep, self.batches, self.logger, self.home = lockstep, batches, logger, home
        self.eval_every, self.eval_images = eval_every, eval_images
        self.checkpoint_every, self.progress = checkpoint_every, progress
        self.still_owner = still_owner
        self.evaluations: dict[int, dict[str, float]] = {}
        self.files: dict[str, str] = {}
        self.parts = [{"from": 0, "environment": environment(batches.device)}]
        self._last_checkpoint, self._last_logged = time.monotonic(), -1

    def resume(self) -> int:
        """Restore arms and rows; the step to go on with. Raises RecordError where they are damaged."""
        checkpoint = read_checkpoint(self.home / "checkpoint")
        if checkpoint is None:
            return 0
        checkpoint.restore(self.lockstep)
        step, notes = checkpoint.next_step, checkpoint.notes
        # the tables may be newer than the checkpoint: a crash came between the two
        self.lockstep.rows, self.evaluations = (
            {int(r["step"]): r for r in read_table(self.home / name) if r["step"] < step} for name in TABLES
        )
        expected = [s for s in range(step) if self.lockstep.is_logged(s)]
        if list(self.lockstep.rows) != expected:
            raise RecordError(f"{self.home / 'curves.csv'} is damaged: rows before step {step} are missing")
        for name, header, rows in self._tables():
            if table_sha256(header, rows) != notes["files"][name]:
                raise RecordError(f"{self.home / name} is damaged: it is not what the checkpoint says")
        here = self.parts[0]["environment"]
        self.parts = list(notes["parts"])
        if self.parts[-1]["environment"] != here:
            self.parts.append({"from": step, "environment": here})
        return step

    def before_step(self, step: int) -> None:
        """Evaluate where it is time to."""
        ends = {arm.horizon for arm in self.lockstep.arms}
        if step in ends or (self.eval_every and step and step % self.eval_every == 0):
            self.evaluate(step)

    def after_step(self, step: int) -> None:
        """Log, show and store where it is time to."""
        rows = self.lockstep.rows
        self.log_new_rows()
        self.progress(step + 1, rows[max(rows)] if rows else {})
        if time.monotonic() - self._last_checkpoint >= self.checkpoint_every:
            self.checkpoint(step + 1)

    def checkpoint(self, next_step: int) -> None:
        """The tables first: a checkpoint must never be ahead of the rows that lead to it."""
        self.lockstep.flush()
        self.still_owner()
        self.write_tables()
        notes = {"files": self.files, "parts": self.parts}
        save_checkpoint(self.lockstep, next_step, self.home / "checkpoint", notes)
        self._last_checkpoint = time.monotonic()

    def write_tables(self) -> None:
        self.files = {name: write_table(self.home / name, *table) for name, *table in self._tables()}

    def _tables(self) -> Iterator[tuple[str, list[str], Iterable[Row]]]:
        """Name, columns and rows of each."""
        arms = [arm.name for arm in self.lockstep.arms]
        for name, rows in zip(TABLES, (self.lockstep.rows, self.evaluations), strict=True):
            full = ({"step": s, "epoch": self.batches.epoch(s), **rows[s]} for s in sorted(rows))
            yield name, columns(TABLES[name], arms), full

    def log_new_rows(self) -> None:
        for step in [s for s in self.lockstep.rows if s > self._last_logged]:
            row = {"epoch": self.batches.epoch(step), **self.lockstep.rows[step]}
            self.logger.log(step, row | self.evaluations.get(step, {}))
            self._last_logged = step

    def evaluate(self, step: int) -> None:
        """Test accuracy of the living arms; disagreement and distances from their against, in eval mode."""
        self.lockstep.flush()
        images, view, row, seen = (
            list(self.batches.test_batches(self.eval_images, self.batches.batch_size)),
            Folded(self.lockstep.layouts),
            {},
            {},
        )
        for arm in (a for a in self.lockstep.live(step) if a.blown_up_at is None):
            logits, targets = self.lockstep.predictions(arm, images)
            seen[arm.name] = logits
            row[f"test_accuracy/{arm.name}"] = (logits.argmax(1) == targets).double().mean()
            if arm.against is None or arm.against.name not in seen:
                continue
            other = seen[arm.against.name]
            row[f"disagreement/{arm.name}"] = (logits.argmax(1) != other.argmax(1)).double().mean()
            row[f"eval_logit_distance/{arm.name}"] = relative_distance(logits, other)
            row[f"buffer_distance/{arm.name}"] = view.distance(arm, "buffer")
        self.evaluations[step] = {column: float(value) for column, value in row.items() if value is not None}
