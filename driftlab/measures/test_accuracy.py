"""The share of the test images that an arm classifies rightly."""

from driftlab.measures.accuracy import share_right
from driftlab.measures.measure import TEST_IMAGES, Measure, Moment

MEASURE = Measure(
    name="test_accuracy",
    title="Test accuracy",
    unit="share of test images",
    order=10,
    section=TEST_IMAGES,
    measure=share_right,
    moment=Moment.EVALUATION,
)
