"""Tables and figures of an answer, as the page, files and a terminal take them."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass

from markupsafe import Markup

from driftlab.report.sections import Figure, Look, Table
from driftlab.report.tables import MISSING, number

# On paper: dark on white, the hues apart in lightness too (after Okabe and Ito).
PAPER = Look("#1b1d21", "#e4e7ec", ("#c8500a", "#0a72b8", "#10704a", "#8a5a00", "#6b3fa0", "#22252a"))
DOTS_PER_INCH = 200


@dataclass(frozen=True)
class Shown:
    """A table as text, cell by cell, and which columns hold numbers; keys as in ``Table``."""

    name: str
    title: str
    headings: list[str]
    rows: list[list[str]]
    numeric: list[bool]
    conclusion: str
    left_out: int = 0


def shown(table: Table, most: int | None = None) -> Shown:
    """As text; of more than ``most`` rows the first, and how many are ``left_out``."""
    keys = list(table.columns)
    numeric = [all(_is_number(row.get(k)) for row in table.rows) for k in keys]
    rows = [[cell(row.get(k)) for k in keys] for row in table.rows[:most]]
    headings, left_out = list(table.columns.values()), len(table.rows) - len(rows)
    return Shown(table.name, table.title, headings, rows, numeric, table.conclusion, left_out)


def _is_number(value: object) -> bool:
    """Also one that was written out, with digits of its own."""
    if isinstance(value, str):
        return value.replace(".", "").removeprefix("-").isdigit()
    return value is None or not isinstance(value, bool)


def cell(value: object) -> str:
    """Text for a reader: three digits of a measured number, thousands apart in a count."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return number(value) if value else "0"
    return MISSING if value is None else str(value)


def as_csv(table: Table) -> str:
    """The numbers as they are: ``repr`` reads back to the same float; None is an empty cell."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(table.columns.values())
    for row in table.rows:
        rows.writerow(["" if (v := row.get(k)) is None else v for k in table.columns])
    return text.getvalue()


def in_page(figure: Figure) -> Markup:
    """An ``<svg>`` in the colours of the page."""
    from driftlab.report import svg

    look = Look(svg.INK, svg.GRID, svg.SERIES)
    with svg.style(figure.name):
        canvas = svg.new_figure(figure.aspect * svg.WIDTH)
        figure.draw(canvas, look)
        return svg.inline_svg(canvas, figure.name, figure.title)


def as_files(figure: Figure) -> dict[str, bytes]:
    """Suffix -> content: the figure on white, as SVG and as PNG."""
    from driftlab.report import svg

    files = {}
    with svg.style(figure.name), svg.on_paper(PAPER):
        canvas = svg.new_figure(figure.aspect * svg.WIDTH)
        canvas.set_facecolor("white")
        figure.draw(canvas, PAPER)
        for suffix, metadata in (("svg", {"Date": None, "Creator": None}), ("png", {"Software": None})):
            file = io.BytesIO()
            canvas.savefig(file, format=suffix, dpi=DOTS_PER_INCH, metadata=metadata)
            files[suffix] = file.getvalue()
    return files
