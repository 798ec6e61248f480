"""Tables whose cells are numbers, for whoever plots them: ``1.76 (1.08 to 2.19)`` is three columns.

A table for readers says a value with its range, or a count with its n, in one cell. Here each of these
numbers stands in a column of its own, named after the cell's: ``value``, ``low``, ``high``, ``n``, ``p``.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence

_NUMBER = r"[+-]?(?:\d[\d,]*\.?\d*(?:e[+-]?\d+)?|inf)|NaN"
_POWER = rf"(?:2\^)?(?:{_NUMBER})"
# What a cell may look like; the names are those of the columns. A percentage becomes a share.
_FORMS = [
    re.compile(pattern.replace("NUM", _POWER))
    for pattern in (
        r"(?P<value>NUM)",
        r"(?P<value>NUM) \((?P<low>NUM) to (?P<high>NUM)\)",
        r"(?P<value>NUM) of (?P<n>NUM)",
        r"(?P<value>NUM) of (?P<n>NUM) \((?P<low>NUM %) to (?P<high>NUM %)\)",
        r"(?P<low>NUM) to (?P<high>NUM)",
        r"(?P<first>NUM) / (?P<second>NUM)(?: / (?P<third>NUM))?(?: \(p (?:=|<) (?P<p>NUM)\))?",
        r"(?P<text>[a-z_]+) \((?P<value>NUM)(?: of (?P<n>NUM))?\)",
    )
]
_ORDER = ("text", "value", "low", "high", "n", "first", "second", "third", "p")


def numbers_apart(table: str) -> str | None:
    """A table, as CSV, with each number in a column of its own; None where each has one already.

    Digits are those of the cells. A cell of another form stays as it is, under its own heading.
    """
    headings, *rows = csv.reader(io.StringIO(table))
    cells = [[_parts(text) for text in row] for row in rows]
    names = [_names(column) for column in zip(*cells, strict=True)]
    if all(own in ([], ["value"], [""]) for own in names):
        return None
    text = io.StringIO()
    apart = csv.writer(text, lineterminator="\n")
    apart.writerow(_heading(h, n, own) for h, own in zip(headings, names, strict=True) for n in own)
    for row in cells:
        apart.writerow(cell.get(n, "") for cell, own in zip(row, names, strict=True) for n in own)
    return text.getvalue()


def _heading(heading: str, name: str, own: Sequence[str]) -> str:
    return heading if not name or own == ["value"] else f"{heading}: {name}"


def _names(column: Iterable[Mapping[str, str]]) -> list[str]:
    """The columns that one column becomes: one, where any of its cells is a text of another kind."""
    found = {name for cell in column for name in cell}
    if "" not in found:
        return [name for name in _ORDER if name in found]
    return ["", *(name for name in _ORDER if name in found)]


def _parts(text: str) -> dict[str, str]:
    """Name -> number of what a cell holds; ``{"": text}`` of one of another form."""
    if not text:
        return {}
    for form in _FORMS:
        if found := form.fullmatch(text):
            parts = {name: part for name, part in found.groupdict().items() if part is not None}
            return {name: part if name == "text" else _plain(part) for name, part in parts.items()}
    return {"": text}


def _plain(number: str) -> str:
    """As Python reads it: 2^-29.0 computed, 15 % as 0.15."""
    text = number.replace(",", "")
    if text.endswith(" %"):
        return f"{float(text[:-2]) / 100:g}"
    return repr(2.0 ** float(text[2:])) if text.startswith("2^") else text.removeprefix("+")
