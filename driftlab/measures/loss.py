"""The loss that an arm is trained by."""

from driftlab.measures.measure import TRAINING, Measure

MEASURE = Measure(
    name="loss",
    title="Training loss",
    unit="",
    order=10,
    section=TRAINING,
    measure=lambda own, _: own.loss,
    figure=True,
    axis="loss (of the batch)",
)
