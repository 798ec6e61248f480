"""From the differences of a gradient check to its outcome, in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from enum import StrEnum

import torch
from torch import Tensor

from driftlab.finite.differences import (
    FIRST_STEP,
    LIMIT,
    NOISY,
    Difference,
    Slope,
    leaf_sizes,
)
from driftlab.finite.point import Move, Point, random_direction
from driftlab.finite.suspect import Suspect, find_suspect
from driftlab.finite.wording import apart, blind, failed, lost, passed, seen

# A check that would miss an error of this share of the gradient is no check.
BLIND = 1e-3
# One that sees this little needs no other point; a kink near by may hide more, and up to so many are tried.
WELL = 1e-5
POINTS = 4
# So that equal steps do not fall on the steps of a narrower dtype.
UNEVEN = 0.77
# How far another point lies, in units of a random direction: far enough to leave a kink behind.
JITTER = 2.0**-10
BESIDE = " (beside the given point, which lies on a kink, close to one, or where the loss ends)"
# Leaves with less than this share of the gradient are looked at once more by themselves.
FAINT = 1e-3


class Outcome(StrEnum):
    """What a gradient check says; ``UNDECIDED`` is not a pass."""

    PASS = "pass"
    FAIL = "fail"
    UNDECIDED = "undecided"


Result = tuple[Outcome, str, Suspect | None, list[Difference]]


def decided(point: Point, gradient: Mapping[str, Tensor], directions: int, seed: int) -> Result:
    """At the given point; beside it, where that lies on a kink or too close to one to see anything."""
    first, second = point.start(), point.start()
    if not abs(first - second) <= NOISY * abs(first):
        reading = (
            "the loss is another one when it is computed again: it depends on random numbers that no seed "
            "reaches, or on what the network remembers"
        )
        return Outcome.UNDECIDED, reading, None, []
    generator = torch.Generator().manual_seed(seed)
    drawn = [random_direction(point, generator) for _ in range(directions)]
    slope, again = (Slope(point, gradient, abs(first - second)) for _ in range(2))
    kept = _at(slope, drawn, "")
    noisy = any(d.noisy(first) and _stays(again, v, d) for v, d in zip(drawn, kept[3], strict=False))
    for attempt in range(1, 1 if noisy else POINTS):
        if kept[0] is Outcome.FAIL or seen(kept[3]) <= WELL:
            break
        slope = _moved(point, {n: JITTER * v for n, v in drawn[attempt % directions].items()})
        tried = _at(slope, drawn, BESIDE) if slope else kept
        if tried[0] is Outcome.FAIL or seen(tried[3]) < seen(kept[3]):
            kept = tried
    return kept


def _stays(slope: Slope, direction: Move, found: Difference) -> bool:
    """Whether there is noise however small the step, other than that of a kink at the point itself."""
    return slope.measure(direction, found.step / 64).noise > found.noise / 8


def _moved(point: Point, move: Move) -> Slope | None:
    """From another point near by; None where the loss is not defined there."""
    before = dict(point.base)
    point.settle(move)
    try:
        slope = Slope(point, point.gradient())
    except Exception:  # whatever a stranger's forward raises
        slope = None
    if slope is None or not math.isfinite(slope.start):
        point.base = before
        return None
    return slope


def _at(slope: Slope, drawn: list[Move], beside: str) -> Result:
    found = [slope.best(drawn[0])]
    found += [slope.best(v, found[0].step) for v in drawn[1:]]
    unusable = next((d for d in found if not d.usable), None)
    if unusable is not None:
        return Outcome.UNDECIDED, lost(unusable, slope.point), None, []
    # noise is the loss's own: where a few numbers move it may not show, and is there all the same
    slope.noise = max(slope.noise, *(d.noise for d in found))
    faint, weak = _faint(slope, drawn, found)
    worst = max([*found, *faint], key=lambda d: d.ratio)
    if worst.ratio > LIMIT and worst.wild:
        return Outcome.UNDECIDED, blind(found, slope) + beside, None, found
    if worst.ratio > LIMIT:
        return _accused(slope, [*drawn, *weak], [*found, *faint], worst, beside, found)
    if not any(d.size for d in found):
        return Outcome.UNDECIDED, "autograd's gradient is zero, and no difference says otherwise", None, found
    if not seen(found) <= BLIND:
        return Outcome.UNDECIDED, blind(found, slope) + beside, None, found
    return Outcome.PASS, passed(worst, found, slope.point) + beside, None, found


def _faint(slope: Slope, drawn: list[Move], found: list[Difference]) -> tuple[list[Difference], list[Move]]:
    """The leaves that have so small a share that the others hide them, moved by themselves.

    Among them is every one that autograd gives no gradient.
    """
    sizes = leaf_sizes(slope.gradient, drawn[0])
    names = [n for n, size in sizes.items() if size < FAINT * found[0].size]
    if not names:
        return [], []
    moves = [{n: v[n] for n in names} for v in drawn[:2]]
    differences = [slope.best(v, found[0].step) for v in moves]
    usable = [(d, v) for d, v in zip(differences, moves, strict=True) if d.usable]
    return [d for d, _ in usable], [v for _, v in usable]


def _accused(
    slope: Slope, moves: list[Move], all_found: list[Difference], worst: Difference, beside: str, found: list
) -> Result:
    place = all_found.index(worst)
    direction = moves[place]
    narrow = slope.point.narrow()
    if narrow is not None and _rough(slope, direction):
        dtype = str(narrow).removeprefix("torch.")
        reading = (
            f"autograd and differences are {apart(worst)}, but something on the way computes in {dtype}, "
            "whose steps look like a wrong gradient: let it follow the dtype of its inputs"
        )
        return Outcome.UNDECIDED, reading + beside, None, found
    other = next(m for i, m in enumerate(moves) if i != place and m.keys() == direction.keys())
    suspect = find_suspect(slope, worst, direction, other)
    return Outcome.FAIL, failed(worst, suspect) + beside, suspect, found


def _rough(slope: Slope, direction: Move) -> bool:
    """Whether the loss shows the rounding of fewer bits than float64's along a direction."""
    first = slope.measure(direction, UNEVEN * FIRST_STEP)
    return not first.usable or first.stairs or first.noisy(slope.start)
