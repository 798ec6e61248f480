"""How far the buffers of an arm (running statistics) are from those of its against, after folding."""

from driftlab.measures.measure import TEST_SET, Measure, Moment, Scale

MEASURE = Measure(
    name="buffer_distance",
    title="Buffer distance",
    unit="relative",
    order=40,
    section=TEST_SET,
    measure=lambda own, _: own.distance("buffer"),
    compared=True,
    scale=Scale.DISTANCE,
    moment=Moment.EVALUATION,
)
