"""How many updates the scaler of an arm's loss has left out, since a scaled gradient was NaN or inf."""

from __future__ import annotations

from typing import TYPE_CHECKING

from driftlab.measures.measure import TRAINING, Measure, Scale

if TYPE_CHECKING:
    from torch import Tensor

    from driftlab.lockstep.seen import Seen


def counted(own: Seen, _: Seen | None) -> Tensor | None:
    import torch

    return None if own.arm.scaler is None else torch.tensor(float(own.arm.skipped))


MEASURE = Measure(
    name="skipped_updates",
    title="Updates that the loss scaler skipped",
    unit="",
    order=15,
    section=TRAINING,
    measure=counted,
    scale=Scale.COUNT,
    dtype="16-mixed",
)
