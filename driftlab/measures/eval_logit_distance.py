"""How far the outputs of an arm are from those of its against, in eval mode."""

from driftlab.measures.logit_distance import between_outputs
from driftlab.measures.measure import TEST_SET, Measure, Moment, Scale

MEASURE = Measure(
    name="eval_logit_distance",
    title="Logit distance in eval mode",
    unit="relative",
    order=30,
    section=TEST_SET,
    measure=between_outputs,
    compared=True,
    scale=Scale.DISTANCE,
    moment=Moment.EVALUATION,
)
