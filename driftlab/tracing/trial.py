"""Runs of the reference with values of the candidate's put in: which of them give its results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from driftlab.arithmetic.difference import distance
from driftlab.tracing.kept import Kept
from driftlab.tracing.pairs import orders
from driftlab.tracing.prints import AGREE
from driftlab.tracing.rewriting import instead
from driftlab.tracing.running import Again

# Runs of the reference at most, fewer of one that makes many numbers or many values.
RUNS, NUMBERS, VALUES = 400, 2e9, 1.5e6
# A value is put in as it lies, or with its axes turned, in so many of the ways that come nearest.
LAYOUTS = 2
# Values of the reference, each beside what is put in its place.
Change = dict[int, tuple[Tensor, Tensor]]
# Whether of results, by their names, these are the candidate's.
Agrees = Callable[[Mapping[str, Tensor], Collection[str]], bool]


class Trial:
    """Runs of the reference with values put in.

    Attributes:
        left: how many there still may be.
    """

    def __init__(self, mine: Again, own: Kept, agrees: Agrees, most: int = RUNS):
        self._mine, self._values, self._agrees, self._rows = mine, own.flow.values, agrees, own.rows
        self._steady = own.steady
        self.left = min(most, NUMBERS / max(1, own.size), VALUES / max(1, len(self._values)))

    def fit(self, changes: Iterable[Change]) -> Change | None:
        """The first that gives the candidate's results, and does not without its own first value."""
        return next((c for c in changes if any(map(self._fits, laid_out(c)))), None)

    def _fits(self, values: Mapping[int, Tensor]) -> bool:
        if not self.gives_theirs(values):
            return False
        _, *later = values
        return not later or not self.gives_theirs({number: values[number] for number in later})

    def gives_theirs(
        self, values: Mapping[int, Tensor], given: Mapping[int, tuple[Tensor, Tensor]] | None = None
    ) -> bool:
        """Whether it does with other values, or with operations that are given others, as of ``Rewriter``."""
        if self.left <= 0:
            return False
        self.left -= 1
        made_by = {number: self._values[number].made_by for number in values}
        changes = {(made_by[n][0], made_by[n][2]): instead(t, self._rows) for n, t in values.items()}
        try:
            ends = self._mine.results(changes, given)
        except Exception:  # it does not run so, wherever that shows
            return False
        return self._agrees(ends, self._steady)


def laid_out(change: Change) -> Iterator[dict[int, Tensor]]:
    """As it lies, or with its axes turned: what has its shape first, then the nearest, until it is there.

    Of several the first tells how, and all are turned so.
    """
    like, values = next(iter(change.values()))
    shaped = [(values.permute(order).reshape(like.shape), order) for order in orders(like, values)]
    shaped.sort(key=lambda one: distance(like, one[0]))
    size, tried = float(torch.linalg.vector_norm(like)), []
    for one, order in shaped:
        if len(tried) == LAYOUTS or any(torch.equal(one, t) for t in tried):
            continue
        if distance(like, one) <= AGREE * size:  # the same in the same order: nothing changes
            return
        tried.append(one)
        yield {n: other.permute(order).reshape(own.shape) for n, (own, other) in change.items()}
