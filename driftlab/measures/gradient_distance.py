"""How far the gradients of an arm are from those of its against, after folding."""

from driftlab.measures.measure import DRIFT, Measure, Scale

MEASURE = Measure(
    name="gradient_distance",
    title="Gradient distance",
    unit="relative",
    order=30,
    section=DRIFT,
    measure=lambda own, _: own.distance("gradient"),
    compared=True,
    scale=Scale.DISTANCE,
)
