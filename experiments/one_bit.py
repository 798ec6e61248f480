"""The kind of experiment that trains one network again and again, with one thing varied at a time."""

from __future__ import annotations

from omegaconf import DictConfig

from experiments.outcome import Ran
from experiments.questions.asking import ask
from experiments.questions.one_bit.answer import answer
from experiments.questions.one_bit.judging import judged
from experiments.questions.one_bit.measure import about, measure
from experiments.questions.question import Question

QUESTION = Question(measure=measure, answer=answer, about=about, judge=judged, trains=True)


def run(config: DictConfig) -> Ran:
    """Train every row of every seed; the verdict is about the split, beside one moved weight."""
    return ask(config, QUESTION)
