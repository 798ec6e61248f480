"""What the person at the terminal sees: the plan, the progress, the table over seeds and the verdict."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
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

from driftlab.verdict import Judgement, Verdict

COLOURS = {
    Verdict.BIT_IDENTICAL: "green",
    Verdict.ROUND_OFF: "green",
    Verdict.REDUCED_PRECISION: "yellow",
    Verdict.UNSTABLE: "yellow",
    Verdict.BUG: "red",
    Verdict.NONDETERMINISTIC: "magenta",
    Verdict.INCONCLUSIVE: "cyan",
}


class Terminal:
    """Rich where there is a terminal; in a log file plain lines, one a seed instead of a bar."""

    def __init__(self, console: Console | None = None):
        self.console = console or Console(soft_wrap=False, highlight=False)
        self._progress: Progress | None = None
        self._task, self._done_steps, self._steps = None, 0, 0
        self._last_drawn = 0.0

    def say(self, text: str) -> None:
        self.console.print(escape(text))

    def plan(self, title: str, lines: Mapping[str, str]) -> None:
        table = Table.grid(padding=(0, 2))
        for name, text in lines.items():
            table.add_row(f"[bold]{name}[/bold]", escape(text))
        self.console.print(Panel(table, title=escape(title), title_align="left", border_style="dim"))

    @contextmanager
    def progress(self, seeds: Sequence[int], steps: int):
        """A bar over all steps of all seeds, on a terminal only."""
        self._steps, self._done_steps = steps, 0
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

    def step(self, seed: int, step: int, row: Mapping[str, float]) -> None:
        """Show the newest row, at most ten times a second: the bar must not cost what it shows."""
        if self._progress is None or (time.monotonic() - self._last_drawn < 0.1 and step < self._steps):
            return
        self._last_drawn = time.monotonic()
        parts = [f"seed {seed}", f"step {step}/{self._steps}"]
        loss = next((v for k, v in row.items() if k.startswith("loss/reference")), None)
        drift = {k.split("/")[1].split(".")[0]: v for k, v in row.items() if k.startswith("weight_distance/")}
        parts += [f"loss {loss:.3f}"] if loss is not None else []
        parts += [f"drift {drift[r]:.0e}" for r in ("candidate", "control", "reference") if r in drift][:1]
        self._progress.update(self._task, completed=self._done_steps + step, description="  ".join(parts))

    def seed_done(self, seed: int, record: Mapping) -> None:
        self._done_steps += self._steps
        blown = [
            f"{n} blew up at step {a['blown_up_at']}"
            for n, a in record["arms"].items()
            if a["blown_up_at"] is not None
        ]
        text = f"seed {seed}: {', '.join(blown) or 'all arms finished'} ({record['times']['seconds']:.0f} s)"
        self.say(text)

    def verdict(
        self, judgement: Judgement, expected: str | None, seeds: Table, files: Mapping[str, str]
    ) -> None:
        """The table over seeds, what evidence there is, the verdict, and where the files are."""
        self.console.print(seeds)
        evidence = Table(
            title="evidence", title_justify="left", box=None, padding=(0, 2, 0, 0), header_style="dim"
        )
        for column in ("probe", "measured", "threshold", "speaks for"):
            evidence.add_column(column, no_wrap=column != "probe")
        evidence.add_column("reading", ratio=1)
        for e in (e for e in judgement.evidence if e.measured is not None):
            evidence.add_row(
                e.probe, number(e.measured), number(e.threshold), e.supports or "", escape(e.reading)
            )
        self.console.print(evidence)
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
            self.console.print(f"[dim]{name:<9}[/dim] {escape(path)}", soft_wrap=True)


def number(value: float | None) -> str:
    """A number as a person reads it: three digits, empty where there is none."""
    if value is None:
        return ""
    return f"{value:.3g}"
