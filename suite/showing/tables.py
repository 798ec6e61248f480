"""The tables on a terminal or in a log file: seeds, experiments, evidence, answers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table

from driftlab.record.seed_record import SeedRecord
from driftlab.report.sections import Shown
from driftlab.report.tables import Notable
from driftlab.rounding import UNIT_ROUND_OFF
from driftlab.verdict.evidence import first_flip
from driftlab.verdict.in_16_bits import precisions_in_16_bits
from driftlab.words import Evidence, Verdict
from suite.command.seeds import format_seeds
from suite.command.written import title
from suite.showing.wording import last

if TYPE_CHECKING:
    from suite.reading.judging import Judged

HEADING_WIDTH = 14
COLOURS = {
    Verdict.BIT_IDENTICAL: "green",
    Verdict.ROUND_OFF: "green",
    Verdict.REDUCED_PRECISION: "yellow",
    Verdict.UNSTABLE: "yellow",
    Verdict.BUG: "red",
    Verdict.NONDETERMINISTIC: "magenta",
    Verdict.INCONCLUSIVE: "cyan",
}
SHORT = {"reference": "ref", "candidate": "cand", "control": "ctrl"}


def plain(title: str | None = None, gap: int = 2) -> Table:
    """Columns ``gap`` apart and nothing else."""
    return Table(title=title, title_justify="left", box=None, padding=(0, gap, 0, 0), header_style="dim")


def seeds_table(records: list[SeedRecord], few: Notable | None = None) -> Table:
    """A row a seed: losses at the end, drift at the end, and where the first pre-activation flipped."""
    title = "seeds" if few is None else f"seeds: {few.sentence}"
    table = plain(title, gap=1)
    arms = {arm: record["against"] for arm, record in records[0].run["arms"].items()} if records else {}
    narrow = [a for a in arms if a.endswith("float32")]
    drifting = [a for a, against in arms.items() if against and a.partition(".")[2] in UNIT_ROUND_OFF]
    table.add_column("seed", justify="right")
    for kind, names in (("loss", narrow), ("drift", drifting)):
        for arm in names:
            role, dtype = arm.split(".")
            heading = f"{kind}\n{SHORT[role]}{dtype.removeprefix('float')}"
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("first\nflip", justify="right")
    for record in records:
        losses = [_final_loss(record, a) for a in narrow]
        drifts = [_small(last(record.series("weight_distance", a))) for a in drifting]
        table.add_row(str(record.seed), *losses, *drifts, _flip(record))
    return table


def table_in_16_bits(records: list[SeedRecord]) -> Table | None:
    """A row for each seed and precision of 16 bits, where there are any: losses and drift at the end."""
    dtypes = precisions_in_16_bits(records[0], "reference") if records else []
    if not dtypes:
        return None
    roles = [role for role in SHORT if f"{role}.{dtypes[0]}" in records[0].arms]
    table = plain("in 16 bits: drift of the reference is from float32", gap=1)
    for name in ("seed", "precision", *(f"{kind}\n{SHORT[r]}" for kind in ("loss", "drift") for r in roles)):
        table.add_column(name, justify="left" if name == "precision" else "right", no_wrap=True)
    table.add_column("updates\nskipped", justify="right")
    for record, dtype in product(records, dtypes):
        arms = [f"{role}.{dtype}" for role in roles]
        losses = [_final_loss(record, a) for a in arms]
        drifts = [_small(last(record.series("weight_distance", a))) for a in arms]
        skipped = [last(record.series("skipped_updates", a)) for a in arms]
        counts = " ".join(f"{count:.0f}" for count in skipped if count is not None)
        table.add_row(str(record.seed), dtype, *losses, *drifts, counts)
    return table


def _small(value: float | None) -> str:
    return "" if value is None else f"{value:.0e}" if value else "0"


def _final_loss(record: SeedRecord, arm: str) -> str:
    blown = record.run["arms"][arm]["blown_up_at"]
    return f"nan@{blown}" if blown is not None else number(last(record.series("loss", arm)))


def _flip(record: SeedRecord) -> str:
    arm = "candidate.float32" if "candidate.float32" in record.arms else "control.float32"
    step = first_flip(record, arm)
    return "none" if step is None else str(step)


def runs_table(runs: Iterable[Judged], unfinished: Iterable[Path] = ()) -> Table:
    """A line an experiment: its digest, seeds, verdict and headline; those without a finished seed say so."""
    drawn = plain()
    drawn.add_column("experiment", overflow="fold")
    drawn.add_column("digest", no_wrap=True)
    drawn.add_column("seeds", overflow="fold")
    drawn.add_column("verdict", no_wrap=True)
    drawn.add_column("headline", ratio=1)
    for run in runs:
        word = f"[{COLOURS[run.judgement.verdict]}]{run.judgement.verdict}[/]"
        name, digest = printable(title(run.settings)), printable(run.digest)
        seeds = format_seeds(run.seeds) + (f", {run.unfinished} unfinished" if run.unfinished else "")
        drawn.add_row(name, digest, seeds, word, printable(run.judgement.headline))
    for folder in unfinished:
        said = "no seed has finished: run its command again"
        drawn.add_row(printable(folder.parent.name), printable(folder.name), "none", "", said)
    return drawn


def printable(text: str) -> str:
    """Text from a file for rich: neither markup nor a terminal's control sequences work in it."""
    return escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def evidence_table(evidence: Sequence[Evidence]) -> Table:
    """A row a probe."""
    table = plain("evidence")
    for column in ("probe", "measured", "threshold", "speaks for"):
        table.add_column(column, no_wrap=column != "probe")
    table.add_column("reading", ratio=1)
    for e in evidence:
        table.add_row(e.probe, number(e.measured), number(e.threshold), e.supports or "", escape(e.text))
    return table


def side_by_side(table: Shown) -> Table:
    """Headings are broken between words, cells never."""
    drawn = plain()
    for heading, numeric in zip(table.headings, table.numeric, strict=True):
        lines = "\n".join(wrap(heading, HEADING_WIDTH, break_long_words=False))
        drawn.add_column(
            escape(lines), justify="right" if numeric else "left", vertical="bottom", no_wrap=True
        )
    for row in table.rows:
        drawn.add_row(*map(escape, row))
    return drawn


def stacked(table: Shown) -> Table:
    """For a narrow terminal: a line a cell, its heading before it."""
    drawn = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    drawn.add_column(style="dim")
    drawn.add_column()
    for row in table.rows:
        for heading, text in zip(table.headings, row, strict=True):
            drawn.add_row(escape(heading), escape(text))
        drawn.add_row("", "")
    return drawn


def print_whole(console: Console, drawn: Table, narrow: Table | None = None) -> None:
    """As wide as the terminal, ``narrow`` where it does not fit; a log file is as wide as it has to be."""
    width = Measurement.get(console, console.options.update(width=10_000), drawn).maximum
    if console.is_terminal:
        console.print(narrow if narrow is not None and width > console.width else drawn)
    else:
        Console(file=console.file, width=max(width, console.width), highlight=False).print(drawn)


def number(value: float | None) -> str:
    """A number as a person reads it: three digits, empty where there is none."""
    return "" if value is None else f"{value:.3g}"
