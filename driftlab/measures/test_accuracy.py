"""The share of the test set that an arm classifies rightly."""

from driftlab.measures.accuracy import share_right
from driftlab.measures.measure import TEST_SET, Measure, Moment

MEASURE = Measure(
    name="test_accuracy",
    title="Test accuracy",
    unit="share of the test set",
    order=10,
    section=TEST_SET,
    measure=share_right,
    moment=Moment.EVALUATION,
)
