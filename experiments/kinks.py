"""The kind of experiment that trains networks with and without kinks, and predicts their sign flips."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.kinks.answer import answer
from experiments.questions.kinks.judged import judged
from experiments.questions.kinks.measure import about, measure
from experiments.questions.question import Question

QUESTION = Question(measure=measure, answer=answer, about=about, judge=judged, trains=True)


def run(config: DictConfig) -> Ran:
    """Drift, sign flips and their prediction for each network, in float32 and float64."""
    return ask(config, QUESTION)
