"""The share of the batch that an arm classifies rightly, where this is a classification."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.measures.measure import TRAINING, Measure

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


def share_right(own: Seen, against: Seen | None = None) -> Tensor | None:
    """Of the targets that name a class; NaN where none does."""
    return None if own.classes is None else own.share(own.classes == own.targets)


MEASURE = Measure(
    name="accuracy",
    title="Accuracy on the batch",
    unit="share",
    order=60,
    section=TRAINING,
    measure=share_right,
)
