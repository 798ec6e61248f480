"""How far the outputs of an arm are from those of its against, in training mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.measures.measure import DRIFT, Measure, Scale

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


def between_outputs(own: Seen, against: Seen) -> Tensor | None:
    """Over the outputs that both return; None where there is none, or one of other numbers of numbers."""
    from driftlab.fold.layout import flat, relative_distance

    names = [name for name in against.leaves if name in own.leaves]
    mine, theirs = (flat(seen.leaves[name] for name in names) for seen in (own, against))
    return relative_distance(mine, theirs) if len(mine) and mine.shape == theirs.shape else None


MEASURE = Measure(
    name="logit_distance",
    title="Logit distance",
    unit="relative",
    order=40,
    section=DRIFT,
    measure=between_outputs,
    compared=True,
    scale=Scale.DISTANCE,
)
