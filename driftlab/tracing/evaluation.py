"""Where two networks part in evaluation alone: at what the other comes by in training, and lacks there.

Training is the control: there the two make the same values, which tells what the other comes by. What it
comes by there and not in evaluation is lost, and where that begins the two part. What a rewrite evaluates in
another way and rightly (a norm folded into a layer) leads to a value that both have, and is not come by.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from driftlab.tracing.flow import reached
from driftlab.tracing.kept import Kept
from driftlab.tracing.prints import Prints, Seen
from driftlab.tracing.running import Again

# One network's passes, by their names.
Passes = Callable[[str], Again]


@dataclass(frozen=True)
class Lost:
    """Attributes:
    modules: those that make the first values that are lost; none where that is not seen.
    in_part: whether the other network makes some rows of one in evaluation, and not others.
    """

    modules: frozenset[str] = frozenset()
    in_part: bool = False


def lost(mine: Passes, theirs: Passes) -> Lost:
    """What of one network's values the other loses first in evaluation."""
    own, others = ({pass_: Kept(runs(pass_)) for pass_ in ("forward", "eval")} for runs in (mine, theirs))
    if any(kept.full for kept in (*own.values(), *others.values())):
        return Lost()
    evaluated, trained = own["eval"], others["forward"]
    evaluated.compare(others["eval"])
    values, results = evaluated.flow.values, evaluated.flow.results.values()
    again = _again(own["forward"], evaluated)
    before = {n: p for m, n in again.items() if (p := own["forward"].flow.values[m].prints) and p.telling}
    found: set[int] = set()
    for has, lacked, had in (
        (evaluated.shared.__getitem__, evaluated.lacked, trained.seen.has),
        (evaluated.has_whole, evaluated.lacked_whole, trained.seen.find_whole),
    ):
        on_the_way = reached((n for n in results if not has(n)), lacked)
        found |= {n for n in on_the_way & before.keys() if had(before[n]) and not values[n].weight}
    first = found - reached((u for n in found for u in evaluated.uses[n]), evaluated.uses.__getitem__)
    first = evaluated.fed(first) or first  # of fewer rows there are fewer positions
    there = others["eval"]
    made = _again(trained, there)
    alike = ((n, made[m]) for n in first for m in trained.seen.find_whole(before[n]) if m in made)
    resized = any(there.flow.values[m].size != values[n].size for n, m in alike)
    in_part = resized or any(_is_there_in_part(values[n].prints, there.seen) for n in first)
    return Lost(frozenset(values[n].scope for n in first), in_part)


def _is_there_in_part(prints: Prints | None, seen: Seen) -> bool:
    slices = [[bool(seen.find(one)) for one in axis] for axis in (prints.slices if prints else ())]
    return any(any(axis) and not all(axis) for axis in slices)


def _again(trained: Kept, evaluated: Kept) -> dict[int, int]:
    """Of the values that are made in training, those that the same code makes in evaluation.

    Or the same operation of the module, where evaluation has a line of its own.
    """
    found: dict[int, int] = {}
    for by_line in (False, True):
        made = {told: number for number, told in evaluated.turns.told(by_line).items()}
        found |= {n: made[told] for n, told in trained.turns.told(by_line).items() if told in made}
    return found
