"""Stored runs on a terminal, or in a log: a line an experiment."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.markup import escape
from rich.progress import track
from rich.table import Table

from experiments.errors import ConfigurationError, one_line
from experiments.rejudging import Stored, find_runs, rejudge
from experiments.seeds import format_seeds
from experiments.terminal import COLOURS, Terminal, print_whole


def runs_table(runs: Iterable[Stored], unfinished: Iterable[Path] = ()) -> Table:
    """A line an experiment: its digest, seeds, verdict and headline; those without a finished seed say so."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    drawn.add_column("experiment", overflow="fold")
    drawn.add_column("digest", no_wrap=True)
    drawn.add_column("seeds", overflow="fold")
    drawn.add_column("verdict", no_wrap=True)
    drawn.add_column("headline", ratio=1)
    for run in runs:
        word = f"[{COLOURS[run.judgement.verdict]}]{run.judgement.verdict}[/]"
        name, digest = shown(run.settings.name), shown(run.digest)
        seeds = format_seeds(run.seeds) + (f", {run.unfinished} unfinished" if run.unfinished else "")
        drawn.add_row(name, digest, seeds, word, shown(run.judgement.headline))
    for folder in unfinished:
        said = "no seed has finished: run its command again"
        drawn.add_row(shown(folder.parent.name), shown(folder.name), "none", "", said)
    return drawn


def shown(text: str) -> str:
    """Text from a file for rich: neither markup nor a terminal's control sequences work in it."""
    return escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def _judged(folder: Path, terminal: Terminal) -> Stored | None:
    run = rejudge(folder, terminal)
    return run.summary() if run else None


def judge_all(given: Sequence[str], fail_on: Sequence[str]) -> int:
    """Judge every experiment at or below ``given`` and print a line each; returns the exit status.

    What cannot be judged is said on stderr, and the others are judged all the same.

    Raises:
        ConfigurationError: there is no experiment at or below one of them.
    """
    terminal, folders = Terminal(), find_runs(given)
    judged, unfinished, refused = [], [], []
    in_a_log = not terminal.console.is_terminal
    for folder in track(folders, "judging", console=terminal.console, transient=True, disable=in_a_log):
        try:
            run = _judged(folder, terminal)
        except ConfigurationError as error:
            refused.append(str(error))
        except Exception as error:  # one run of a sweep, maybe a stranger's, must not stop the others
            refused.append(f"{folder} cannot be judged: {one_line(error)}")
        else:
            judged += [run] if run else []
            unfinished += [] if run else [folder]
    if judged or unfinished:
        print_whole(terminal.console, runs_table(judged, unfinished))
    if not judged and not refused:
        refused.append("no seed has finished in any of them: nothing was judged")
    for line in refused:
        print(f"error: {line}", file=sys.stderr)
    return 2 if refused else 3 if any(run.judgement.verdict in fail_on for run in judged) else 0
