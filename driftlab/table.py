"""A diagnosis as text: the sentence first, then every question with its numbers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from driftlab.diagnosis import Diagnosis

WIDTH = 110


def as_table(diagnosis: Diagnosis) -> str:
    """Plain text, ``WIDTH`` columns wide."""
    table = Table("asked", "measured", "threshold", "for", "reading", box=box.SIMPLE_HEAD, pad_edge=False)
    for e in diagnosis.evidence:
        table.add_row(e.probe, number(e.measured), number(e.threshold), e.supports or "", e.reading)
    text = io.StringIO()
    console = Console(file=text, width=WIDTH, no_color=True, highlight=False, markup=False, emoji=False)
    console.print(f"{diagnosis.verdict}: {diagnosis.headline}", soft_wrap=True)
    if diagnosis.where:
        console.print(f"place: {diagnosis.where}")
    console.print(table)
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines())


def number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.3g}"
