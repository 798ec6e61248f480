"""Which output of the candidate stands for which of the reference's.

Two networks may return the same numbers in other containers: a tensor, a tuple, a dict, an object with named
fields. Their leaves are paired by name; what is left by place, shape and value. Values only choose among
several leaves of one shape: one that is alone of its shape is paired however far off it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from driftlab.fold.layout import relative_distance
from driftlab.refusing import shown
from driftlab.words import DiagnoseError

Leaves = Mapping[str, Tensor]
ByHand = Mapping[str, str | None]
# Leaves nearer than this are taken for the same one, where names and places do not tell: float32, bfloat16
# and a fault of a few per cent are, two different quantities are not.
NEAR = 0.1


class Outputs:
    """The pairs of leaves of two networks, by the names of ``named_leaves``.

    Containers that were met once are paired alike ever after, so that a training that moves the values pairs
    no two others.

    Args:
        given: the reference's leaf -> the candidate's, by hand; None for one that is not to be compared.
    """

    def __init__(self, given: ByHand | None = None):
        self.given = dict(given or {})
        self._known: dict[tuple[tuple[str, ...], ...], dict[str, str]] = {}

    def of(
        self, theirs: Leaves, mine: Leaves, plain: Callable[[Tensor], Tensor] = lambda t: t.detach().double()
    ) -> dict[str, Tensor]:
        """The candidate's leaves by the names of the reference's, in their order; less those that stand for
        none.

        Args:
            plain: gives a leaf of the candidate as plain numbers.
        """
        pairs = self._pairs(theirs, mine, plain)
        return {name: theirs[pairs[name]] for name in mine if name in pairs}

    def left_out(self, name: str) -> bool:
        """Whether the reference's leaf is not to be compared, by hand."""
        return name in self.given and self.given[name] is None

    def renamed(self) -> dict[str, str]:
        """The reference's leaf -> the candidate's, of those that go by another name."""
        return {m: t for pairs in self._known.values() for m, t in pairs.items() if m != t}

    def check(self, theirs: Iterable[str], mine: Iterable[str]) -> None:
        """Raises DiagnoseError where a name that was given by hand is that of no leaf."""
        theirs, mine = list(theirs), list(mine)
        for role, known, asked in (
            ("reference", mine, self.given),
            ("candidate", theirs, [n for n in self.given.values() if n is not None]),
        ):
            for name in asked:
                if name not in known:
                    raise DiagnoseError(
                        f"outputs: the {role} returns no {shown(name)}; it returns "
                        f"{listed(known) or 'no tensor'}"
                    )

    def _pairs(self, theirs: Leaves, mine: Leaves, plain: Callable[[Tensor], Tensor]) -> dict[str, str]:
        key = tuple(mine), tuple(theirs)
        if key not in self._known:
            self._known[key] = _matched(mine, theirs, self.given, plain)
        return self._known[key]


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names of leaves in a sentence; that of a tensor that is returned by itself is empty."""
    kept = [f"`{n}`" if n else "the tensor itself" for n in names]
    more = [f"{len(kept) - most} more"] if len(kept) > most else []
    return ", ".join(kept[:most] + more)


def _is_place(name: str) -> bool:
    """Whether it says where a leaf stands, and has no word for what it is."""
    return re.fullmatch(r"(\[\d+\])*", name) is not None


def _matched(
    mine: Leaves, theirs: Leaves, given: ByHand, plain: Callable[[Tensor], Tensor]
) -> dict[str, str]:
    """The reference's leaf -> the candidate's."""
    pairs = {m: t for m, t in given.items() if m in mine and t in theirs}
    free = [m for m in mine if m not in given]
    others = [t for t in theirs if t not in pairs.values()]
    same = set(mine) == set(theirs)
    for name in [n for n in free if n in others]:
        # a place in other containers is a name only where the shapes agree
        if same or not _is_place(name) or mine[name].shape == theirs[name].shape:
            pairs[name] = name
            others.remove(name)
    free = [m for m in free if m not in pairs]
    for shape in dict.fromkeys(mine[m].shape for m in free):
        alike = [m for m in free if mine[m].shape == shape], [t for t in others if theirs[t].shape == shape]
        pairs |= _of_one_shape(*alike, mine, theirs, plain)
    return pairs


def _of_one_shape(
    free: list[str], others: list[str], mine: Leaves, theirs: Leaves, plain: Callable[[Tensor], Tensor]
) -> dict[str, str]:
    """Near ones first; the rest in the order in which they are returned, where there are as many."""
    pairs: dict[str, str] = {}
    if len(free) == len(others) and (len(free) == 1 or all(map(_is_place, free + others))):
        return dict(zip(free, others, strict=True))
    apart = {(m, t): float(relative_distance(plain(theirs[t]), plain(mine[m]))) for m in free for t in others}
    ranked = sorted(apart, key=lambda pair: apart[pair] if apart[pair] >= 0 else float("inf"))

    def take(candidates: Iterable[tuple[str, str]]) -> None:
        for m, t in candidates:
            if m not in pairs and t not in pairs.values():
                pairs[m] = t

    take(pair for pair in ranked if apart[pair] < NEAR)
    left = [m for m in free if m not in pairs], [t for t in others if t not in pairs.values()]
    take(zip(*left, strict=True) if len(left[0]) == len(left[1]) else ranked)
    return pairs
