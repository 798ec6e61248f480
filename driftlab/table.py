"""A diagnosis as text: the sentence first, then every question with its numbers."""

from __future__ import annotations

import io
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from driftlab.words import Evidence, Place, Verdict

WIDTH = 110


def as_table(verdict: Verdict, headline: str, where: Place | None, evidence: Sequence[Evidence]) -> str:
    """Plain text, ``WIDTH`` columns wide."""
    table = Table("asked", "measured", "threshold", "for", "reading", box=box.SIMPLE_HEAD, pad_edge=False)
    for e in evidence:
        table.add_row(e.probe, number(e.measured), number(e.threshold), e.supports or "", e.text)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(f"{verdict}: {headline}", soft_wrap=True)
    if where:
        console.print(f"place: {where}")
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.3g}"
