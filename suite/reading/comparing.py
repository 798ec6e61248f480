"""Two stored experiments side by side: a page, and the same on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from driftlab.report import compare_tables
from driftlab.report.compare import Side, environment, sentence, settings, write_comparison
from driftlab.report.compare_tables import Asked, Pair
from driftlab.report.tables import MISSING, number
from driftlab.words import Evidence, counted
from suite.command.errors import ConfigurationError, one_line
from suite.command.seeds import format_seeds
from suite.command.written import title
from suite.reading.archive import find_runs, read_judged
from suite.showing.tables import COLOURS, plain, print_whole
from suite.showing.tables import printable as shown
from suite.showing.terminal import Terminal


def compare(a: str, b: str, out: Path | None) -> None:
    """Write ``compare.html`` into ``out``, by default the folder of ``a``, and print what it says.

    Raises:
        ConfigurationError: one of the two is no single experiment with a finished seed, or ``out`` cannot be
            written.
    """
    terminal = Terminal()
    folders = [_one_run(given) for given in (a, b)]
    to = out or folders[0]
    try:
        pair = tuple(_side(label, folder, terminal) for label, folder in zip("AB", folders, strict=True))
        page = write_comparison(to, pair)
    except ConfigurationError:
        raise
    except OSError as error:
        raise ConfigurationError(f"{to} cannot be written ({one_line(error)}): write --out FOLDER") from None
    except Exception as error:  # a stranger's files are no reason for a traceback
        raise ConfigurationError(f"{a} and {b} cannot be compared: {one_line(error)}") from None
    _show(terminal.console, pair)
    terminal.console.print(f"[dim]page[/dim]  {shown(str(page))}", soft_wrap=True)


def _one_run(given: str) -> Path:
    runs = find_runs([given])
    if len(runs) > 1:
        raise ConfigurationError(
            f"{given} holds {len(runs)} experiments: write one of them, such as {runs[0]}"
        )
    return runs[0]


def _side(label: str, folder: Path, terminal: Terminal) -> Side:
    run = read_judged(folder, terminal.say)
    if run is None:
        raise ConfigurationError(f"{folder} holds no finished seed: run its command first")
    asked = OmegaConf.to_container(run.settings)
    return Side(label, title(run.settings), run.digest, asked, run.records, run.judgement)


def _show(console: Console, pair: Pair) -> None:
    print_whole(console, _verdicts(pair))
    console.print(f"\n[bold]{shown(sentence(pair))}[/bold]\n")
    for drawn in (_evidence(compare_tables.evidence(pair)), _drift(pair), _outcomes(pair)):
        if drawn.row_count:
            print_whole(console, drawn)
            console.print()
    for heading, rows in (
        ("settings that differ", settings(pair)),
        ("environment that differs", environment(pair)),
    ):
        drawn = _titled(heading, ("", "A", "B"))
        for row in rows:
            drawn.add_row(*map(shown, row))
        if rows:
            print_whole(console, drawn)
        else:
            console.print(f"[dim]{heading}: none[/dim]")
        console.print()


def _titled(title: str, columns: Iterable[str]) -> Table:
    drawn = plain(title)
    for column in columns:
        drawn.add_column(column, overflow="fold")
    return drawn


def _verdicts(pair: Pair) -> Table:
    drawn = plain()
    for column in ("", "experiment", "digest", "seeds", "verdict", "headline, place"):
        drawn.add_column(column, overflow="fold", no_wrap=column in ("digest", "verdict"))
    for side in pair:
        found = side.judgement
        said = f"{found.headline}; place: {found.where}" if found.where else found.headline
        word = f"[{COLOURS[found.verdict]}]{found.verdict}[/]"
        seeds = format_seeds([r.seed for r in side.records])
        drawn.add_row(side.label, shown(side.experiment), shown(side.digest), seeds, word, shown(said))
    return drawn


def _evidence(asked: Sequence[Asked]) -> Table:
    drawn = _titled("evidence: measured (threshold)", ("probe", "A", "B", "differs"))
    for one in asked:
        cells = [_measured(e) for e in one.found]
        differs = shown(one.differs)
        drawn.add_row(shown(one.probe), *cells, f"[red]≠ {differs}[/red]" if one.marked else differs)
    return drawn


def _measured(found: Evidence | None) -> str:
    if found is None:
        return MISSING
    limit = "" if found.threshold is None else f" ({number(found.threshold)})"
    speaks = f"\n[{COLOURS[found.supports]}]{found.supports}[/]" if found.supports else ""
    return f"{number(found.measured)}{limit}{speaks}"


def _drift(pair: Pair) -> Table:
    drawn = _titled(
        "drift: final weight distance (relative), first sign flip (step)",
        ("arm", "A", "B", "A flips", "B flips"),
    )
    for row in compare_tables.drift(pair):
        drawn.add_row(shown(row["arm"]), *map(shown, (*row["weight_distance"], *row["first_flip"])))
    return drawn


def _outcomes(pair: Pair) -> Table:
    seeds = counted(len(compare_tables.common_seeds(pair)), "seed")
    title = f"outcomes: median (range over seeds); paired over the {seeds} of both"
    drawn = _titled(title, ("", "A", "B", "B - A, paired"))
    arm = None
    for row in compare_tables.outcomes(pair):
        if row["arm"] != arm:
            arm = row["arm"]
            drawn.add_row(f"[bold]{shown(arm)}[/bold]")
        drawn.add_row(*map(shown, (row["quantity"], *row["sides"], row["paired"])))
    return drawn
