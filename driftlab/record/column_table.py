"""The rows of a stored table, kept by column: eight bytes a number, so that a thousand seeds fit in memory.

A list of rows with their names takes nine times as much, and one column is found by a look at every row.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property

Row = Mapping[str, float]


class ColumnTable(Sequence[Row]):
    """A sequence of rows, each a mapping of column to value without its empty cells.

    Args:
        header: the names of the columns; of two of the same name the later one holds.
        lines: the cells of each line below the header as text, as many as that has.

    Attributes:
        header: as it was given, also of columns without a value.

    Raises:
        ValueError: a cell is neither empty nor a number; the message names its line and not what it holds.
    """

    def __init__(self, header: Sequence[str], lines: Sequence[Sequence[str]]):
        self.header, self._length = list(header), len(lines)
        self._columns: dict[str, tuple[Sequence[int], array]] = {}
        try:
            for name, cells in zip(header, zip(*lines, strict=True), strict=bool(lines)):
                rows = _filled(cells)
                values = array("d", map(float, cells if len(rows) == len(cells) else filter(None, cells)))
                self._columns[name] = rows, values
        except ValueError:
            _name_the_line(lines)
            raise

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index):
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(self._length))]
        row = range(self._length)[index]
        found = ((name, rows, values) for name, (rows, values) in self._columns.items())
        return {
            name: values[at]
            for name, rows, values in found
            if (at := bisect_left(rows, row)) < len(rows) and rows[at] == row
        }

    def __eq__(self, other: object) -> bool:
        return list(self) == list(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None

    def columns(self) -> Iterator[tuple[str, Sequence[float]]]:
        """Each column that has a value, and its values from top to bottom."""
        return ((name, values) for name, (_, values) in self._columns.items() if values)

    def column(self, name: str, missing: float) -> list[float]:
        """A value a row, ``missing`` where the cell is empty."""
        whole = [missing] * self._length
        for row, value in zip(*self._columns.get(name, ((), ())), strict=True):
            whole[row] = value
        return whole

    def series(self, column: str) -> dict[int, float]:
        """step -> value, where there is one. Raises KeyError where a row has no step."""
        rows, values = self._columns.get(column, ((), ()))
        if not values:
            return {}
        steps = self._steps
        if len(rows) == self._length:
            return dict(zip(steps, values, strict=True))
        return {steps[row]: value for row, value in zip(rows, values, strict=True)}

    @cached_property
    def _steps(self) -> array:
        rows, values = self._columns["step"]
        if len(rows) < self._length:
            raise KeyError("step")
        return array("q", map(int, values))


def _filled(cells: Sequence[str]) -> Sequence[int]:
    """Which cells are not empty; as a range where they stand together, which takes no room."""
    if "" not in cells:
        return range(len(cells))
    rows = [row for row, cell in enumerate(cells) if cell]
    together = range(rows[0], rows[-1] + 1) if rows else range(0)
    return together if len(together) == len(rows) else array("q", rows)


def _name_the_line(lines: Sequence[Sequence[str]]) -> None:
    for number, line in enumerate(lines, start=2):
        try:
            list(map(float, filter(None, line)))
        except ValueError:
            raise ValueError(f"line {number} holds what is no number") from None


def columns_of(table: Sequence[Row]) -> Iterable[tuple[str, Sequence[float]]]:
    """Each column and its values, of a stored table or of a list of rows."""
    if isinstance(table, ColumnTable):
        return table.columns()
    found: dict[str, list[float]] = {}
    for row in table:
        for column, value in row.items():
            found.setdefault(column, []).append(value)
    return found.items()


def series_of(table: Sequence[Row], column: str) -> dict[int, float]:
    """step -> value of one column where it was measured, of a stored table or of a list of rows."""
    if isinstance(table, ColumnTable):
        return table.series(column)
    return {int(row["step"]): row[column] for row in table if column in row}
