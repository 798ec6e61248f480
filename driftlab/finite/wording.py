"""What a gradient check found, in sentences with their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence

from driftlab.finite.differences import LIMIT, UNIT, Difference, Slope
from driftlab.finite.point import Point
from driftlab.finite.suspect import Suspect


def seen(found: Sequence[Difference]) -> float:
    """The least error that would have failed, relative to the gradient along a typical direction."""
    return max((LIMIT * d.uncertain / d.size if d.size else math.inf for d in found), default=math.inf)


def passed(worst: Difference, found: Sequence[Difference], point: Point) -> str:
    numbers = sum(t.numel() for t in point.leaves.values())
    return (
        f"autograd and central differences agree along {len(found)} random directions of all {numbers:,} "
        f"numbers, within {worst.ratio:.2g} times their uncertainty ({LIMIT:g} would fail); an error of "
        f"{seen(found):.1g} of the gradient would have been seen"
    )


def failed(worst: Difference, suspect: Suspect | None) -> str:
    size = (
        f"along a random direction the two are {apart(worst)}, {worst.ratio:.2g} times what round-off, "
        f"truncation and kinks explain ({LIMIT:g} would pass)"
    )
    if suspect is None:
        return f"the gradient is wrong, too little in any one place to name it: {size}"
    right = f"; all from {suspect.next_right} on are right" if suspect.next_right else ""
    return (
        f"the gradient of {suspect} is wrong: autograd {suspect.autograd:.4g}, measured "
        f"{suspect.measured:.4g} ({suspect.how}){right}; {size}"
    )


def apart(worst: Difference) -> str:
    if not worst.size:
        return f"{abs(worst.off):.2g} apart (absolute; autograd gives zero)"
    return f"{abs(worst.off) / worst.size:.2g} of the gradient apart"


def lost(difference: Difference, point: Point) -> str:
    if difference.flips:
        return f"{difference.flips} pre-activations flip sign however small the step: there is no derivative"
    raised = f": {point.complaint}" if point.complaint else ""
    return f"the loss is not finite, or does not run, right beside the point{raised}"


def blind(found: Sequence[Difference], slope: Slope) -> str:
    worst = max(found, key=lambda d: d.uncertain / d.size if d.size else math.inf)
    narrow = slope.point.narrow()
    if narrow is not None:
        why = f"something on the way computes in {str(narrow).removeprefix('torch.')}"
    elif worst.wild or worst.noisy(slope.start):
        why = (
            "at every step the loss jumps, oscillates, has kinks that do not show in its graph, or depends "
            "on earlier calls"
        )
    elif slope.start and worst.noise > 16 * UNIT * abs(slope.start):
        why = f"rounding grows to {worst.noise / abs(slope.start):.1g} of the loss on the way to it"
    else:
        why = (
            f"the loss, {slope.start:.2g}, moves too little for its size: leave out of it what does not "
            "depend on what is moved"
        )
    return (
        f"nothing below {seen(found):.1g} of the gradient could be seen: along a random direction the "
        f"gradient is {worst.size:.1g}, its difference uncertain by {worst.uncertain:.1g}; {why}"
    )
