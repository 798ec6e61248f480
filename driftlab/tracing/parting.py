"""Where two networks part whose modules cannot be paired: by the values that pass through them.

A candidate built in another way, under other names, still has to come by what the reference computes. So all
that either makes on its way is recorded (``flow``). From the loss one goes up the flow of the reference,
through values that the candidate never has, until each is made of values that it has: there they part. What a
rewrite computes in another way and rightly leads to a value that both have, and is not come by. The same from
the candidate's side gives the place under its own name; the flow of the gradients, from those that are wrong,
gives a fault of the backward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import nn

from driftlab.arithmetic.constants import WITHIN, nudged
from driftlab.arithmetic.passes import Recorded
from driftlab.blame import unless_ours
from driftlab.fold import Fold
from driftlab.rounding import UNIT_ROUND_OFF
from driftlab.tracing.cone import Cone
from driftlab.tracing.flow import Flow, Value
from driftlab.tracing.prints import AGREE, prints
from driftlab.tracing.running import FORWARD, Again, flow_of
from driftlab.tracing.shared_rows import BothRows, rows_of
from driftlab.tracing.silencing import Silencing

Right = Callable[[str], bool]
# By so many of the reference's own roundings may a right value's sums differ. bfloat16 makes thousands, fewer
# where few numbers went through it: of three such faults three were placed at 5 and 8, two at 20, one at 90.
OWN_ROUNDINGS = 8
# What is moved by rounding is looked at as a whole.
WHOLE = partial(prints, sliced=False)


@dataclass(frozen=True)
class Traced:
    """One network of the two.

    Attributes:
        ends: its outputs that are wrong, its parameters and inputs whose gradients are, by name.
        right: whether a module, by its name, is known to be right by itself.
        constants: its tensors that the other has no equal of.
    """

    network: nn.Module
    ends: Sequence[str]
    right: Right
    constants: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Parted:
    """Where two networks part.

    Attributes:
        module: the innermost one of the reference in which they do; "" is the network's own code.
        candidate_module: that of the candidate, if it is seen.
        rows: those of each that the other has, where that leaves some out.
        gives_what_is_there: whether the candidate has all that a module of the reference's hands on.
    """

    module: str
    candidate_module: str | None
    rows: BothRows
    gives_what_is_there: Callable[[str], bool]


def parting(
    reference: Traced,
    candidate: Traced,
    whole: Recorded,
    arithmetic: str,
    pass_: str,
    seed: int = 0,
    fold: Fold | None = None,
) -> Parted | None:
    """Where the two part; None where nothing is seen to part.

    Args:
        arithmetic: in which rounding is gone; "float32" to see where bits are lost.
        pass_: "forward" or "eval"; any other is the backward pass.
        fold: of the two; where they part in several modules, these are silenced in both to see which it is.
    """
    both = reference, candidate
    records = [partial(flow_of, traced.network, whole, arithmetic, pass_, seed) for traced in both]
    flows = [record() for record in records]
    rows = rows_of(*records, *flows) if pass_ in FORWARD else (None, None)
    if any(rows):
        flows = [record(look=partial(prints, rows=own)) for record, own in zip(records, rows, strict=True)]
    margins = [_margins(t, f, whole, arithmetic, pass_, seed) for t, f in zip(both, flows, strict=True)]
    for narrower in (1, 4, 16):  # what is known to be wrong may not be taken for the same
        mine, theirs = (
            Cone(own, other, traced.ends, traced.right, [max(AGREE, w / narrower) for w in within])
            for own, other, traced, within in zip(flows, reversed(flows), both, margins, strict=True)
        )
        if mine.first:
            backward = pass_ not in FORWARD
            if fold is not None and not backward and len(mine.begun()) > 1:
                again = partial(Again, whole=whole, arithmetic=arithmetic, pass_=pass_, seed=seed)
                silencing = Silencing((reference.network, candidate.network), flows, fold, again)
                mine.keep(silencing.survivors(mine))
            scope, beside = mine.scope(backward and theirs.is_cut(mine)), theirs.scope_beside(mine)
            return Parted(scope, beside, rows, mine.gives_what_is_there)
    return None


def _margins(
    traced: Traced, flow: Flow, whole: Recorded, arithmetic: str, pass_: str, seed: int
) -> list[float]:
    """How far from each value that of the other may lie, for constants that one of them stores in float32."""
    if arithmetic == "float32":
        return _roundings(flow, flow_of(traced.network, whole, "shadow", pass_, seed, look=WHOLE))
    if arithmetic != "shadow":
        return [AGREE] * len(flow.values)
    twin, generator = nudged(traced.network, traced.constants)
    moved: list[Value] = []
    for nudge in (generator, None):  # of a table that is moved a network may make an index of nothing
        with unless_ours():
            moved = flow_of(twin, whole, arithmetic, pass_, seed, nudge, look=WHOLE).values
            break
    if len(moved) != len(flow.values):
        return [AGREE] * len(flow.values)
    pairs = ((v.prints, m.prints) for v, m in zip(flow.values, moved, strict=True))
    return [max(AGREE, WITHIN * a.apart(b)) if a and b else AGREE for a, b in pairs]


def _roundings(flow: Flow, exact: Flow) -> list[float]:
    """Some times what float32's rounding makes of each value's prints; as little as makes any at all.

    The loss may be computed in other operations without rounding, and counts as the last value before it.
    """
    found = [AGREE]
    for number, value in enumerate(flow.values):
        other = exact.values[number].prints if number < len(exact.values) else None
        if value.prints and other and value.prints.whole[0] == other.whole[0]:
            least = UNIT_ROUND_OFF["float32"] / 2 / math.sqrt(other.whole[0])
            found.append(OWN_ROUNDINGS * max(value.prints.apart(other), least))
        else:
            found.append(found[-1])
    return found[1:]
