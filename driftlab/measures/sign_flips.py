"""How many pre-activations lie on the other side of a kink than in an arm's against."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.measures.measure import DRIFT, Measure, Scale

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


def counted(own: Seen, against: Seen) -> Tensor | None:
    from driftlab.arithmetic.kinks import sign_flips

    return sign_flips(own.sides, against.sides)


MEASURE = Measure(
    name="sign_flips",
    title="Sign flips",
    unit="pre-activations",
    order=50,
    section=DRIFT,
    measure=counted,
    compared=True,
    scale=Scale.COUNT,
    figure=True,
)
