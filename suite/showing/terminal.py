"""What the person at the terminal sees: the plan, the progress, the table over seeds and the verdict."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from driftlab.report.sections import Answer, shown
from driftlab.words import Evidence, Judgement
from suite.showing.tables import COLOURS, evidence_table, number, print_whole, side_by_side, stacked

NARROW = 72  # columns: below, the evidence stands in lines instead of a table


class Terminal:
    """Rich where there is a terminal; in a log file plain lines, one a seed instead of a bar."""

    def __init__(self, console: Console | None = None, job: str = ""):
        self.console = console or Console(soft_wrap=False, highlight=False)
        self._job = f"{job}: " if job else ""  # before its lines, where there are several jobs
        self._progress: Progress | None = None
        self._task, self._steps = None, 0
        self._came: dict[int, int] = {}  # seed -> the step that it has come to
        self._last_drawn = 0.0

    def say(self, text: str) -> None:
        # in a file a line stays whole: a path that is broken cannot be copied
        self.console.print(escape(f"{self._job}{text}"), soft_wrap=not self.console.is_terminal)

    def plan(self, title: str, lines: Mapping[str, str], *, in_full: bool = True) -> None:
        """A panel; one line for a job of a sweep, which is one of many."""
        if not in_full:
            takes = f", {lines['takes']}" if "takes" in lines else ""
            self.console.print(escape(f"{title}: seed {lines['seeds']}{takes}"), soft_wrap=True)
            return
        table = Table.grid(padding=(0, 2))
        for name, text in lines.items():
            table.add_row(f"[bold]{name}[/bold]", escape(text))
        self.console.print(Panel(table, title=escape(title), title_align="left", border_style="dim"))

    @contextmanager
    def progress(self, seeds: Sequence[int], steps: int):
        """A bar over all steps of all seeds, on a terminal only."""
        self._steps, self._came = steps, {}
        if not self.console.is_terminal or not seeds:
            yield
            return
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            transient=True,
        )
        with bar:
            self._progress, self._task = bar, bar.add_task("starting", total=steps * len(seeds))
            yield
        self._progress = None

    def doing(self, text: str) -> None:
        """What goes on before the first step, beside the bar; nothing where there is none."""
        if self._progress is not None:
            self._progress.update(self._task, description=escape(text))

    def step(self, seed: int, step: int, row: Mapping[str, float]) -> None:
        """Show the newest row, at most ten times a second: the bar must not cost what it shows."""
        self._came[seed] = step
        if self._progress is None or (time.monotonic() - self._last_drawn < 0.1 and step < self._steps):
            return
        self._last_drawn = time.monotonic()
        parts = [f"seed {seed}", f"step {step}/{self._steps}"]
        loss = next((v for k, v in row.items() if k.startswith("loss/reference")), None)
        drift = {k.split("/")[1].split(".")[0]: v for k, v in row.items() if k.startswith("weight_distance/")}
        parts += [f"loss {loss:.3f}"] if loss is not None else []
        parts += [f"drift {drift[r]:.0e}" for r in ("candidate", "control", "reference") if r in drift][:1]
        self._progress.update(self._task, completed=sum(self._came.values()), description="  ".join(parts))

    def seed_done(self, seed: int, record: Mapping, of: str = "") -> None:
        """``of``: the experiment, where several are at work."""
        self._came[seed] = self._steps
        blown = [
            f"{n} blew up at step {a['blown_up_at']}"
            for n, a in record["arms"].items()
            if a["blown_up_at"] is not None
        ]
        text = f"seed {seed}: {', '.join(blown) or 'all arms finished'} ({record['times']['seconds']:.0f} s)"
        self.say(f"{of}, {text}" if of else text)

    def tables(self, answer: Answer) -> None:
        """The first table, what all of them say, and the answer; the page shows the others too."""
        for place, table in enumerate(map(shown, answer.tables)):
            self.console.print(f"[bold]{escape(table.title)}[/bold]")
            if place == 0:
                print_whole(self.console, side_by_side(table), narrow=stacked(table))
            self.console.print(f"{escape(table.conclusion)}\n", style="italic")
        self.console.print(f"[bold]{escape(answer.sentence)}[/bold]\n")

    def _evidence(self, evidence: Sequence[Evidence]) -> None:
        """A row a probe; in a narrow terminal a line a probe, and its reading beneath."""
        if self.console.width < NARROW:
            for e in evidence:
                found = f"{number(e.measured)} ({number(e.threshold)} allowed)"
                self.console.print(f"[bold]{e.probe}[/bold]  {found}  {e.supports or ''}")
                self.console.print(Padding(escape(e.text), (0, 0, 0, 2)))
            return
        self.console.print(evidence_table(evidence))

    def verdict(
        self, judgement: Judgement, expected: str | None, tables: Iterable[Table], files: Mapping[str, str]
    ) -> None:
        """The tables over seeds, what evidence there is, the verdict, and where the files are."""
        for table in tables:
            self.console.print(table)
        self._evidence([e for e in judgement.evidence if e.measured is not None])
        colour = COLOURS[judgement.verdict]
        more = {"where": judgement.where, "expected": expected}
        lines = "".join(f"\n[bold]{name}[/bold]  {escape(str(text))}" for name, text in more.items() if text)
        self.console.print(
            Panel(
                f"[bold {colour}]{judgement.verdict}[/bold {colour}]  {escape(judgement.headline)}{lines}",
                title="verdict",
                title_align="left",
                border_style=colour,
            )
        )
        for name, path in files.items():
            self.file(name, path)

    def file(self, name: str, path: object) -> None:
        self.console.print(f"[dim]{name:<9}[/dim] {escape(str(path))}", soft_wrap=True)
