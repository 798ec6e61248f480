"""A diagnosis as text: the sentence first, then every question with its numbers."""

from __future__ import annotations

import io
import random
from typing import TYPE_CHECKING

from driftlab.words import Judgement

if TYPE_CHECKING:
    from rich.console import Console

WIDTH = 110


def as_table(judgement: Judgement) -> str:
    """Plain text, ``WIDTH`` columns wide."""
    return "\n".join(line.rstrip() for line in _printed(judgement).export_text().splitlines())


def as_html(judgement: Judgement) -> str:
    """For a notebook's cell: the same lines."""
    return _printed(judgement).export_html(inline_styles=True, code_format="<pre>{code}</pre>")


def _printed(judgement: Judgement) -> Console:
    state = random.getstate()  # rich draws as it is imported
    try:
        return _recorded(judgement)
    finally:
        random.setstate(state)


def _recorded(judgement: Judgement) -> Console:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table("asked", "measured", "threshold", "for", "reading", box=box.SIMPLE_HEAD, pad_edge=False)
    for e in judgement.evidence:
        table.add_row(e.probe, number(e.measured), number(e.threshold), e.supports or "", e.text)
    console = Console(
        file=io.StringIO(),
        width=WIDTH,
        record=True,
        no_color=True,
        highlight=False,
        markup=False,
        emoji=False,
    )
    console.print(f"{judgement.verdict}: {judgement.headline}", soft_wrap=True)
    if judgement.where:
        console.print(f"place: {judgement.where}")
    console.print(table)
    return console


def number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.3g}"
