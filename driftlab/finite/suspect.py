"""Which gradient is wrong, how, and in which element: by halving what is moved."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from driftlab.finite.differences import LIMIT, Difference, Slope
from driftlab.finite.point import Move
from driftlab.fold.layout import index_of

# Two factors whose distances from one agree to this share are the same; by chance, with errors of
# independent sign and size, once in about a thousand.
SAME_FACTOR = 1e-3


@dataclass(frozen=True)
class Suspect:
    """A wrong gradient.

    Attributes:
        leaf: the last wrong one in the order of inputs and parameters, so the nearest to the loss where a
            network lists its parameters in the order of its forward pass.
        next_right: the leaf after it, from which on all are right; None where it is the last.
        autograd, measured: the derivative by that element, or along a random direction of the leaf.
        how: in words.
        index: of an element whose own derivative is wrong, where a single one shows.
    """

    leaf: str
    next_right: str | None
    autograd: float
    measured: float
    how: str
    index: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.leaf}[{', '.join(map(str, self.index))}]" if self.index else self.leaf


def find_suspect(slope: Slope, wrong: Difference, direction: Move, other: Move) -> Suspect | None:
    """The suspect behind a failed check; None where no gradient fails by itself.

    Args:
        wrong: what ``direction`` gave, for its step.
        other: another direction of the same leaves.
    """

    def fails(move: Move) -> bool:
        found = slope.measure(move, wrong.step)
        return found.usable and found.ratio > LIMIT

    leaf, following = _last_wrong(direction, fails)
    if not fails({leaf: direction[leaf]}):
        return None
    one, two = (slope.measure({leaf: d[leaf]}, wrong.step) for d in (direction, other))
    suspect = Suspect(leaf, following, one.autograd, one.measured, "many elements, each by another factor")
    if not slope.gradient[leaf].any():
        return replace(suspect, how="autograd gives zero: detached, or its gradient dropped")
    factor = _common_factor(one, two)
    if factor is not None:
        return replace(suspect, how=f"{_times(factor)} in every direction")
    size = float(direction[leaf].abs().mean())
    index = _element(slope.gradient[leaf], slope.point.movable[leaf], size, lambda t: fails({leaf: t}))
    if index is None:
        return suspect
    move = torch.zeros_like(direction[leaf])
    move[index] = size
    found = slope.measure({leaf: move}, wrong.step)
    by_one = {"autograd": found.autograd / size, "measured": found.measured / size}
    return replace(suspect, index=index, how=_in_words(found), **by_one)


def _last_wrong(direction: Move, fails: Callable[[Move], bool]) -> tuple[str, str | None]:
    """The last wrong leaf, and the one after it."""
    names = list(direction)
    low, high = 0, len(names) - 1  # the answer lies in between
    while low < high:
        middle = (low + high + 1) // 2
        if fails({n: direction[n] for n in names[middle:]}):
            low = middle
        else:
            high = middle - 1
    return names[low], names[low + 1] if low + 1 < len(names) else None


def _common_factor(one: Difference, two: Difference) -> float | None:
    """Autograd's derivative over the measured one, where two directions agree on how far that is from 1."""
    if not (one.measured and two.measured and one.usable and two.usable):
        return None
    first, second = one.autograd / one.measured, two.autograd / two.measured
    # what noise leaves open of either counts for nothing
    open_to_noise = max(abs(d.uncertain / d.measured) for d in (one, two))
    same = abs(first - second) <= max(SAME_FACTOR * abs(1 - first), 4 * open_to_noise)
    return first if same else None


def _times(factor: float) -> str:
    if abs(factor - 1) >= SAME_FACTOR:
        return f"autograd gives {factor:.4g} times the derivative"
    return f"autograd is too {'large' if factor > 1 else 'small'} by {abs(factor - 1):.1e} of it"


def _element(
    gradient: Tensor, movable: Tensor, size: float, fails: Callable[[Tensor], bool]
) -> tuple[int, ...] | None:
    """The index of an element that is wrong by itself; None where no single one shows."""
    places = movable.reshape(-1).nonzero().reshape(-1)

    def move(start: int, stop: int) -> Tensor:
        out = torch.zeros(gradient.numel(), dtype=gradient.dtype, device=gradient.device)
        out[places[start:stop]] = size
        # signs alternate: a forward pass that takes the mean away does not feel all of them move alike
        out[places[start + 1 : stop : 2]] = -size
        return out.view(gradient.shape)

    low, high = 0, len(places)
    while high - low > 1:
        middle = (low + high) // 2
        if fails(move(low, middle)):
            high = middle
        elif fails(move(middle, high)):
            low = middle
        else:
            return None
    return index_of(int(places[low]), gradient.shape) if fails(move(low, high)) else None


def _in_words(found: Difference) -> str:
    if abs(found.off + 2 * found.autograd) <= SAME_FACTOR * abs(found.autograd):
        return "wrong sign"
    if found.autograd == 0:
        return "autograd gives zero there"
    if abs(found.measured) <= SAME_FACTOR * abs(found.autograd):
        return "the loss does not move with it"
    return f"{_times(found.autograd / found.measured)} there"
