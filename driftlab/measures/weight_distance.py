"""How far the weights of an arm are from those of its against, after folding."""

from driftlab.measures.measure import DRIFT, Measure, Scale

MEASURE = Measure(
    name="weight_distance",
    title="Weight distance",
    unit="relative",
    order=20,
    section=DRIFT,
    measure=lambda own, _: own.distance("weight"),
    compared=True,
    scale=Scale.DISTANCE,
    figure=True,
    axis="‖Δθ‖₂ / ‖θ_ref‖₂ (relative)",
)
