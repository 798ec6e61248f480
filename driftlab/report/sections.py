"""What an experiment has to show beside its verdict: tables with a conclusion, figures with a caption.

And both as the page, files and a terminal take them.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from markupsafe import Markup

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas


@dataclass(frozen=True)
class Table:
    """Numbers with their unit or scale, and what they say.

    Attributes:
        name: of its file, ``tables/<name>.csv``.
        title: a few words.
        columns: key -> heading, with unit or scale: "largest difference (absolute)".
        rows: key -> text, number, bool or None (not measured) for each column.
        conclusion: what one should conclude, as sentences with the numbers that say so.
    """

    name: str
    title: str
    columns: Mapping[str, str]
    rows: Sequence[Mapping[str, object]]
    conclusion: str


@dataclass(frozen=True)
class Look:
    """The colours of a figure: one for text and axes, one for the grid, one for each series."""

    ink: str
    grid: str
    series: tuple[str, ...]


@dataclass(frozen=True)
class Figure:
    """A figure that is drawn for the page and, in other colours, for files.

    Attributes:
        name: of its files, ``figures/<name>.svg`` and ``.png``.
        title: a few words; the conclusion of the figure where there is room for one.
        draw: fills an empty canvas, in the colours of a ``Look``.
        caption: what is drawn, n, and what one should see.
        aspect: height over width.
    """

    name: str
    title: str
    draw: Callable[[Canvas, Look], None]
    caption: str
    aspect: float = 0.68


@dataclass(frozen=True)
class Answer:
    """The answer to a question: in a sentence or two, in tables, in figures."""

    sentence: str
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = field(default=())


# On paper: dark on white, the hues apart in lightness too (after Okabe and Ito).
PAPER = Look("#1b1d21", "#e4e7ec", ("#c8500a", "#0a72b8", "#10704a", "#8a5a00", "#6b3fa0", "#22252a"))
DOTS_PER_INCH = 200
MISSING = "—"


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

    with svg.style(figure.name), svg.on_paper(PAPER.ink, PAPER.grid):
        canvas = svg.new_figure(figure.aspect * svg.WIDTH)
        canvas.set_facecolor("white")
        figure.draw(canvas, PAPER)
        return {suffix: svg.as_bytes(canvas, suffix, DOTS_PER_INCH) for suffix in ("svg", "png")}


def number(value: float | None) -> str:
    """Three significant digits; a dash where nothing was measured, a word where it is not finite."""
    if value is None:
        return MISSING
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    return f"{value:.3g}"


def percent(value: float | None) -> str:
    return number(value) if value is None or not math.isfinite(value) else f"{100 * value:.2f} %"
