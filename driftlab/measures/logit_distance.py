"""How far the outputs of an arm are from those of its against, in training mode."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.measures.measure import DRIFT, Measure, Scale

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


def between_outputs(own: Seen, against: Seen) -> Tensor | None:
    """None where the two return other numbers of numbers."""
    from driftlab.fold.layout import relative_distance

    if own.vector.shape != against.vector.shape:
        return None
    return relative_distance(own.vector, against.vector)


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
