"""What an experiment has to show beside its verdict: tables with a conclusion, figures with a caption."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
