"""Where one network stops to come by what the other computes, be it in another order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from driftlab.mistakes.call_modes import parts
from driftlab.mistakes.orders import JOINS, MOVES
from driftlab.mistakes.torch_call import Call
from driftlab.tracing.prints import Seen, prints
from driftlab.tracing.rows import Rows

# They give some of the numbers that they are given.
TAKES = (
    "getitem",
    "index_select",
    "gather",
    "take_along_dim",
    "chunk",
    "split",
    "unbind",
    "select",
    "narrow",
)


def comes_by(seen: Seen, values: Any, rows: Rows | None = None) -> bool | None:
    """Whether all of them were come by, in any order; None of what holds no floating numbers.

    Args:
        rows: those that the other network has, where it leaves some out.
    """
    found = [p for t in parts(values) if (p := prints(t, rows)) is not None]
    return all(map(seen.find_whole, found)) if found else None


def same_numbers(one: Any, other: Any) -> bool:
    """In any order."""
    found = [[prints(t) for t in parts(values)] for values in (one, other)]
    pairs = zip(*found, strict=False)
    return all(a and b and a.same(b) for a, b in pairs)


class Frontier:
    """Calls whose result the other network comes by, while it lacks what is made of it.

    Then the numbers may be right and their order is not, which shows in what is made of them.

    Args:
        seen: the values of the other network.
        rows: as of ``comes_by``.

    Attributes:
        had: whether it comes by the result of a call, in any order, by the call's number.
    """

    def __init__(self, seen: Seen, rows: Rows | None = None):
        self._seen, self.rows = seen, rows
        self.had: dict[int, bool | None] = {}
        self._read: dict[int, set[int]] = {}
        self._in_order: dict[int, set[int]] = {}
        self._moves: set[int] = set()
        self._takes: set[int] = set()
        self._made: dict[int, int] = {}  # by the tensor's id
        self._alive: list[Tensor] = []

    def watch(self, number: int, call: Call, earlier: Sequence[Tensor]) -> Any:
        out = call.run()
        self.had[number] = comes_by(self._seen, out, self.rows)
        self._read[number] = self._makers(call.tensors)
        self._in_order[number] = self._makers(_gives_its_order(call, out))
        if _moves(call):
            self._moves.add(number)
        if _moves(call) or call.name in TAKES:
            self._takes.add(number)
        for tensor in parts(out):
            self._made[id(tensor)] = number
            self._alive.append(tensor)  # so that nobody else gets its id
        return out

    def _makers(self, tensors: Sequence[Tensor]) -> set[int]:
        return {self._made[id(t)] for t in tensors if id(t) in self._made}

    def calls(self) -> dict[int, bool]:
        """And those whose order is theirs. Whether that order is a call's own, or moved by it."""
        users: dict[int, list[int]] = {number: [] for number in self.had}
        for number, read in self._read.items():
            for made in read:
                users[made].append(number)
        found = {
            number
            for number, had in self.had.items()
            if had and (not users[number] or any(self.had[user] is False for user in users[number]))
        }
        for number in sorted(self.had, reverse=True):
            if number in found:
                found |= {made for made in self._in_order[number] if self.had[made]}
        return {n: n in self._moves or not self._in_order[n] & found for n in found}

    def beyond(self) -> set[int]:
        """Calls that make something else of what the other network comes by, be it of a part or a copy."""
        steps: dict[int, int] = {}
        for number, had in self.had.items():
            before = max((steps[made] for made in self._read[number]), default=0)
            steps[number] = 0 if had is not False else before + (number not in self._takes)
        return {number for number, had in self.had.items() if had is False and steps[number] <= 1}


def _moves(call: Call) -> bool:
    return call.name in (*MOVES, *JOINS)


def _gives_its_order(call: Call, out: Any) -> list[Tensor]:
    """The operands whose order the result has: what is moved, joined or parted, or taken number by number."""
    if _moves(call) or call.name in TAKES:
        return call.tensors
    alike = [t for t in call.tensors if isinstance(out, Tensor) and t.shape == out.shape]
    return alike if len(alike) == 1 else []
