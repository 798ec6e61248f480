"""Tables whose cells are numbers, for whoever plots them: ``1.76 (1.08 to 2.19)`` is three columns.

A table for readers says a value with its range, or a count with its n, in one cell. Here each of these
numbers stands in a column of its own, named after the cell's: ``value``, ``low``, ``high``, ``n``, ``p``. A
share with an interval is ``value`` beside its ``count``.
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
        r"(?P<count>NUM) of (?P<n>NUM) \((?P<low>NUM %) to (?P<high>NUM %)\)",
        r"(?P<low>NUM) to (?P<high>NUM)",
        r"(?P<first>NUM) / (?P<second>NUM)(?: / (?P<third>NUM))?(?: \(p (?:=|<) (?P<p>NUM)\))?",
        r"(?P<text>[a-z_]+) \((?P<value>NUM)(?: of (?P<n>NUM))?\)",
    )
]
_ORDER = ("", "text", "count", "value", "low", "high", "n", "first", "second", "third", "p")


def numbers_apart(table: str) -> str | None:
    """A table, as CSV, with each number in a column of its own; None where each has one already.

    Digits are those of the cells. A cell of another form stays as it is, under its own heading.
    """
    headings, *rows = csv.reader(io.StringIO(table))
    columns = [_column(column) for column in zip(*rows, strict=True)]
    names = [_names(column) for column in columns]
    if all(len(own) < 2 for own in names):
        return None
    text = io.StringIO()
    apart = csv.writer(text, lineterminator="\n")
    apart.writerow(_heading(h, n, own) for h, own in zip(headings, names, strict=True) for n in own)
    for row in zip(*columns, strict=True):
        apart.writerow(cell.get(n, "") for cell, own in zip(row, names, strict=True) for n in own)
    return text.getvalue()


def _column(texts: Sequence[str]) -> list[dict[str, str]]:
    """The cells of one column; as they are where none holds several numbers, words beside numbers too."""
    cells = [_parts(text) for text in texts]
    names = {name for cell in cells for name in cell}
    return [{"": text} if text else {} for text in texts] if names == {"", "value"} else cells


def _heading(heading: str, name: str, own: Sequence[str]) -> str:
    return heading if not name or own == ["value"] else f"{heading}: {name}"


def _names(column: Iterable[Mapping[str, str]]) -> list[str]:
    """The columns that one column becomes: one, where any of its cells is a text of another kind."""
    found = {name for cell in column for name in cell}
    return [name for name in _ORDER if name in found]


def _parts(text: str) -> dict[str, str]:
    """Name -> number of what a cell holds; ``{"": text}`` of one of another form."""
    if not text:
        return {}
    for form in _FORMS:
        if match := form.fullmatch(text):
            parts = {name: part for name, part in match.groupdict().items() if part is not None}
            found = {name: part if name == "text" else _plain(part) for name, part in parts.items()}
            if "count" in found:  # its interval is one of the share
                found["value"] = f"{float(found['count']) / float(found['n']):g}"
            return found
    return {"": text}


def _plain(number: str) -> str:
    """As Python reads it: 2^-29.0 computed, 15 % as 0.15."""
    text = number.replace(",", "")
    if text.endswith(" %"):
        return f"{float(text[:-2]) / 100:g}"
    return repr(2.0 ** float(text[2:])) if text.startswith("2^") else text.removeprefix("+")
