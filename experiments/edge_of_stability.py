"""The kind of experiment that raises the learning rate until training falls over, and counts who does."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.edge.answer import answer
from experiments.questions.edge.judged import judged
from experiments.questions.edge.measure import about, measure
from experiments.questions.question import Question

QUESTION = Question(measure=measure, answer=answer, about=about, judge=judged, trains=True)


def run(config: DictConfig) -> Ran:
    """Train all arms at every learning rate, and count; the verdict is about the candidate."""
    return ask(config, QUESTION)
