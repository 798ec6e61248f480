"""What one operation of a module makes again: in the turns of a loop, or in several calls of the module."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence

from driftlab.tracing.flow import Value

# The code that makes a value, the innermost line first.
Callers = tuple


class Turns:
    """Of the values of a flow, those that were kept.

    Args:
        called_by: of each of these.
        leading: what leads to the results.
    """

    def __init__(self, values: Sequence[Value], called_by: Mapping[int, Callers], leading: set[int]):
        self._called_by, self._leading = called_by, leading
        self._operations: dict[int, tuple] = {}
        self._made: defaultdict[tuple, list[int]] = defaultdict(list)
        for number in called_by:
            value = values[number]
            operation = value.scope, *value.made_by[1:], value.prints is None  # indices apart
            self._operations[number] = operation
            self._made[operation].append(number)

    def alike(self, number: int) -> list[int]:
        """All that the same operation of the module makes."""
        return self._made[self._operations[number]]

    def told(self, by_line: bool = True) -> dict[int, tuple]:
        """By what each is told from all others: the operation of a module, its line, and the turn."""
        turns: Counter[tuple] = Counter()
        found = {}
        for number, operation in self._operations.items():
            made_by = operation, self._called_by[number][:1] if by_line else ()
            turns[made_by] += 1
            found[number] = *made_by, turns[made_by]
        return found

    def again(self, number: int) -> list[list[int]]:
        """A value and those after it that its module makes so, and uses; at its line; called so; alone."""
        called_by = self._called_by[number]
        later = [n for n in self.alike(number) if n >= number and n in self._leading]
        line = [n for n in later if self._called_by[n][:1] == called_by[:1]]
        return [later, line, [n for n in line if self._called_by[n] == called_by], [number]]

    def at_one_line(self, of: Collection[int]) -> Iterator[list[int]]:
        """What one line makes again and again with one operation, of these values."""
        found: defaultdict[tuple, list[int]] = defaultdict(list)
        for number in of:
            found[self._operations[number], self._called_by[number][:1]].append(number)
        return (numbers for numbers in found.values() if len(numbers) > 1)
