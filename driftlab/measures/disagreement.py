"""The share of the test set on which an arm and its against predict different classes (churn)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.measures.measure import TEST_SET, Measure, Moment

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


def share_apart(own: Seen, against: Seen) -> Tensor | None:
    if own.classes is None or against.classes is None:
        return None
    return own.share(own.classes != against.classes)


MEASURE = Measure(
    name="disagreement",
    title="Disagreement",
    unit="share of the test set",
    order=20,
    section=TEST_SET,
    measure=share_apart,
    compared=True,
    moment=Moment.EVALUATION,
)
